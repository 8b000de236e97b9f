"""Run the parts of one worker in a separate process:
``python -m evernear.kubeflow.part STORE FOLDER WORKERS``, the command of an Indexed Job.

The number of the worker is the index in ``JOB_COMPLETION_INDEX``, which Kubernetes sets. An error
that would only occur again ends the process with `FINAL_EXIT_CODE`, so that the Job does not repeat
it.
"""

import os
import sys
from importlib import import_module

from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.common.parts import FINAL_EXIT_CODE, Parts, Worker, is_final, run_parts
from evernear.common.store import open_store
from evernear.common.store.patience import patient
from evernear.errors import EvernearError, SettingsError

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
MODULES = {
    "ingest": "evernear.data.parts",
    "embed": "evernear.embedding.embed",
    "predict": "evernear.serving.batch",
}
"""Each has a function ``open_worker``."""


def open_worker(parts: Parts) -> Worker:
    """Open the worker for the kind of the parts. It prints the number of each part, so that the log
    of a killed pod ends with the part that killed it."""
    kind = parts.plan.kind
    if kind not in MODULES:
        raise SettingsError(
            f"This version of evernear runs no parts of the kind {kind!r}; use the version that planned."
        )
    worker: Worker = import_module(MODULES[kind]).open_worker(parts)

    def run(number: int, value: bytes) -> bytes:
        print_line(f"{kind}: part {number} of {parts.plan.parts}")
        return worker(number, value)

    return run


def main(uri: str, folder: str, workers: int, index: int) -> int:
    """Run the parts ``index::workers``, and return the exit code."""
    mask_streams()
    try:
        with patient(print_line):
            parts = Parts.open(open_store(uri), folder)
            try:
                run_parts(parts, open_worker, index=index, workers=workers)
            except EvernearError as error:
                if is_final(error):
                    parts.save_failure(str(error))
                raise
    except EvernearError as error:
        print_line(f"evernear: {error}", sys.stderr)
        return FINAL_EXIT_CODE if is_final(error) else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(os.environ[INDEX_VARIABLE])))
