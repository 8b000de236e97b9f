"""The pointer to the champion (the live release), and the promotion history."""

import getpass
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Literal

from pydantic import AwareDatetime, Field

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.errors import ConflictError, IntegrityError, StoreError
from evernear.release.manifest import Sha256, Version
from evernear.release.records import RELEASES

CHAMPION = f"{RELEASES}champion.json"
HISTORY = f"{RELEASES}history/"
CHAMPION_ALONE = "is the champion; servers load it when they start"
"""The state of a release that was promoted in the registry while no server was running."""
LONGEST_RUN = timedelta(days=4)
"""Longer than any run (``CONFIG`` in ``pipelines/tasks.py``)."""
How = Literal["deploy", "promote", "force", "apply", "anchor", "rollback", "restore"]
_IN_WORDS: dict[How, str] = {
    "deploy": "deployed",
    "promote": "promoted",
    "force": "promoted regardless of the gate",
    "apply": "settings applied",
    "anchor": "anchor moved",
    "rollback": "rolled back",
    "restore": "pointer restored",
}

# The etag of a superseded pointer state. An update with this etag cannot succeed.
_SUPERSEDED = "superseded"


class Cause(Frozen):
    """Who or what decided on a champion change, the reason, and the pipeline run that made it."""

    by: str
    why: str = ""
    run: str = ""
    """The ID of the pipeline run, or an empty string if a command made the change."""

    @classmethod
    def of_this_process(cls, why: str = "") -> "Cause":
        return cls(by=whoami(), why=why)

    @classmethod
    def of_run(cls, run: str, started_by: str, why: str = "") -> "Cause":
        """``started_by`` may be an unknown user of KFP."""
        return cls(by=started_by or "the Kubeflow Pipelines UI or API", why=why, run=run)


class Promotion(Document):
    """``previous`` is the target of a rollback."""

    remedy = "`evernear registry promote VERSION` makes a release the champion without it"

    version: Version
    previous: Version | None
    since: AwareDatetime
    number: int = Field(default=1, ge=1)
    """Starts at 1."""
    undo_to: int | None = None
    """The number of the promotion that a rollback restores, or None if no promotion precedes this
    one."""
    anchor: Version | None = None
    """The release with which the gate also compares candidates. None means ``version``, as after
    the first promotion."""
    how: How = "deploy"
    by: str = ""
    why: str = ""
    run: str = ""
    """As in `Cause`."""

    @property
    def how_in_words(self) -> str:
        return _IN_WORDS[self.how]

    def sentence(self) -> str:
        """How, by whom and why, without a capital letter and a full stop."""
        by, why = f" by {self.by}" if self.by else "", f": {self.why}" if self.why else ""
        return f"{self.how_in_words}{by}{why}"


class Pointer(Promotion):
    """The object at `CHAMPION`: the last promotion, and the releases that are being pruned.

    A prune adds them to this object before it removes anything. The compare-and-swap of a process
    that read the pointer earlier then fails, so it cannot promote a release that is about to be
    removed. If a prune is killed, the next one completes it.
    """

    remedy = "run `evernear registry restore`"

    pruning: dict[Version, Sha256] = {}
    """The releases whose records and archives are being removed, each with its archive's hash."""
    prunes: int = 0
    """Number of prunes so far, so that the object never returns to earlier content and etag."""


@dataclass(frozen=True)
class Champion:
    """``etag`` identifies the pointer state that the next update replaces."""

    pointer: Pointer
    etag: str

    @property
    def version(self) -> str:
        return self.pointer.version

    @property
    def previous(self) -> str | None:
        return self.pointer.previous

    def rollback_target(self) -> str:
        """As `previous`. Raises `StoreError` if there is none."""
        if self.previous is None:
            raise StoreError(f"There is nothing to roll back to: {self.version} has no previous champion.")
        return self.previous

    @property
    def anchor(self) -> str:
        return self.pointer.anchor or self.version

    @property
    def promotion(self) -> Promotion:
        return Promotion.model_validate(self.pointer.model_dump(include=set(Promotion.model_fields)))


