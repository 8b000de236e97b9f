"""One training process of several: ``torchrun ... -m evernear.embedding.worker JOB``, started by `launch`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from evernear.data.shards import Dataset
from evernear.embedding.history import Epoch
from evernear.embedding.launch import Failure, Job
from evernear.embedding.train import train
from evernear.errors import EvernearError
from evernear.store import open_store


def main(job_file: Path) -> None:
    """Join the other processes, train with them, print each epoch, or the failure, as a line of JSON."""
    job = Job.model_validate_json(job_file.read_bytes())
    gpus = torch.cuda.device_count() if job.settings.device != "cpu" else 0
    dist.init_process_group("nccl" if gpus >= job.settings.processes else "gloo")
    store = open_store(job.store_uri) if job.store_uri is not None else None
    try:
        train(Dataset.open(job.dataset_dir), job.settings, job.out_dir, store, job.exclude_labels, _print_epoch)
    except EvernearError as error:
        print(Failure(failure=str(error), exit_code=error.exit_code).model_dump_json(), flush=True)
        sys.exit(error.exit_code)
    finally:
        dist.destroy_process_group()


def _print_epoch(point: Epoch) -> None:
    print(point.model_dump_json(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
