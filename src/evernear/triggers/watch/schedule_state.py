"""The watcher's state, which is the object ``triggers/watch.json`` in the store. The state says
whether the watcher is on, and contains the report of the last check.

The command line, Slack and the watcher change the state with compare-and-swap. The watcher reads
the state before every check.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import ClassVar, Literal
from uuid import uuid4

from pydantic import AwareDatetime

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.errors import ConflictError

STATE = "triggers/watch.json"
_ATTEMPTS = 5

Action = Literal["retrain", "reindex", "nothing"]


class CheckReport(Frozen):
    """The result of a check."""

    at: AwareDatetime
    source: str = ""
    """The source that was checked, or an empty string if the source is unknown."""
    champion: str = ""
    """The champion at the time of the check, or an empty string without a champion."""
    action: Action
    reasons: tuple[str, ...]
    """The reasons for the action and, if the action is not proposed now, the reason for waiting."""
    figures: dict[str, float] = {}
    faults: tuple[str, ...] = ()
    """One message for each part of the check that failed."""
    proposal: str | None = None
    """The id of the request that the check created."""


class ScheduleState(Document):
    """The object at `STATE`."""

    remedy: ClassVar[str] = "remove it to start over"

    id: str
    """Identifies the store in proposal ids. Proposal ids are also run keys in KFP, where several
    stores may share one KFP server."""
    on: bool = True
    since: AwareDatetime
    by: str = ""
    """The person who paused or resumed the watcher."""
    last: CheckReport | None = None


class ScheduleStore:
    """The schedule state in one store. Every method may raise `StoreError` or `IntegrityError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> ScheduleState:
        """The current state. The first call creates the state with the watcher switched on."""
        return self._change(lambda state: state)

    def switch(self, on: bool, by: str) -> ScheduleState:
        """Resume (``on``) or pause the watcher."""
        update = {"on": on, "since": datetime.now(UTC), "by": by}
        return self._change(lambda state: state if state.on == on else state.model_copy(update=update))

    def save(self, report: CheckReport) -> ScheduleState:
        """Store the report of the last check."""
        return self._change(lambda state: state.model_copy(update={"last": report}))

    def _change(self, change: Callable[[ScheduleState], ScheduleState]) -> ScheduleState:
        """Apply ``change``, and retry if other processes write at the same time."""
        for _ in range(_ATTEMPTS):
            stored = self._store.find(STATE)
            if stored:
                state = ScheduleState.from_json(stored[0], f"{self._store.uri}/{STATE}")
            else:
                state = ScheduleState(id=uuid4().hex[:8], since=datetime.now(UTC))
            changed = change(state)
            if stored and changed == state:
                return state
            try:
                self._store.put_if(STATE, changed.to_json(), stored[1] if stored else None)
            except ConflictError:
                continue
            return changed
        raise ConflictError(f"{STATE} in {self._store.uri} changes faster than it can be written; try again.")
