"""Training in several processes, one per GPU, started with torchrun; without GPUs they share the cores."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.disk import write_atomically
from evernear.embedding.history import HISTORY_FILE, Epoch, TrainingResult
from evernear.errors import StoreError, TrainingError
from evernear.frozen import Frozen
from evernear.output import print_line
from evernear.settings import TrainSettings
from evernear.store import Store
from evernear.threads import environment_of_each


class Job(Frozen):
    """What a training process is told; `evernear.embedding.worker` reads it."""

    dataset_dir: Path
    settings: TrainSettings
    out_dir: Path
    store_uri: str | None
    exclude_labels: frozenset[str]


class Failure(Frozen):
    """How a training process failed: the sentence and the exit code of its error."""

    failure: str
    exit_code: int


def launch(
    dataset: Dataset,
    settings: TrainSettings,
    out_dir: Path,
    store: Store | None,
    exclude_labels: frozenset[str],
    on_epoch: Callable[[Epoch], None] | None,
) -> TrainingResult:
    """Run `train` in ``settings.processes`` processes; they leave the same files in ``out_dir``.

    Raises:
        StoreError: a process could not write to the store or to its disk.
        TrainingError: a process failed in another way; the sentence is its own where it had one.
    """
    with tempfile.TemporaryDirectory(prefix="evernear-train-") as scratch:
        job = Job(
            dataset_dir=Path(scratch),
            settings=settings,
            out_dir=out_dir.resolve(),
            store_uri=store.uri if store is not None else None,
            exclude_labels=exclude_labels,
        )
        save_manifest(dataset.manifest, job.dataset_dir)
        job_file = Path(scratch) / "job.json"
        write_atomically(job_file, job.model_dump_json())
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        worker = [f"--nproc-per-node={settings.processes}", "-m", "evernear.embedding.worker", str(job_file)]
        environment = environment_of_each(settings.processes)
        with subprocess.Popen(
            [*torchrun, *worker],
            env=environment,
            stdin=subprocess.PIPE,  # closed when this process ends: the workers read it, and end then
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None  # noqa: S101 - as asked for with PIPE
            failures = [failure for line in running.stdout if (failure := _report(line, on_epoch))]
        if failures:
            kind = StoreError if failures[0].exit_code == StoreError.exit_code else TrainingError
            raise kind(failures[0].failure)
        if running.returncode != 0:
            raise TrainingError(f"A training process of {settings.processes} died; its log tells why.")
    return TrainingResult.model_validate_json((out_dir / HISTORY_FILE).read_bytes())


def _report(line: str, on_epoch: Callable[[Epoch], None] | None) -> Failure | None:
    """Pass on what a process printed; a failure is returned."""
    with suppress(ValidationError):
        return Failure.model_validate_json(line)
    try:
        point = Epoch.model_validate_json(line)
    except ValidationError:
        print_line(line.removesuffix("\n"))
        return None
    if on_epoch is not None:
        on_epoch(point)
    return None
