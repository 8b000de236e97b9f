"""The run's record of a step that runs, finishes or fails."""

import errno
from pathlib import Path

import pytest

from evernear.common import progress
from evernear.common.progress import step
from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.errors import DataError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


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


def test_unwritable_store_does_not_fail_a_step(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    with step("export", "run", (tmp_path / "store").as_uri()) as running:
        running.summary = "done"
