"""User requests and the watcher's requests, each an object in the store that changes by
compare-and-swap.

::

    pending ──> accepted ──> started ──> ended
       ├──────> declined        │
       ├──────> expired         │
       └───────────┴────────────┴──────> failed

A request to run a pipeline is pending until a person answers the prompt in Slack. All others start
in the accepted state. The id follows from the content, so duplicate deliveries, double clicks and
concurrent watchers compete for one conditional write. It is also the run's idempotency key in KFP
(`Request.key`). If a process stops between two states, the next process continues the request.
"""

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.errors import ConflictError, FormatError, IntegrityError

REQUESTS = "triggers/requests/"
RETENTION = timedelta(days=7)
"""Age at which finished user requests are removed. Slack retries a delivery for the last time after
an hour."""
TEXT_MAX_CHARACTERS = 2000
TRAINING = "continuous-training"

Kind = Literal["run", "stop", "promote", "roll_back", "help"]
State = Literal["pending", "accepted", "declined", "expired", "started", "ended", "failed"]
_NEXT: dict[State, tuple[State, ...]] = {
    "pending": ("accepted", "declined", "expired", "failed"),
    "accepted": ("started", "ended", "failed"),
    "started": ("ended", "failed"),
    "failed": ("accepted",),  # requested again
}
_log = logging.getLogger(__name__)


class Person(Frozen):
    """A member of the Slack workspace, or a component of evernear. Components have no id."""

    id: str
    name: str = ""

    def __str__(self) -> str:
        if not self.id:
            return self.name
        return f"{self.name} ({self.id} in Slack)" if self.name else f"{self.id} in Slack"


WATCHER = Person(id="", name="the watcher")
POLICY = Person(id="", name="the watcher's policy")
"""The `Person` that accepts the watcher's requests if ``watch.policy`` is ``start``."""


class Request(Document):
    id: Annotated[str, Field(pattern=r"^[^/\\.][^/\\]{0,127}$")]
    kind: Kind = "run"
    state: State = "accepted"
    created: AwareDatetime
    expires: AwareDatetime | None = None
    """When a pending request can no longer be answered. The watcher's ends with its causes."""
    asked_by: Person
    answered_by: Person | None = None
    answered: AwareDatetime | None = None
    attempt: int = 0

    pipeline: str = TRAINING
    text: str = ""
    """The settings of a run as the user typed them, or the beginning of the id of a run to stop."""
    parameters: dict[str, Any] = Field(default={})
    """Arguments of the run. They override the settings of the process that starts it."""
    causes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    figures: dict[str, float] = Field(default={})
    champion: str | None = None
    """The champion at the time of the watcher's request, if any."""
    listing: str = ""
    """A digest of the source listing at that time, with which later changes are detected."""
    seen: AwareDatetime | None = None
    """Time of the last check that found one of the request's causes."""
    grown: int = 0
    """Number of times that a cause became worse or was added while the proposal was pending."""
    shown: int = 0
    run: str = ""
    release: str = ""
    """The release to promote, or the champion to roll back."""
    move: int = 0
    """Number of the newest promotion when the button was shown. After a later one, it fails."""

    trigger: str = ""
    """Slack's id of the click or command. Duplicate deliveries have the same id."""
    channel: str = ""
    thread: str = ""
    """Timestamp of the message whose thread receives the answer. Empty without a thread."""
    message: str = ""
    """The address (``channel/ts``) of the message with the prompt, and later the run's status."""
    progress: str = ""
    verdict: str = ""
    is_closed: bool = False
    """Whether ``message`` says that the request was declined or has expired."""

    @property
    def key(self) -> str:
        return f"{self.id}-{self.attempt}" if self.attempt else self.id

    @property
    def is_open(self) -> bool:
        if self.state in ("declined", "expired"):
            return bool(self.message) and not self.is_closed
        return self.state in ("pending", "accepted", "started")

    @property
    def is_proposal(self) -> bool:
        return self.asked_by == WATCHER

    @property
    def by(self) -> Person:
        """The responsible person: whoever answered the request, or whoever made the request if it
        has not been answered."""
        return self.answered_by or self.asked_by

    @property
    def started_by(self) -> str:
        if self.asked_by.id or self.by == self.asked_by:
            return str(self.by)
        return f"{self.asked_by}, accepted by {self.by}"

    def is_expired(self, now: datetime) -> bool:
        return self.state == "expired" or (self.state == "pending" and self.expires is not None and now >= self.expires)


class RequestStore:
    """The requests in one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: dict[str, tuple[str, Request | None]] = {}
        """The etag and content of each object, keyed by the object's key, so that a poll reads only
        changed objects. None if not readable."""

    def add(self, request: Request) -> None:
        """Raises `ConflictError` if a request with this id exists."""
        self._store.put_if(_key(request.id), request.to_json(), None)

    def ids(self) -> list[str]:
        return [info.key.removeprefix(REQUESTS).removesuffix(".json") for info in self._store.list(REQUESTS)]

    def list(self) -> Iterator[Request]:
        """All requests, sorted by id. A request is logged once and skipped if it is damaged or
        comes from a different version of evernear."""
        for info in list(self._store.list(REQUESTS)):
            etag, request = self._cache.get(info.key, ("", None))
            if etag != info.etag:
                try:
                    _, request = self._read(info.key)
                except (IntegrityError, FormatError) as error:
                    _log.warning("%s", error)
                    request = None
                    self._cache[info.key] = (info.etag, request)
            if request is not None:
                yield request

    def find(self, request_id: str) -> Request | None:
        return self._read(_key(request_id))[1]

    def change(self, request: Request, **fields: object) -> Request:
        """Replace fields of ``request``. Raises `ConflictError` if the stored request has changed
        since it was read."""
        key = _key(request.id)
        etag, current = self._read(key)
        if current != request:
            raise ConflictError(f"{key} in {self._store.uri} was changed in the meantime; read it again.")
        changed = Request.model_validate(request.model_dump() | fields)
        if changed.state != request.state and changed.state not in _NEXT.get(request.state, ()):
            raise ValueError(f"request {request.id} cannot change from {request.state} to {changed.state}")
        self._cache[key] = (self._store.put_if(key, changed.to_json(), etag), changed)
        return changed

    def remove_old(self, now: datetime) -> None:
        """Remove finished user requests that are older than `RETENTION`. The watcher's requests are
        not removed, so that nothing is proposed twice."""
        for request in self.list():
            if not request.is_open and not request.is_proposal and now - request.created > RETENTION:
                self._store.delete(_key(request.id))
                self._cache.pop(_key(request.id), None)

    def _read(self, key: str) -> tuple[str, Request | None]:
        entry = self._store.find(key)
        if entry is None:
            return "", None
        data, etag = entry
        self._cache[key] = etag, Request.from_json(data, f"{self._store.uri}/{key}")
        return self._cache[key]


def _key(request_id: str) -> str:
    return f"{REQUESTS}{request_id}.json"
