"""A node of multi-node training: ``python -m evernear.embedding.node STORE RUN`` in a TrainJob.

The train step writes the run's `NodeTask` to the store, and reads each node's `NodeLog` from there.
The result is the last checkpoint. If one node is lost, the processes on the others exit, and the
JobSet restarts all, which resume from the last checkpoint. A `TrainingError`, such as a loss that
is not finite, would recur, so its exit code ends the TrainJob (``podFailurePolicy`` in
``deploy/components/multi-node-training``).
"""

import os
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from evernear.common.frozen import Document
from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.common.store.patience import patient
from evernear.data.shards import Dataset
from evernear.embedding import distributed
from evernear.embedding.artifact import Epoch
from evernear.embedding.clock import Steps
from evernear.embedding.recipe import Recipe
from evernear.embedding.train import train_in_processes
from evernear.errors import EvernearError, IntegrityError

TASK = "nodes/task"
LOG_MAX_LINES = 200


class NodeTask(Document):
    """What the nodes of a run share: ``runs/<run>/nodes/task.json``."""

    dataset: str
    digest: str
    recipe: Recipe


class NodeLog(Document):
    """The progress of one node, including restarts: ``runs/<run>/nodes/<rank>.json``."""

    lines: tuple[str, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    """Since the last restart. Only the first node reports epochs."""

    @staticmethod
    def of(record: RunRecord, rank: int) -> "NodeLog":
        """Empty before the node starts."""
        return record.find(f"nodes/{rank}", NodeLog) or NodeLog()


class _Logger:
    def __init__(self, record: RunRecord, rank: int) -> None:
        self._record, self._rank = record, rank
        self._log = NodeLog.of(record, rank).model_copy(update={"epochs": ()})

    def write(self, text: str, *epochs: Epoch) -> None:
        print_line(text)
        lines = (*self._log.lines, *(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}" for line in text.splitlines()))
        self._log = NodeLog(lines=lines[-LOG_MAX_LINES:], epochs=(*self._log.epochs, *epochs))
        self._record.save(**{f"nodes/{self._rank}": self._log.model_dump(mode="json")})


def run_node(store: Store, run: str, node: distributed.Node) -> None:
    """Train as ``node``, and log progress and errors to ``store``."""
    record = RunRecord(store, run)
    logger = _Logger(record, node.rank)
    task = record.find(TASK, NodeTask)
    dataset = Dataset.find(store, task.dataset, task.digest) if task else None
    if task is None or dataset is None:
        raise IntegrityError(f"The store {store.uri} has no training task of the run {run}; run the train step again.")
    logger.write(f"Node {node.rank + 1} of {node.count} started. Processes: {task.recipe.processes}.")

    def report(message: Epoch | Steps) -> None:
        if isinstance(message, Epoch):
            text = f"epoch {message.epoch}/{task.recipe.epochs}, loss {message.train_loss:.3f}"
            logger.write(f"{text}, gallery accuracy {message.gallery_accuracy:.2%}", message)

    try:
        with tempfile.TemporaryDirectory() as directory:
            train_in_processes(dataset, task.recipe, Path(directory), store, report, node=node)
    except EvernearError as error:
        logger.write(str(error))
        raise
    except Exception:
        logger.write(traceback.format_exc())
        raise
    logger.write("Training finished.")


def main() -> int:
    mask_streams()
    store_uri, run = sys.argv[1:]
    try:
        with patient(print_line):
            run_node(open_store(store_uri), run, distributed.Node.from_environment(os.environ))
    except EvernearError as error:
        print_line(f"evernear: {error}", sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
