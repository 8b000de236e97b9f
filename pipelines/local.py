"""Run a compiled pipeline on this machine, each step in its own process.

``evernear run`` starts this module and writes one line of JSON to its standard input:
``{"pipeline": ..., "pipeline_root": ..., "arguments": {...}}``. It keeps the pipe open; when the pipe closes, the
parent has ended and the run ends too. ``pipeline`` is the name of a golden file without its suffix, or the path of
another compiled pipeline.
"""

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import yaml
from kfp import components, local

from evernear.kubeflow import GOLDEN
from evernear.output import print_line


def main() -> int:
    """Run one pipeline; the exit code is 0 when every step succeeded."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # kfp guesses from the image's name whether it has Python. A local run uses no image.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    # Without workspace_root, which kfp would delete after the run.
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=order["pipeline_root"])
    compiled = Path(order["pipeline"])
    path = compiled if compiled.suffix else GOLDEN / f"{compiled}.yaml"
    pipeline = components.load_component_from_text(_for_this_machine(path.read_text()))
    try:
        pipeline(**order["arguments"])
    except RuntimeError as error:  # a task failed and has printed the reason
        print_line(str(error), sys.stderr)
        return 1
    return 0


def _for_this_machine(compiled: str) -> str:
    """A compiled pipeline without retries, whose delays would only defer the error message."""
    documents = list(yaml.load_all(compiled, yaml.CSafeLoader))
    spec = documents[0]
    # kfp would mistake a component with the pipeline's name, as in rollback, for the pipeline.
    spec["pipelineInfo"]["name"] += "-local"
    for component in (spec["root"], *spec["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            task.pop("retryPolicy", None)
    return yaml.dump_all(documents, Dumper=yaml.CSafeDumper)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
