"""Run a part of a step in a separate process:
``python -m evernear.kubeflow.part STORE FOLDER``, the command of an Indexed Job.

The part number is the index in ``JOB_COMPLETION_INDEX``, which Kubernetes sets. An error that would
only occur again ends the process with `FINAL_EXIT_CODE`, so that the Job does not repeat the part.
"""

import os
import sys
from importlib import import_module

from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.common.parts import FINAL_EXIT_CODE, OpenWorker, Parts, is_final, run_part
from evernear.common.store import open_store
from evernear.errors import EvernearError, MissingObjectError, SettingsError

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
MODULES = {
    "ingest": "evernear.data.decode_part",
    "embed": "evernear.embedding.embed",
    "predict": "evernear.serving.batch",
}
"""Each has a function ``open_worker``."""


def worker_of(kind: str) -> OpenWorker:
    if kind not in MODULES:
        raise SettingsError(
            f"This version of evernear runs no parts of the kind {kind!r}; use the version that planned."
        )
    return import_module(MODULES[kind]).open_worker


def main(uri: str, folder: str, number: int) -> int:
    """Run the part ``number``, and return the exit code."""
    mask_streams()
    try:
        parts = Parts.find(open_store(uri), folder)
        if parts is None:
            raise MissingObjectError(f"{folder}/plan.json does not exist in {uri}.")
        try:
            worker = worker_of(parts.plan.kind)(parts)
        except EvernearError as error:
            if is_final(error):
                parts.save_failure(number, error)
            raise
        run_part(parts, number, worker)
    except EvernearError as error:
        print_line(f"evernear: {error}", sys.stderr)
        return FINAL_EXIT_CODE if is_final(error) else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(os.environ[INDEX_VARIABLE])))
