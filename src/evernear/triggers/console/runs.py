"""Start runs and change the champion, through local commands or Kubeflow Pipelines."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from evernear.common.disk import disk_errors
from evernear.common.run_directories import progress
from evernear.common.store import Store
from evernear.deployment import promote_release, roll_back
from evernear.errors import BusyError, SettingsError
from evernear.kubeflow.local_run import STARTED_BY_VARIABLE
from evernear.kubeflow.parameters import combine, from_settings
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.triggers.console.run_records import RunRecords, RunView
from evernear.triggers.requests import request_id

Pipeline = Literal["continuous-training", "reindex"]
COMMANDS: dict[Pipeline, str] = {"continuous-training": "run", "reindex": "reindex"}
_LOG = "console-run.log"
_LAST_BYTES = 4096


class Done(NamedTuple):
    """A sentence that describes a user's action, and the Kubeflow Pipelines run, if
    any, that performs the action."""

    sentence: str
    run: str = ""


class Runner(Protocol):
    """Starts runs and changes the champion."""

    def start(self, pipeline: Pipeline, by: str) -> Done:
        """Start a run that continues after the console exits.

        Raises:
            BusyError: another run is in progress.
        """
        ...

    def promote(self, version: str, why: str, by: str, *, force: bool) -> Done:
        """Promote a release."""
        ...

    def roll_back(self, expected: str, why: str, by: str) -> Done:
        """Roll back, or fail if ``expected`` is not the current champion."""
        ...

    def current(self, records: RunRecords) -> RunView | None:
        """The run in progress."""
        ...

    def failure(self) -> str:
        """The error message of the last run that the console started, or an empty
        string if the run did not fail."""
        ...


class LocalRuns:
    """Runs ``evernear run`` or ``evernear reindex`` on this machine, with the options
    in ``words``."""

    def __init__(self, settings: Settings, words: Sequence[str]) -> None:
        self._settings = settings
        self._words = words
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, pipeline: Pipeline, by: str) -> Done:
        """Like `Runner.start`."""
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
                    env={**os.environ, STARTED_BY_VARIABLE: by},
                )
        return Done("The run has started.")

    def promote(self, version: str, why: str, by: str, *, force: bool) -> Done:
        """Like `Runner.promote`."""
        deployed = promote_release(version, self._settings, force=force, cause=Cause(by=by, why=why))
        return Done(f"Release {deployed.version} {deployed.state()}.")

    def roll_back(self, expected: str, why: str, by: str) -> Done:
        """Like `Runner.roll_back`."""
        deployed = roll_back(self._settings, cause=Cause(by=by, why=why), expected=expected)
        return Done(f"Release {deployed.version} {deployed.state()}.")

    def current(self, records: RunRecords) -> RunView | None:
        """Like `Runner.current`."""
        state = progress(self._settings.workdir)
        if state is None:
            return RunView("", (), "starting") if self._is_running() else None
        running = [run for run in records.in_progress() if run.steps[-1].started >= state.started]
        view = running[0] if running else RunView("", (), "starting")
        return view._replace(message=state.message or view.message)

    def failure(self) -> str:
        """Like `Runner.failure`."""
        if self._process is None or not self._process.poll():
            return ""
        output = _tail(self._settings.workdir / _LOG)
        sentences = [line.partition("evernear:")[2].strip() for line in output.splitlines() if "evernear:" in line]
        return sentences[-1] if sentences else f"The run ended with status {self._process.returncode}."

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


class PipelineRuns:
    """Starts runs on Kubeflow Pipelines."""

    def __init__(self, settings: Settings, store: Store) -> None:
        from evernear.kubeflow.client import KfpRuns  # a laptop needs no kfp

        self._settings = settings
        self._store = store
        self._runs = KfpRuns(settings.pipeline)

    def start(self, pipeline: Pipeline, by: str) -> Done:
        """Like `Runner.start`. Two simultaneous clicks start only one run, because both
        requests derive the same key from the newest run."""
        runs = self._runs.list(pipeline, limit=10)
        if any(not run.state.is_final for run in runs):
            raise BusyError(f"A run of {pipeline} is already in progress; wait for it to end.")
        newest = runs[0].id if runs else ""
        return Done("The run has started.", self._start(pipeline, by, request_id("run", pipeline, newest), {}))

    def promote(self, version: str, why: str, by: str, *, force: bool) -> Done:
        """Like `Runner.promote`. The pipeline does not reject a release with the
        verdict hold, so this method checks ``force``."""
        registry = Registry(self._store)
        if not registry.get(version).verdict.promote and not force:
            raise SettingsError("The verdict on this release is hold; confirm that it is to be promoted anyway.")
        champion = registry.champion()
        number = champion.promotion.number if champion else 0
        run = self._start("promote", by, request_id("promote", version, number), {"release": version, "reason": why})
        return Done(f"A run promotes release {version}.", run)

    def roll_back(self, expected: str, why: str, by: str) -> Done:
        """Like `Runner.roll_back`."""
        champion = Registry(self._store).champion()
        number = champion.promotion.number if champion else 0
        run = self._start("rollback", by, request_id("roll_back", number), {"release": expected, "reason": why})
        return Done(f"A run rolls back from release {expected}.", run)

    def current(self, records: RunRecords) -> RunView | None:
        """Like `Runner.current`."""
        return next(iter(records.in_progress()), None)

    def failure(self) -> str:
        """Like `Runner.failure`. The result is always empty, because Kubeflow Pipelines
        reports immediately if a run cannot start."""
        return ""

    def _start(self, pipeline: str, by: str, key: str, parameters: dict[str, str]) -> str:
        defaults = from_settings(self._settings, self._runs.parameters(pipeline))
        return self._runs.start(pipeline, combine(defaults, {"started_by": by}, parameters), key, self._store).id


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
    except OSError:
        return ""
