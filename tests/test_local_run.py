"""A local run in progress, and the directories of old ones."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from evernear import local_run
from evernear.local_run import DIRECTORY_FORMAT, progress
from evernear.progress import Event
from evernear.settings import load

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
    assert progress(tmp_path) is None, "this process started later, so it has reused the ID of a killed one"

    with local_run._lock(tmp_path):
        assert progress(tmp_path)
    assert progress(tmp_path) is None
    assert progress(tmp_path / "absent") is None


def test_oldest_runs_are_deleted(tmp_path: Path) -> None:
    names = [f"2026112{day}-235959.000000" for day in range(1, 6)]
    for name in (*names, "mine", "20261101"):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "network.pt").write_bytes(b"weights")
    (tmp_path / "20261101-000000.000000").symlink_to(tmp_path / "mine")
    (tmp_path / "20261102-000000.000000").write_text("a file")
    local_run._prune(tmp_path, 2)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*names[-2:], "mine", "20261101", "20261101-000000.000000", "20261102-000000.000000"}
    assert (tmp_path / "mine" / "train" / "network.pt").exists()
    local_run._prune(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_run_keeps_its_own_directory_and_those_of_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "_follow", lambda *_: ([], {}))
    monkeypatch.setattr(local_run, "_result", lambda directory, *_: directory)
    settings = load(environment={}, overrides=[f"workdir={tmp_path}", "keep_runs=2"])
    directories = [local_run.run(settings, lambda _: None) for _ in range(3)]
    assert sorted((tmp_path / "runs").iterdir()) == directories[1:]
