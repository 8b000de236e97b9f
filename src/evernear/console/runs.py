"""Start a reindex and change the champion, through local commands or Kubeflow Pipelines."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from evernear.common.audit import request_id
from evernear.common.disk import disk_errors
from evernear.common.progress import progress
from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.deployment import promote_release, roll_back
from evernear.errors import BusyError, IntegrityError, SettingsError
from evernear.kubeflow.local_run import STARTED_BY_VARIABLE, last_outcome
from evernear.kubeflow.runs import from_settings, outcome_of, to_start
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.reporting.notify import NextStep, RunOutcome
from evernear.settings import Settings

Kind = Literal["train", "reindex"]
_COMMANDS: dict[Kind, str] = {"train": "run", "reindex": "reindex"}
_PIPELINES: dict[Kind, str] = {"train": "continuous-training", "reindex": "reindex"}
_LOG = "console-run.log"
_LAST_BYTES = 4096


class Done(NamedTuple):
    """A sentence that describes a user's action, and the Kubeflow Pipelines run, if any, that
    performs the action."""

    sentence: str
    run: str = ""


class RunState(NamedTuple):
    """The run in progress or, if no run is in progress, the last run, in one sentence."""

    sentence: str
    is_running: bool = False
    is_failed: bool = False
    next_steps: tuple[NextStep, ...] = ()

    @staticmethod
    def of_outcome(outcome: RunOutcome | None) -> "RunState":
        """The state after a run with this outcome, or before the first run."""
        if outcome is None:
            return RunState("No run has ended yet.")
        steps = outcome.next_steps("console")
        if outcome.state == "promoted":  # the release may have been rolled back since
            return RunState(f"The last run promoted release {outcome.release}.", next_steps=steps)
        return RunState(f"The last run: {outcome.summary()}", is_failed=outcome.state == "failed", next_steps=steps)


class LocalRuns:
    """Runs ``evernear reindex`` and ``evernear run`` on this machine, with the options in
    ``words``."""

    def __init__(self, settings: Settings, words: Sequence[str]) -> None:
        self._settings = settings
        self._words = words
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._kind: Kind = "reindex"

    def start(self, kind: Kind, by: str) -> Done:
        """The run continues after the console exits."""
        with self._lock:
            if self.state().is_running:
                raise BusyError("A run is already in progress; wait for it to end.")
            self._kind = kind
            log = self._settings.workdir / _LOG
            with disk_errors(log), log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "evernear", _COMMANDS[kind], *self._words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, STARTED_BY_VARIABLE: by},
                )
        return Done("The run has started.")

    def promote(self, version: str, why: str, by: str, *, force: bool) -> Done:
        deployed = promote_release(version, self._settings, force=force, cause=Cause(by=by, why=why))
        return Done(f"Release {deployed.version} {deployed.state()}.")

    def roll_back(self, expected: str, why: str, by: str) -> Done:
        """Fails if ``expected`` is not the current champion."""
        deployed = roll_back(self._settings, cause=Cause(by=by, why=why), expected=expected)
        return Done(f"Release {deployed.version} {deployed.state()}.")

    def state(self) -> RunState:
        running = progress(self._settings.workdir)
        if running is not None:
            return RunState(f"A run is in progress: {running.where}", is_running=True)
        status = self._process.poll() if self._process else 0
        if status is None:
            return RunState("A run is in progress: starting", is_running=True)
        if status:
            what = "training" if self._kind == "train" else "reindex"
            return RunState(f"The {what} failed: {self._failure(status)}", is_failed=True)
        return RunState.of_outcome(last_outcome(self._settings.workdir))

    def _failure(self, status: int) -> str:
        output = _tail(self._settings.workdir / _LOG)
        sentences = [line.partition("evernear:")[2].strip() for line in output.splitlines() if "evernear:" in line]
        return sentences[-1] if sentences else f"the run ended with status {status}."


class PipelineRuns:
    """Starts runs on Kubeflow Pipelines."""

    def __init__(self, settings: Settings, store: Store) -> None:
        from evernear.kubeflow.client import KfpRuns  # a laptop needs no kfp

        self._settings = settings
        self._store = store
        self._runs = KfpRuns(settings.pipeline)

    def start(self, kind: Kind, by: str) -> Done:
        """Two simultaneous clicks start only one run, because both requests derive the same key
        from the newest run."""
        runs = [run for pipeline in _PIPELINES.values() for run in self._runs.list(pipeline, limit=10)]
        if any(not run.state.is_final for run in runs):
            raise BusyError("A run is already in progress; wait for it to end.")
        newest = max(runs, key=lambda run: run.created).id if runs else ""
        pipeline = _PIPELINES[kind]
        return Done("The run has started.", self._start(pipeline, by, request_id("run", pipeline, newest), {}))

    def promote(self, version: str, why: str, by: str, *, force: bool) -> Done:
        """Check ``force``, because the pipeline does not reject a release with the verdict hold."""
        registry = Registry(self._store)
        if not registry.get(version).verdict.promote and not force:
            raise SettingsError("The verdict on this release is hold; confirm that it is to be promoted anyway.")
        champion = registry.champion()
        number = champion.promotion.number if champion else 0
        run = self._start("promote", by, request_id("promote", version, number), {"release": version, "reason": why})
        return Done(f"A run promotes release {version}.", run)

    def roll_back(self, expected: str, why: str, by: str) -> Done:
        champion = Registry(self._store).champion()
        number = champion.promotion.number if champion else 0
        run = self._start("rollback", by, request_id("roll_back", number), {"release": expected, "reason": why})
        return Done(f"A run rolls back from release {expected}.", run)

    def state(self) -> RunState:
        """Only reindexes and trainings count."""
        newest = [run for pipeline in _PIPELINES.values() for run in self._runs.list(pipeline, limit=1)]
        if not newest:
            return RunState.of_outcome(None)
        run = max(newest, key=lambda each: each.created)
        record = RunRecord(self._store, run.id)
        if run.state.is_final:
            outcome = outcome_of(self._store, run)
            return RunState.of_outcome(outcome) if outcome else RunState(f"The last run: {run.state}.")
        return RunState(f"A run is in progress: {_where(record)}", is_running=True)

    def _start(self, pipeline: str, by: str, key: str, parameters: dict[str, str]) -> str:
        known = self._runs.parameters(pipeline)
        arguments = to_start(pipeline, known, by, from_settings(self._settings, known), parameters)
        return self._runs.start(pipeline, arguments, key, self._store).id


Runner = LocalRuns | PipelineRuns


def _where(record: RunRecord) -> str:
    """The step that a run in the cluster is at, and its progress."""
    with suppress(IntegrityError):
        for step in reversed(record.steps()):
            message = step.progress.message if step.progress else ""
            return ": ".join(filter(None, [step.step, message if step.state == "running" else step.message]))
    return "starting"


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
    except OSError:
        return ""
