"""The runs of a store, newest first, for `evernear runs` and the console."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Literal, NamedTuple

from pydantic import AwareDatetime

from evernear.common.frozen import Frozen
from evernear.common.progress import duration
from evernear.common.run_record import ABANDONED_AFTER, OUTCOME, RUNS, STARTING, RunRecord, StepRecord, may_be_active
from evernear.common.store import ObjectInfo, Store
from evernear.errors import IntegrityError
from evernear.evaluation.headline import AnswerCounts
from evernear.release.promotions import Champion, ChampionPointer, How, Promotion
from evernear.reporting.notify import RunOutcome
from evernear.review.queue import read_all

_STEPS = "steps/"
Kind = Literal["train", "reindex", "promote", "rollback", "predict"]
_PIPELINES: dict[str, Kind] = {
    "reindex": "reindex",
    "promote": "promote",
    "rollback": "rollback",
    "predict": "predict",
}
_CHANGES: dict[How, Kind] = {"promote": "promote", "force": "promote", "restore": "promote", "rollback": "rollback"}
_LISTED_ALONE = 20
"""Of more runs, the objects are listed together."""
Objects = dict[str, ObjectInfo]
"""The objects of a run, by their names in its folder."""


class ListedRun(Frozen):
    """A run that has ended, is in progress, or was killed (``interrupted``), or a promotion or
    rollback that no run made."""

    run: str
    """Empty without a run."""
    kind: Kind
    state: str
    sentence: str
    begun: AwareDatetime
    duration_s: float
    release: str | None = None
    answers: AnswerCounts | None = None
    has_page: bool = False
    is_live: bool = False
    """Whether its release is live now."""

    @property
    def duration(self) -> str:
        return duration(self.duration_s)


class Runs(NamedTuple):
    runs: Sequence[ListedRun]
    first: int
    """The number of the first of ``runs``."""
    total: int
    faults: Sequence[str]
    """A message for each damaged record."""


class RunList:
    """The runs of a store, and the promotions and rollbacks that commands or the console made
    without a run. The objects of ended runs are listed once, and promotions are read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pointer = ChampionPointer(store)
        self._ended: dict[str, Objects] = {}
        self._promotions: dict[int, Promotion] = {}

    def page(self, first: int, count: int) -> Runs:
        """``count`` runs from the number ``first`` on, newest first, or the last page of ``count``
        beyond the end. Only their records are read."""
        champion, objects = self._pointer.find(), self._objects()
        changes = self._changes(champion) if champion else []
        last = {run: max(info.modified for info in of_run.values()) for run, of_run in objects.items()}
        entries: list[tuple[datetime, str, Promotion | None]] = [(at, run, None) for run, at in last.items()]
        entries += [(promotion.since, "", promotion) for promotion in changes]
        newest = sorted(entries, key=lambda entry: entry[:2], reverse=True)

        def read(entry: tuple[datetime, str, Promotion | None]) -> ListedRun | str:
            _, run, promotion = entry
            return _of_promotion(promotion) if promotion else _listed(self._store, run, objects[run])

        first = min(first, max(0, len(newest) - 1) // count * count)
        listed = list(read_all(read, newest[first : first + count]))
        live = champion.version if champion else ""
        found = [_with_live(each, live) for each in listed if isinstance(each, ListedRun)]
        return Runs(found, first, len(newest), [each for each in listed if isinstance(each, str)])

    def _changes(self, champion: Champion) -> list[Promotion]:
        """The promotions that no run made."""
        unread = [number for number in range(1, champion.promotion.number) if number not in self._promotions]
        read = read_all(self._pointer.find_in_history, unread)
        self._promotions |= {promotion.number: promotion for promotion in read if promotion}
        every = [*self._promotions.values(), champion.promotion]
        return [each for each in every if not each.run and each.how in _CHANGES]

    def _objects(self) -> dict[str, Objects]:
        """The objects of each run."""
        children = self._store.children(RUNS.removesuffix("/"))
        runs = [name.removesuffix("/") for name in children if name != f"{STARTING}/"]
        new = [run for run in runs if run not in self._ended]
        is_one_listing = len(new) > _LISTED_ALONE
        listings = [self._store.list(RUNS)] if is_one_listing else (self._store.list(f"{RUNS}{run}/") for run in new)
        found: defaultdict[str, Objects] = defaultdict(dict)
        for info in chain.from_iterable(listings):
            run, _, name = info.key.removeprefix(RUNS).partition("/")
            found[run][name] = info
        self._ended |= {run: of_run for run, of_run in found.items() if f"{OUTCOME}.json" in of_run and run != STARTING}
        return {run: self._ended.get(run) or found[run] for run in runs if run in self._ended or run in found}


def _of_promotion(promotion: Promotion) -> ListedRun:
    instead = f" instead of {promotion.previous}" if promotion.previous and promotion.how != "rollback" else ""
    return ListedRun(
        run="",
        kind=_CHANGES[promotion.how],
        state="rolled back" if promotion.how == "rollback" else "promoted",
        sentence=f"release {promotion.version}{instead}, {promotion.sentence()}",
        begun=promotion.since,
        duration_s=0.0,
        release=promotion.version,
    )


def _with_live(listed: ListedRun, live: str) -> ListedRun:
    is_live = listed.release == live and listed.state in ("promoted", "rolled back")
    return listed.model_copy(update={"is_live": is_live})


def _listed(store: Store, run: str, objects: Objects) -> ListedRun | str:
    record = RunRecord(store, run)
    try:
        outcome = record.find(OUTCOME, RunOutcome)
        steps = () if outcome and f"{_STEPS}ingest.json" in objects else record.steps()
        begun = _begun(store, objects, steps)
    except IntegrityError as error:
        return str(error)
    if outcome:
        ended = objects[f"{OUTCOME}.json"].modified
        return ListedRun(
            run=run,
            kind=_PIPELINES.get(outcome.pipeline, "train"),
            state=outcome.state,
            sentence=outcome.summary(),
            begun=begun,
            duration_s=max(0.0, (ended - begun).total_seconds()),
            release=outcome.release or outcome.candidate,
            answers=AnswerCounts.of_metrics(outcome.metrics),
            has_page="run.html" in objects,
        )
    last = max(info.modified for info in objects.values())
    is_active = may_be_active(steps, is_recent=datetime.now(UTC) - last < ABANDONED_AFTER)
    return ListedRun(
        run=run,
        kind=_kind_of_steps(steps),
        state="running" if is_active else "interrupted",
        sentence=_where(steps) if is_active else f"ended without an outcome, {_where(steps)}",
        begun=begun,
        duration_s=max(0.0, ((datetime.now(UTC) if is_active else last) - begun).total_seconds()),
    )


def _begun(store: Store, objects: Objects, steps: Sequence[StepRecord]) -> datetime:
    """When the first step started."""
    if steps:
        return steps[0].started
    key = f"{_STEPS}ingest.json"
    if key in objects:
        info = objects[key]
        return StepRecord.from_json(store.get(info.key), f"{store.uri}/{info.key}").started
    return min(info.modified for info in objects.values())


def _kind_of_steps(steps: Sequence[StepRecord]) -> Kind:
    """What the steps that ran so far belong to. A reindex has no step train."""
    names = {step.step for step in steps}
    for name in ("promote", "rollback", "predict"):
        if name in names:
            return name
    is_reindex = "train" not in names and not {"embed", "index", "evaluate"}.isdisjoint(names)
    return "reindex" if is_reindex else "train"


def _where(steps: Sequence[StepRecord]) -> str:
    unfinished = [step for step in steps if step.state == "running"]
    if unfinished:
        progress = unfinished[-1].progress
        return f"at {unfinished[-1].step}{f': {progress.message}' if progress and progress.message else ''}"
    return f"after {steps[-1].step}" if steps else "before its first step"
