"""An executor that runs started pipelines on this machine and reports their tasks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from evernear.common.progress import EVENTS_VARIABLE, Event, read_events
from tests.loopback.kfp.state import RunControl

POLL_S = 0.05
STATES = {"started": "RUNNING", "progress": "RUNNING", "note": "RUNNING", "finished": "SUCCEEDED", "failed": "FAILED"}


class LocalExecutor:
    """Executor for `KfpServer`: each run becomes a process of `local_pipeline` with its artifacts
    under ``root``.

    ``overrides`` are parameters specific to this machine (a store under a temporary directory, a
    target).
    """

    def __init__(self, root: Path, **overrides: object) -> None:
        self._root = root
        self.overrides = overrides

    def __call__(self, run: RunControl) -> None:
        """Run the pipeline until it finishes or is terminated."""
        directory = self._root / run.id
        directory.mkdir(parents=True)
        events, log = directory / "events.jsonl", directory / "log.txt"
        reported: dict[str, str] = {}
        offset = 0
        run.begin()
        process = self._start(run, directory, events, log)
        try:
            while True:
                ended = process.poll() is not None
                new_events, offset = read_events(events, offset)
                for event in new_events:
                    _report(run, event, reported)
                if ended or run.is_canceling:
                    break
                time.sleep(POLL_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()  # type: ignore[union-attr] - it is PIPE
        run.end("CANCELED" if run.is_canceling else "SUCCEEDED" if process.returncode == 0 else "FAILED")

    def _start(self, run: RunControl, directory: Path, events: Path, log: Path) -> "subprocess.Popen[str]":
        order = {
            "pipeline": shutil.copy(run.compiled(), directory / "pipeline.yaml").as_posix(),
            "pipeline_root": str(directory),
            "arguments": {**run.parameters, **self.overrides},
        }
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "evernear.kubeflow.local_pipeline"],
                env={**os.environ, EVENTS_VARIABLE: str(events)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return process


def _report(run: RunControl, event: Event, reported: dict[str, str]) -> None:
    state = STATES[event.kind]
    if reported.get(event.step) != state:
        reported[event.step] = state
        run.task(event.step, state, event.message if state == "FAILED" else "")
