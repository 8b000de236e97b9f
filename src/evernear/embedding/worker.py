"""One training process of several: ``torchrun ... -m evernear.embedding.worker JOB``, started by `launch`."""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from evernear.data.shards import Dataset
from evernear.embedding.history import Epoch
from evernear.embedding.launch import Failure, Job
from evernear.embedding.train import train
from evernear.errors import EvernearError
from evernear.output import print_json
from evernear.store import open_store


def main(job_file: Path) -> None:
    """Join the other processes, train with them, print each epoch, or the failure, as a line of JSON."""
    threading.Thread(target=_end_with_step, daemon=True).start()
    job = Job.model_validate_json(job_file.read_bytes())
    gpus = torch.cuda.device_count() if job.settings.device != "cpu" else 0
    dist.init_process_group("nccl" if gpus >= job.settings.processes else "gloo")
    store = open_store(job.store_uri) if job.store_uri is not None else None
    try:
        train(Dataset.open(job.dataset_dir), job.settings, job.out_dir, store, job.exclude_labels, _print_epoch)
    except EvernearError as error:
        print_json(Failure(failure=str(error), exit_code=error.exit_code))
        sys.exit(error.exit_code)
    finally:
        dist.destroy_process_group()


def _end_with_step() -> None:
    """End when the step is gone, which holds the other end of stdin: torchrun starts this process in a session of its
    own, where no signal to the step reaches it."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _print_epoch(point: Epoch) -> None:
    print_json(point)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
