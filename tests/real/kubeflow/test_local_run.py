"""A local run in progress, and the directories of old runs."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from evernear.common.outputs import is_output
from evernear.common.progress import DIRECTORY_FORMAT, Event, progress, prune_runs, run_directories
from evernear.errors import BusyError, SettingsError
from evernear.kubeflow import local_run
from evernear.settings import load

STARTED = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """The directory of a run of this process, and that of an earlier run."""
    for directory in ("20261121-235959.000000", STARTED.strftime(DIRECTORY_FORMAT)):
        (tmp_path / "runs" / directory).mkdir(parents=True)
    (tmp_path / "run.pid").write_text(str(os.getpid()))
    return tmp_path / "runs" / STARTED.strftime(DIRECTORY_FORMAT)


def test_run_in_progress_has_step_and_message(run_directory: Path, tmp_path: Path) -> None:
    progress_line = progress(tmp_path)
    assert progress_line
    assert (progress_line.step, progress_line.directory, progress_line.started) == ("", str(run_directory), STARTED)
    assert str(progress_line).startswith("starting (since 2026-11-22 09:00:00 UTC, process ")

    events = [
        Event(at=STARTED, step="validate", kind="finished", message="no problems"),
        Event(at=STARTED, step="train", kind="progress", message="epoch 1/12, step 5/30, about 2 min 5 s left"),
    ]
    (run_directory / "events.jsonl").write_text(
        "".join(event.model_dump_json() + "\n" for event in events) + '{"at": "20'
    )
    assert str(progress(tmp_path)).startswith("train: epoch 1/12, step 5/30, about 2 min 5 s left (since ")


def test_ended_and_killed_runs_are_not_in_progress(run_directory: Path, tmp_path: Path) -> None:
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


def test_concurrent_run_in_one_working_directory_is_rejected(tmp_path: Path) -> None:
    settings = load(environment={}, overrides=[f"workdir={tmp_path}"])
    with local_run._lock(tmp_path), pytest.raises(BusyError, match=rf"process {os.getpid()}\) uses {tmp_path};"):
        local_run.run_pipeline(settings, lambda _: None)


def test_oldest_runs_are_deleted(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    names = [f"2025112{day}-235959.000000" for day in range(1, 6)]
    for name in (*names, "mine", "20251101"):
        (runs / name / "train").mkdir(parents=True)
        (runs / name / "train" / "network.pt").write_bytes(b"weights")
    (runs / "20251101-000000.000000").symlink_to(runs / "mine")
    (runs / "20251102-000000.000000").write_text("a file")
    prune_runs(tmp_path, runs / names[-1], 2)
    remaining = {path.name for path in runs.iterdir()}
    assert remaining == {*names[-2:], "mine", "20251101", "20251101-000000.000000", "20251102-000000.000000"}
    assert (runs / "mine" / "train" / "network.pt").exists()
    prune_runs(tmp_path, runs / names[-1], 2)
    assert {path.name for path in runs.iterdir()} == remaining


def make_runs(workdir: Path, *names: str) -> list[Path]:
    directories = [workdir / "runs" / name for name in names]
    for directory in directories:
        directory.mkdir(parents=True)
    return directories


def test_runs_dated_in_the_future_are_older_than_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was a century ahead, and was set back."""
    monkeypatch.setattr(local_run, "_follow", lambda *_: ([], {}))
    monkeypatch.setattr(local_run, "_result", lambda directory, *_: directory)
    settings = load(environment={}, overrides=[f"workdir={tmp_path}", "keep_runs=3"])
    future = make_runs(tmp_path, *(f"2126112{day}-090000.000000" for day in range(1, 4)))
    first = local_run.run_pipeline(settings, lambda _: None)
    assert is_output(str(settings.workdir))
    assert run_directories(tmp_path) == [*future[1:], first]
    second = local_run.run_pipeline(settings, lambda _: None)
    assert run_directories(tmp_path) == [future[2], first, second]
    (tmp_path / "run.pid").write_text(str(os.getpid()))
    in_progress = progress(tmp_path)
    assert in_progress
    assert in_progress.directory == str(second)


def test_order_of_runs_survives_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """The newer run has the earlier name. Both are in the past by now."""
    older, newer = make_runs(tmp_path, "20251122-110000.000000", "20251122-090000.000000")
    prune_runs(tmp_path, older, 20)
    (tmp_path / "run.order").write_text(f"{older.name}\n")
    prune_runs(tmp_path, newer, 20)
    assert run_directories(tmp_path) == [older, newer]
    prune_runs(tmp_path, newer, 1)
    assert run_directories(tmp_path) == [newer]


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (-9, "", "The pipeline was killed by SIGKILL"),
        (1, "ImportError: no kfp", "The pipeline ended with exit status 1: ImportError: no kfp"),
        (1, "", "The pipeline ended with exit status 1 and printed nothing."),
    ],
)
def test_end_of_the_pipeline_process_is_named(tmp_path: Path, status: int, output: str, expected: str) -> None:
    (tmp_path / "log.txt").write_text(output)
    event = local_run._silent_failure(tmp_path, status)
    assert event.message.startswith(expected)
    assert "out of memory" not in event.message


def test_setting_that_is_not_utf8_is_refused_before_the_run(tmp_path: Path) -> None:
    settings = load(environment={}, overrides=[f"workdir={tmp_path / 'work'}", "data.dataset=\udce9"])
    with pytest.raises(SettingsError, match=r"^data\.dataset = .* is not UTF-8, .* rename it\.$"):
        local_run.run_pipeline(settings, lambda _: None)
    assert not (tmp_path / "work").exists()
