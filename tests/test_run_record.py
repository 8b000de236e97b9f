"""What a step records about itself, whatever happens to it."""

import errno
from pathlib import Path

import pytest

from evernear import progress
from evernear.errors import DataError
from evernear.progress import step
from evernear.run_record import RunRecord
from evernear.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def test_a_step_is_running_until_it_is_finished(store: Store) -> None:
    record = RunRecord(store, "run")
    with step("train", "run", store.uri) as running:
        (seen,) = record.steps()
        assert (seen.step, seen.state, seen.ended) == ("train", "running", None)
        running.summary = "best epoch 3"
    (seen,) = record.steps()
    assert (seen.state, seen.message, seen.exit_code) == ("finished", "best epoch 3", 0)
    assert seen.ended is not None
    assert seen.started <= seen.ended
    assert RunRecord(store, "another run").steps() == ()


@pytest.mark.parametrize(
    ("error", "sentence", "exit_code"),
    [
        (DataError("There are no images."), "There are no images.", 3),
        (OSError(errno.ENOSPC, "full", "/data/x"), "The disk that holds /data/x is full; free some space", 4),
        (KeyError("surprise"), "Unexpected KeyError: 'surprise'", 1),
    ],
)
def test_a_step_that_fails_records_its_error(store: Store, error: Exception, sentence: str, exit_code: int) -> None:
    with pytest.raises((SystemExit, KeyError)), step("ingest", "run", store.uri):
        raise error
    (seen,) = RunRecord(store, "run").steps()
    assert (seen.state, seen.exit_code) == ("failed", exit_code)
    assert seen.message.startswith(sentence)


def test_in_kubernetes_the_error_is_the_pods_termination_message(
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
    assert len(message.read_bytes()) <= 4096, "the kubelet reads no more"


def test_a_store_that_cannot_be_written_fails_no_step_that_does_not_need_it(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    with step("export", "run", (tmp_path / "store").as_uri()) as running:
        running.summary = "done"
