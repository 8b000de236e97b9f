"""Who did what, when, to which run or release: one object for each action, never changed.

::

    triggers/audit/<day>/<request>-<what>.json
"""

import logging
from contextlib import suppress
from typing import Literal

from pydantic import AwareDatetime

from evernear.errors import ConflictError
from evernear.frozen import Frozen
from evernear.store import Store

AUDIT = "triggers/audit/"
_log = logging.getLogger(__name__)


class Line(Frozen):
    """One action of a person."""

    request: str
    """The id of the request; what is repeated after a crash leaves the same line."""
    at: AwareDatetime
    who: str
    what: str
    """The action, in a word: start, stop, promote, roll_back ..."""
    result: Literal["done", "refused", "failed"]
    where: str = ""
    """The channel."""
    run: str = ""
    release: str = ""
    detail: str = ""


def write(store: Store, line: Line) -> None:
    """Keep ``line``, and log it. One that is there already stays as it is.

    Raises:
        StoreError: the store cannot be reached.
    """
    key = f"{AUDIT}{line.at:%Y-%m-%d}/{line.request}-{line.what}-{line.result}.json"
    _log.info("audit %s", line.model_dump_json(exclude_defaults=True))
    with suppress(ConflictError):
        store.put_if(key, line.model_dump_json(indent=2).encode(), None)
