"""Training in several processes: its result, its threads, and what ends it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from evernear.common import processes as threads
from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding import distributed
from evernear.embedding.artifact import Epoch
from evernear.embedding.clock import Steps
from evernear.embedding.train import train_network
from evernear.errors import StoreError, TrainingError
from evernear.settings import TrainSettings
from tests.limits import largest_file
from tests.real.embedding.conftest import TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def two_processes() -> TrainSettings:
    return TINY.model_copy(update={"processes": 2})


def test_processes_train_together_and_divide_the_cpus(
    digits: Dataset,
    two_processes: TrainSettings,
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: 6)
    monkeypatch.setenv(threads.THREADS, "6")
    monkeypatch.setenv(threads.CHOSEN_THREADS, "6")
    monkeypatch.setenv("OMP_DISPLAY_ENV", "TRUE")
    epochs: list[Epoch] = []
    steps: list[Steps] = []
    settings = two_processes.model_copy(update={"epochs": 6, "min_steps": 100})
    result = train_network(digits, settings, tmp_path / "trained", store, on_epoch=epochs.append, on_step=steps.append)
    assert [completed for completed, _, _ in steps] == list(range(1, steps[0].total + 1))
    assert result.epochs == tuple(epochs)
    assert result.epochs[-1].gallery_accuracy > 0.7
    assert len(list(store.list("checkpoints/"))) == 1
    stderr = capfd.readouterr().err
    assert "OMP_NUM_THREADS = '3'" in stderr
    assert "OMP_NUM_THREADS = '6'" not in stderr


def test_a_store_error_in_a_process_is_raised(digits, two_processes, tmp_path, store) -> None:
    with largest_file(2**12), pytest.raises(StoreError, match=r"checkpoints/.* would exceed the file size limit"):
        train_network(digits, two_processes, tmp_path / "trained", store)


def test_a_training_error_in_a_process_is_raised(digits: Dataset, two_processes: TrainSettings, tmp_path: Path) -> None:
    settings = two_processes.model_copy(update={"learning_rate": 1e38})
    with pytest.raises(TrainingError, match="not a finite number"):
        train_network(digits, settings, tmp_path)


def kill_rank_1(send: Callable[[int], None]) -> None:
    send(os.getpid())
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail(_: Callable[[int], None]) -> None:
    raise ZeroDivisionError("a bug")


def test_a_killed_process_is_an_error_and_ends_the_others() -> None:
    pids: list[int] = []
    with pytest.raises(TrainingError, match="process") as killed:
        distributed.run_processes(kill_rank_1, 2, "gloo", pids.append)
    assert killed.value.exit_code == 1, "a restart may succeed, and 6 ends the TrainJob"
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


def test_a_bug_in_a_process_leaves_its_traceback_in_the_log(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(TrainingError, match=r"Training process \d of 2 failed; see the log"):
        distributed.run_processes(fail, 2, "gloo", print)
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err
