"""Runs as the console shows and starts them: records in the store, local commands, or Kubeflow Pipelines."""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from evernear.common.disk import disk_errors
from evernear.common.run_directories import progress
from evernear.common.run_record import OUTCOME, RUNS, STARTING, RunInProgress, RunRecord, StepRecord, runs_in_progress
from evernear.common.store import Store
from evernear.deployment import promote_release, roll_back
from evernear.errors import BusyError, IntegrityError, SettingsError
from evernear.kubeflow.parameters import combine, from_settings
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.reporting.notify import RunOutcome
from evernear.settings import Settings
from evernear.triggers.requests import request_id

Pipeline = Literal["continuous-training", "reindex"]
COMMANDS: dict[Pipeline, str] = {"continuous-training": "run", "reindex": "reindex"}
LISTING_S = 2.0
"""Time for which a listing of the runs is reused."""
_LOG = "console-run.log"
_LAST_BYTES = 4096


class RunEntry(NamedTuple):
    """A run in the listing of the store."""

    run: str
    changed: datetime
    """When its last object was written, by the clock of the store."""
    ended: bool
    page: bool
    """Whether it has a run page."""


class RunView(NamedTuple):
    """A run in progress. ``message`` is the last progress of a running step."""

    run: str
    steps: Sequence[StepRecord]
    message: str


