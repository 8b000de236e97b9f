"""The watcher's switch and its last look, in the store: ``triggers/watch.json``, changed by compare-and-swap.

Whoever may write the store switches it, from a command line or from Slack; the watcher reads it at every tick.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

from pydantic import AwareDatetime, ValidationError

from evernear.errors import ConflictError, IntegrityError
from evernear.frozen import Frozen
from evernear.store import Store

WATCH = "triggers/watch.json"
_TRIES = 5

Action = Literal["retrain", "reindex", "nothing"]


class LastLook(Frozen):
    """What the last look came to."""

    at: AwareDatetime
    action: Action
    reasons: tuple[str, ...]
    """Why that action; for ``nothing`` also what holds another one back."""
    figures: dict[str, float] = {}
    faults: tuple[str, ...] = ()
    """What could not be looked at, a sentence each."""
    proposal: str | None = None
    """The proposal that this look opened."""


class Watching(Frozen):
    """The object at `WATCH`."""

    id: str
    """Of this store, made once; part of the ids of proposals, which are keys at a KFP that others use too."""
    on: bool = True
    since: AwareDatetime
    by: str = ""
    """Who switched it."""
    last: LastLook | None = None


class Switch:
    """The watcher's switch in one store.

    Every method may raise `StoreError`, or `IntegrityError` where the object is damaged.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> Watching:
        """How it stands; before the first time it is made, and is on."""
        return self._change(lambda watching: watching)

    def turn(self, on: bool, by: str) -> Watching:
        """Start (``on``) or stop the schedule; ``by`` is for those who ask who did it."""
        now = datetime.now(UTC)
        return self._change(
            lambda held: held if held.on == on else held.model_copy(update={"on": on, "since": now, "by": by})
        )

    def remember(self, look: LastLook) -> Watching:
        """Keep what a look came to, unless a later one is kept already."""
        return self._change(
            lambda held: held if held.last and held.last.at > look.at else held.model_copy(update={"last": look})
        )

    def _change(self, change: Callable[[Watching], Watching]) -> Watching:
        """Apply ``change``, again if another one came in between."""
        for _ in range(_TRIES):
            found = self._store.find(WATCH)
            held = self._parse(found[0]) if found else Watching(id=uuid4().hex[:8], since=datetime.now(UTC))
            changed = change(held)
            if found and changed == held:
                return held
            try:
                self._store.put_if(WATCH, changed.model_dump_json(indent=2).encode(), found[1] if found else None)
            except ConflictError:
                continue
            return changed
        raise ConflictError(f"{WATCH} in {self._store.uri} changes faster than it can be written; try again.")

    def _parse(self, data: bytes) -> Watching:
        try:
            return Watching.model_validate_json(data)
        except ValidationError:
            raise IntegrityError(f"{WATCH} in {self._store.uri} is damaged; remove it to begin anew.") from None
