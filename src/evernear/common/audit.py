"""The audit log, which contains one immutable object in the store for each user action.

::

    triggers/audit/<day>/<request>-<action>-<result>.json
"""

import logging
from contextlib import suppress
from typing import Literal

from pydantic import AwareDatetime

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Document
from evernear.common.store import Store
from evernear.errors import ConflictError

AUDIT = "triggers/audit/"
Result = Literal["done", "refused", "failed"]
_log = logging.getLogger(__name__)


class AuditEvent(Document):
    request: str
    """Id of the request. If an action is repeated after a crash, the same object is written."""
    at: AwareDatetime
    who: str
    what: str
    result: Result
    where: str = ""
    run: str = ""
    release: str = ""
    detail: str = ""


def write(store: Store, event: AuditEvent) -> None:
    """Log ``event`` and store it. An event that is already stored is not overwritten."""
    _log.info("audit %s", event.model_dump_json(exclude_defaults=True))
    with suppress(ConflictError):
        key = f"{AUDIT}{event.at:%Y-%m-%d}/{event.request}-{event.what}-{event.result}.json"
        store.put_if(key, event.to_json(), None)


def request_id(kind: str, *subject: object) -> str:
    """The id for a request of the kind ``kind`` about ``subject``. Equal arguments give equal
    ids."""
    return f"{kind}-{sha256_bytes(repr(subject).encode())[:20]}"
