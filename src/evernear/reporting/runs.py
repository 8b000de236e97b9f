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


_LISTED_ALONE = 20
"""Of more runs, the objects are listed together."""
Objects = dict[str, ObjectInfo]
"""The objects of a run, by their names in its folder."""


class ListedRun(Frozen):
    """A run that has ended, is in progress, or was killed (``interrupted``). ``images`` is the
    number of its test images."""

    run: str
    kind: Kind
    state: str
    sentence: str
    begun: AwareDatetime
    duration_s: float
    release: str | None = None
    answers: AnswerCounts | None = None
    has_page: bool = False

    @property
    def duration(self) -> str:
        return duration(self.duration_s)


class Runs(NamedTuple):
    runs: Sequence[ListedRun]
    total: int
    faults: Sequence[str]
    """A message for each damaged record."""


def list_runs(store: Store, first: int, count: int, ended: dict[str, Objects] | None = None) -> Runs:
    """``count`` runs from the number ``first`` on. Only their records are read, and only runs that
    are not in ``ended`` are listed, to which the call adds those that have ended."""
    objects = _objects(store, {} if ended is None else ended)
    newest = sorted(objects, key=lambda run: (max(info.modified for info in objects[run].values()), run), reverse=True)
    shown = newest[first : first + count]
    listed = list(read_all(lambda run: _listed(store, run, objects[run]), shown))
    found = [each for each in listed if isinstance(each, ListedRun)]
    return Runs(found, len(newest), [each for each in listed if isinstance(each, str)])


def _objects(store: Store, ended: dict[str, Objects]) -> dict[str, Objects]:
    """The objects of each run."""
    runs = [name.removesuffix("/") for name in store.children(RUNS.removesuffix("/")) if name != f"{STARTING}/"]
    new = [run for run in runs if run not in ended]
    listings = [store.list(RUNS)] if len(new) > _LISTED_ALONE else (store.list(f"{RUNS}{run}/") for run in new)
    found: defaultdict[str, Objects] = defaultdict(dict)
    for info in chain.from_iterable(listings):
        run, _, name = info.key.removeprefix(RUNS).partition("/")
        found[run][name] = info
    ended |= {run: of_run for run, of_run in found.items() if f"{OUTCOME}.json" in of_run and run != STARTING}
    return {run: ended.get(run) or found[run] for run in runs if run in ended or run in found}


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
