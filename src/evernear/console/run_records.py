"""The store's runs that have ended, for the reasons that Review shows."""

import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from evernear.common.run_record import ABANDONED_AFTER, OUTCOME, RUNS, STARTING, RunRecord
from evernear.common.store import ObjectInfo, Store
from evernear.console.reading import read_all
from evernear.errors import IntegrityError
from evernear.reporting.notify import RunOutcome

LISTING_S = 2.0
"""Time in seconds for which a listing of the runs is reused."""
SETTLED_AFTER = timedelta(minutes=10)
"""Time without changes after which an ended run's record is considered final."""
_LISTED_ALONE = 20
"""Maximum number of runs whose records are listed individually. For more runs, listing all runs at
once needs fewer requests than listing each run."""


class RunEntry(NamedTuple):
    """A run in the store's listing."""

    run: str
    begun: datetime
    """Time when the run's first object was written, according to the store's clock. The first
    object is written after the run starts."""
    changed: datetime
    """Time when the run's last object was written, according to the store's clock."""
    ended: bool


class RunRecords:
    """The run records in one store.

    Outcomes never change, so each outcome is read once. After `SETTLED_AFTER`, an ended run's
    record does not change either, so only the run's name is listed again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._outcomes: dict[str, RunOutcome] = {}
        self._settled: dict[str, RunEntry] = {}
        self._listing: tuple[float, list[RunEntry]] = (-LISTING_S, [])

    def entries(self) -> list[RunEntry]:
        """All runs, most recently changed first. All pages share one listing of the store for
        `LISTING_S` seconds.

        Raises:
            StoreError: the store is unavailable.
        """
        with self._lock:
            return self._entries()

    def outcome(self, run: str) -> RunOutcome | None:
        """The outcome of a run, or None if the run has not ended or the outcome is damaged."""
        if run not in self._outcomes:
            try:
                outcome = RunRecord(self._store, run).find(OUTCOME, RunOutcome)
            except IntegrityError:
                return None
            if outcome is None:
                return None
            self._outcomes[run] = outcome
        return self._outcomes[run]

    def _entries(self) -> list[RunEntry]:
        if time.monotonic() - self._listing[0] >= LISTING_S:
            self._listing = (time.monotonic(), self._list())
        return self._listing[1]

    def _list(self) -> list[RunEntry]:
        folders = (name.removesuffix("/") for name in self._store.children(RUNS.removesuffix("/")))
        runs = {run for run in folders if run != STARTING}
        self._settled = {run: entry for run, entry in self._settled.items() if run in runs}
        others = runs - self._settled.keys()
        if len(others) > _LISTED_ALONE:
            entries = _entries_of(self._store.list(RUNS))
        else:
            listings = read_all(lambda run: list(self._store.list(f"{RUNS}{run}/")), sorted(others))
            entries = _entries_of(info for listing in listings for info in listing)
        now = datetime.now(UTC)
        settled = {entry.run: entry for entry in entries if _is_settled(entry, now)}
        self._settled.update(settled)
        found = {**{entry.run: entry for entry in entries}, **self._settled}
        return sorted(found.values(), key=lambda entry: entry.changed, reverse=True)


def _entries_of(infos: Iterable[ObjectInfo]) -> list[RunEntry]:
    runs: dict[str, RunEntry] = {}
    for info in infos:
        run, _, name = info.key.removeprefix(RUNS).partition("/")
        if not name or run == STARTING:
            continue
        entry = runs.get(run) or RunEntry(run, info.modified, info.modified, ended=False)
        runs[run] = entry._replace(
            begun=min(entry.begun, info.modified),
            changed=max(entry.changed, info.modified),
            ended=entry.ended or name == f"{OUTCOME}.json",
        )
    return list(runs.values())


def _is_settled(entry: RunEntry, now: datetime) -> bool:
    return now - entry.changed > (SETTLED_AFTER if entry.ended else ABANDONED_AFTER)