class RunRecords:
    """The records of runs in one store. Outcomes never change, so each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._outcomes: dict[str, RunOutcome] = {}
        self._listing: tuple[float, list[RunEntry]] = (-LISTING_S, [])
        self._running: tuple[float, list[RunInProgress]] = (-LISTING_S, [])

    def entries(self) -> list[RunEntry]:
        """All runs, the one that was changed last first. One listing of the store serves all pages for `LISTING_S`.

        Raises:
            StoreError: the store is unavailable.
        """
        with self._lock:
            if time.monotonic() - self._listing[0] >= LISTING_S:
                self._listing = (time.monotonic(), self._list())
            return self._listing[1]

    def outcome(self, run: str) -> RunOutcome | None:
        """The outcome of a run; None before its end, or if it is damaged."""
        if run not in self._outcomes:
            try:
                outcome = RunRecord(self._store, run).find(OUTCOME, RunOutcome)
            except IntegrityError:
                return None
            if outcome is None:
                return None
            self._outcomes[run] = outcome
        return self._outcomes[run]

    def in_progress(self) -> list[RunView]:
        """The runs in progress, the one heard of last first; read again after `LISTING_S`.

        Raises:
            StoreError: the store is unavailable.
        """
        with self._lock:
            if time.monotonic() - self._running[0] >= LISTING_S:
                self._running = (time.monotonic(), runs_in_progress(self._store, datetime.now(UTC)))
            return [_view(run) for run in self._running[1]]

    def _list(self) -> list[RunEntry]:
        runs: dict[str, RunEntry] = {}
        for info in self._store.list(RUNS):
            run, _, name = info.key.removeprefix(RUNS).partition("/")
            if not name or run == STARTING:
                continue
            entry = runs.get(run, RunEntry(run, info.modified, ended=False, page=False))
            runs[run] = RunEntry(
                run,
                max(entry.changed, info.modified),
                entry.ended or name == f"{OUTCOME}.json",
                entry.page or name == "run.html",
            )
        return sorted(runs.values(), key=lambda entry: entry.changed, reverse=True)


def _view(run: RunInProgress) -> RunView:
    messages = [step.progress.message for step in run.steps if step.state == "running" and step.progress]
    return RunView(run.run, run.steps, messages[-1] if messages else "")


class Runner(Protocol):
    """Starts runs and moves the champion."""

    def start(self, pipeline: Pipeline, by: str) -> None:
        """Start a run, which goes on if the console ends.

        Raises:
            BusyError: another run is in progress.
        """
        ...

    def promote(self, version: str, why: str, by: str, *, force: bool) -> str:
        """Promote a release; returns a sentence about it."""
        ...

    def roll_back(self, expected: str, why: str, by: str) -> str:
        """Roll back from the champion ``expected``; returns a sentence about it."""
        ...

    def current(self, records: RunRecords) -> RunView | None:
        """The run in progress."""
        ...

    def failure(self) -> str:
        """Why the last run that was started from here ended before it recorded anything; empty otherwise."""
        ...


class LocalRuns:
    """Runs on this machine, as the commands ``evernear run`` and ``evernear reindex`` with ``words`` as options."""

    def __init__(self, settings: Settings, words: Sequence[str]) -> None:
        self._settings = settings
        self._words = words
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, pipeline: Pipeline, by: str) -> None:
        """As `Runner.start`."""
        with self._lock:
            if self._is_running() or progress(self._settings.workdir):
                raise BusyError("A run is already in progress; wait for it to end.")
            log = self._settings.workdir / _LOG
            with disk_errors(log), log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "evernear", COMMANDS[pipeline], *self._words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def promote(self, version: str, why: str, by: str, *, force: bool) -> str:
        """As `Runner.promote`."""
        deployed = promote_release(version, self._settings, force=force, cause=Cause(by=by, why=why))
        return f"Release {deployed.version} {deployed.state()}."

    def roll_back(self, expected: str, why: str, by: str) -> str:
        """As `Runner.roll_back`."""
        deployed = roll_back(self._settings, cause=Cause(by=by, why=why), expected=expected)
        return f"Release {deployed.version} {deployed.state()}."

    def current(self, records: RunRecords) -> RunView | None:
        """As `Runner.current`."""
        state = progress(self._settings.workdir)
        if state is None:
            return RunView("", (), "starting") if self._is_running() else None
        running = [run for run in records.in_progress() if run.steps[-1].started >= state.started]
        view = running[0] if running else RunView("", (), "starting")
        return view._replace(message=state.message or view.message)

    def failure(self) -> str:
        """As `Runner.failure`."""
        if self._process is None or not self._process.poll():
            return ""
        output = _tail(self._settings.workdir / _LOG)
        sentences = [line.partition("evernear:")[2].strip() for line in output.splitlines() if "evernear:" in line]
        return sentences[-1] if sentences else f"The run ended with status {self._process.returncode}."

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


class PipelineRuns:
    """Runs on Kubeflow Pipelines."""

    def __init__(self, settings: Settings, store: Store) -> None:
        from evernear.kubeflow.client import KfpRuns  # a laptop needs no kfp

        self._settings = settings
        self._store = store
        self._runs = KfpRuns(settings.pipeline)

    def start(self, pipeline: Pipeline, by: str) -> None:
        """As `Runner.start`. Two clicks in the same minute start one run."""
        if any(not run.state.is_final for run in self._runs.list(pipeline, limit=10)):
            raise BusyError(f"A run of {pipeline} is already in progress; wait for it to end.")
        self._start(pipeline, by, request_id("run", pipeline, f"{datetime.now(UTC):%Y%m%d%H%M}"), {})

    def promote(self, version: str, why: str, by: str, *, force: bool) -> str:
        """As `Runner.promote`. The pipeline promotes against a verdict too, so ``force`` is checked here."""
        registry = Registry(self._store)
        if not registry.get(version).verdict.promote and not force:
            raise SettingsError("The verdict on this release is hold; confirm that it is to be promoted anyway.")
        champion = registry.champion()
        number = champion.promotion.number if champion else 0
        self._start("promote", by, request_id("promote", version, number), {"release": version, "reason": why})
        return f"A run promotes release {version}."

    def roll_back(self, expected: str, why: str, by: str) -> str:
        """As `Runner.roll_back`."""
        champion = Registry(self._store).champion()
        number = champion.promotion.number if champion else 0
        self._start("rollback", by, request_id("roll_back", number), {"release": expected, "reason": why})
        return f"A run rolls back from release {expected}."

    def current(self, records: RunRecords) -> RunView | None:
        """As `Runner.current`."""
        return next(iter(records.in_progress()), None)

    def failure(self) -> str:
        """As `Runner.failure`: Kubeflow Pipelines reports it at once."""
        return ""

    def _start(self, pipeline: str, by: str, key: str, parameters: dict[str, str]) -> None:
        defaults = from_settings(self._settings, self._runs.parameters(pipeline))
        self._runs.start(pipeline, combine(defaults, {"started_by": by}, parameters), key, self._store)


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
    except OSError:
        return ""