def whoami() -> str:
    """``user@host`` of this process, for the promotion history."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container user without an entry in passwd
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


class ChampionPointer:
    """Reads and moves the champion pointer of one store. Methods that move it raise `ConflictError`
    if another process moved it in the meantime. Nothing was changed then."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self) -> Champion | None:
        """The champion, or None before the first promotion.

        Raises:
            IntegrityError: the pointer is damaged or lost.
        """
        entry = self._store.find(CHAMPION)
        if entry is None and next(iter(self._store.list(HISTORY)), None) is not None:
            entry = self._store.find(CHAMPION)  # the first promotion may have happened between the two requests
            if entry is None:
                raise IntegrityError(
                    f"{CHAMPION} does not exist in {self._store.uri}, although releases were promoted there; "
                    f"{Pointer.remedy}."
                )
        if entry is None:
            return None
        return Champion(Pointer.from_json(entry[0], f"{CHAMPION} in {self._store.uri}"), entry[1])

    def etag_if_damaged(self) -> str | None:
        """The etag of the damaged pointer, or None if it is lost. Raises `StoreError` if it is
        intact."""
        stored = self._store.find(CHAMPION)
        if stored is None:
            return None
        with suppress(IntegrityError):
            pointer = Pointer.from_json(stored[0], CHAMPION)
            raise StoreError(f"The champion is {pointer.version}, and its pointer is intact: nothing to restore.")
        return stored[1]

    def write_again(self, promotion: Promotion, damaged_etag: str | None) -> Champion:
        """Write the lost or damaged pointer again."""
        pointer = Pointer.model_validate(promotion.model_dump())
        etag = self._store.put_if(CHAMPION, pointer.to_json(), damaged_etag)
        self._record_in_history(promotion)
        return Champion(pointer, etag)

    def move(self, promotion: Promotion, expected: Champion | None) -> Champion:
        """Move the pointer if the champion is still ``expected``, and the release is not being
        pruned. If the response was lost, the call can be repeated."""
        pointer = Pointer.model_validate(promotion.model_dump())
        if expected is not None:
            if promotion.version in expected.pointer.pruning:
                raise StoreError(f"Release {promotion.version} is being pruned from {self._store.uri}.")
            # before the pointer moves, so that a killed process leaves no gap
            self._record_in_history(expected.promotion)
            prune_state = {"pruning": expected.pointer.pruning, "prunes": expected.pointer.prunes}
            pointer = pointer.model_copy(update=prune_state)
        try:
            moved = self.replace(pointer, expected)
        except ConflictError:
            # An earlier attempt whose response was lost may have moved the pointer. A process that
            # moved it since has added this promotion to the history.
            champion = self.find()
            if champion is not None and champion.promotion == promotion:
                return champion
            key = history_key(promotion.number)
            past = self._store.find(key)
            if past and Promotion.from_json(past[0], f"{key} in {self._store.uri}") == promotion:
                return Champion(pointer, _SUPERSEDED)
            raise
        with suppress(StoreError):  # the next promotion records it
            self._record_in_history(promotion)
        return moved

    def replace(self, pointer: Pointer, expected: Champion | None) -> Champion:
        """Write the pointer if the champion is still ``expected``."""
        try:
            etag = self._store.put_if(CHAMPION, pointer.to_json(), expected.etag if expected else None)
        except ConflictError:
            raise ConflictError(
                "The champion changed in the meantime; see `evernear registry list --history` and run again."
            ) from None
        return Champion(pointer, etag)

    def history(self) -> Iterator[Promotion]:
        """All readable promotions and rollbacks, oldest first. The last is the current state."""
        champion = self.find()
        if champion is None:
            return
        for entry in self._store.list(HISTORY):
            if entry.key < history_key(champion.pointer.number):  # the current state is listed as well
                with suppress(IntegrityError):  # `evernear store check` reports it
                    yield Promotion.from_json(self._store.get(entry.key), f"{entry.key} in {self._store.uri}")
        yield champion.promotion

    def made_by(self, run: str) -> Promotion | None:
        """The promotion that the pipeline run ``run`` has made, or None."""
        champion, now = self.find(), datetime.now(UTC)
        promotion = champion.promotion if run and champion else None
        while promotion is not None and now - promotion.since < LONGEST_RUN:
            if promotion.run == run:
                return promotion
            promotion = self.find_in_history(promotion.number - 1)
        return None

    def made_live(self, champion: Champion) -> Promotion:
        """The promotion that made ``champion`` live. Entries that move the anchor or apply settings
        may follow it."""
        promotion = champion.promotion
        while promotion.how in ("apply", "anchor") and (before := self.find_in_history(promotion.number - 1)):
            promotion = before
        return promotion

    def find_in_history(self, number: int) -> Promotion | None:
        """None if the promotion's entry is missing or damaged."""
        key = history_key(number)
        with suppress(IntegrityError):
            stored = self._store.find(key)
            return Promotion.from_json(stored[0], f"{key} in {self._store.uri}") if stored else None
        return None

    def newest_in_history(self) -> tuple[int, Promotion | None]:
        """The highest promotion number in the history, and the newest promotion whose entry is
        readable."""
        highest, newest = 0, None
        for entry in self._store.list(HISTORY):
            if (name := PurePosixPath(entry.key).stem).isdecimal():
                highest = max(highest, int(name))
                newest = self.find_in_history(int(name)) or newest
        return highest, newest

    def _record_in_history(self, promotion: Promotion) -> None:
        with suppress(ConflictError):  # it is there already
            self._store.put_if(history_key(promotion.number), promotion.to_json(), None)


def history_key(number: int) -> str:
    return f"{HISTORY}{number:08d}.json"
