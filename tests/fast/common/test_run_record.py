"""The run's record of a step that runs, finishes or fails."""

import errno
import threading
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue

import pytest

from evernear.common import progress
from evernear.common.progress import step
from evernear.common.run_record import RunRecord, StepProgress, StepRecord
from evernear.common.store import Store
from evernear.errors import DataError


def test_step_is_recorded_as_running_then_finished(store: Store) -> None:
    record = RunRecord(store, "run")
    with step("train", "run", store.uri) as running:
        (recorded,) = record.steps()
        assert (recorded.step, recorded.state, recorded.ended) == ("train", "running", None)
        running.summary = "best epoch 3"
    (recorded,) = record.steps()
    assert (recorded.state, recorded.message, recorded.exit_code) == ("finished", "best epoch 3", 0)
    assert recorded.ended is not None
    assert recorded.started <= recorded.ended
    assert recorded.peak_memory_bytes > 0
    assert recorded.cpu_s > 0
    assert RunRecord(store, "another run").steps() == ()


@pytest.mark.parametrize(
    ("error", "message", "exit_code"),
    [
        (DataError("There are no images."), "There are no images.", 3),
        (OSError(errno.ENOSPC, "full", "/data/x"), "The disk that holds /data/x is full; free some space", 4),
        (KeyError("surprise"), "Unexpected KeyError: 'surprise'", 1),
    ],
)
def test_failed_step_records_its_error(store: Store, error: Exception, message: str, exit_code: int) -> None:
    with pytest.raises((SystemExit, KeyError)), step("ingest", "run", store.uri):
        raise error
    (recorded,) = RunRecord(store, "run").steps()
    assert (recorded.state, recorded.exit_code) == ("failed", exit_code)
    assert recorded.message.startswith(message)


def test_error_is_the_termination_message_in_kubernetes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = tmp_path / "termination-log"
    monkeypatch.setattr(progress, "TERMINATION_MESSAGE", message)
    for in_cluster in (False, True):
        if in_cluster:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        with pytest.raises(SystemExit), step("ingest", "run", store.uri):
            raise DataError("There are no images. " * 1000)
        assert message.exists() is in_cluster
    assert len(message.read_bytes()) <= 4096, "the limit of the kubelet"


def test_unwritable_store_does_not_fail_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    with step("export", "run", (tmp_path / "store").as_uri()) as running:
        running.summary = "done"
    assert "[export] finished: done" in capsys.readouterr().out
    assert (tmp_path / "store").read_text() == "a file, not a directory"


@pytest.fixture
def saved_progress(monkeypatch: pytest.MonkeyPatch) -> Queue[StepProgress]:
    """Receives the progress that is in the store."""
    save, saved = RunRecord.save_step, Queue[StepProgress]()

    def save_and_tell(record: RunRecord, step: StepRecord) -> None:
        save(record, step)
        if step.progress:
            saved.put(step.progress)

    monkeypatch.setattr(RunRecord, "save_step", save_and_tell)
    return saved


def test_progress_of_a_running_step_is_in_the_store(
    store: Store, saved_progress: Queue[StepProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REPORT_INTERVAL_S", 0.05)
    with step("embed", "run", store.uri) as running:
        running.report("reading")
        first = saved_progress.get(timeout=30)
        assert (first.message, first.done) == ("reading", None)
        counted = StepProgress(at=datetime.now(UTC), message="5 of 9 images", done=5, total=9, left_s=4.0)
        running.progressed(counted)
        assert saved_progress.get(timeout=30) == counted
        running.report("5 of 9 images, about 4 s left")
        last = saved_progress.get(timeout=30)
        assert "about" in last.message
        assert (last.done, last.total, last.left_s) == (5, 9, 4.0), "a line of the log keeps the numbers"
        (recorded,) = RunRecord(store, "run").steps()
        assert (recorded.state, recorded.progress) == ("running", last)
    (recorded,) = RunRecord(store, "run").steps()
    assert recorded.progress is None, "a finished step has a summary instead"


def test_progress_is_written_at_most_once_in_an_interval(
    store: Store, saved_progress: Queue[StepProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REPORT_INTERVAL_S", 3600)
    with step("embed", "run", store.uri) as running:
        running.report("first")
        assert saved_progress.get(timeout=30).message == "first"
        for number in range(1000):
            running.report(f"image {number}")
    assert saved_progress.empty()


def test_slow_store_neither_delays_a_step_nor_replaces_its_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save, writing, may_write = RunRecord.save_step, threading.Event(), threading.Event()

    def slow(record: RunRecord, step: StepRecord) -> None:
        if step.progress:
            writing.set()
            assert may_write.wait(30)
        save(record, step)

    monkeypatch.setattr(RunRecord, "save_step", slow)
    with step("embed", "run", store.uri) as running:
        running.report("first")
        assert writing.wait(30)
        running.report("second")  # returns, although the store does not answer
        may_write.set()
        running.summary = "done"
    (recorded,) = RunRecord(store, "run").steps()
    assert (recorded.state, recorded.message) == ("finished", "done")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
