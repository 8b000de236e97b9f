"""What `evernear status` shows of a local run."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from evernear import local_run
from evernear.local_run import DIRECTORY_FORMAT, progress
from evernear.progress import Event

STARTED = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run of this process, and that of an earlier run."""
    for directory in ("20261121-235959.000000", STARTED.strftime(DIRECTORY_FORMAT)):
        (tmp_path / "runs" / directory).mkdir(parents=True)
    (tmp_path / "run.pid").write_text(str(os.getpid()))
    return tmp_path / "runs" / STARTED.strftime(DIRECTORY_FORMAT)


def test_run_in_progress_has_step_and_message(run: Path, tmp_path: Path) -> None:
    progress_line = progress(tmp_path)
    assert progress_line
    assert (progress_line.step, progress_line.directory, progress_line.started) == ("", str(run), STARTED)
    assert str(progress_line).startswith("starting (since 2026-11-22 09:00:00 UTC, process ")

    events = [
        Event(at=STARTED, step="validate", kind="finished", message="no problems"),
        Event(at=STARTED, step="train", kind="progress", message="epoch 1/12, step 5/30, about 2 min 5 s left"),
    ]
    (run / "events.jsonl").write_text("".join(event.model_dump_json() + "\n" for event in events) + '{"at": "20')
    assert str(progress(tmp_path)).startswith("train: epoch 1/12, step 5/30, about 2 min 5 s left (since ")


def test_ended_and_killed_runs_are_not_in_progress(run: Path, tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / "run.pid").write_text(str(killed.pid))
    assert progress(tmp_path) is None

    (tmp_path / "run.pid").write_text(str(os.getpid()))
    assert progress(tmp_path)
    os.utime(tmp_path / "run.pid", (0, 0))
    assert progress(tmp_path) is None, "this process began later, so it has reused the number of a killed one"

    with local_run._lock(tmp_path):
        assert progress(tmp_path)
    assert progress(tmp_path) is None
    assert progress(tmp_path / "absent") is None
