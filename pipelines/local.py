"""Run a compiled pipeline on this machine, each step a process of its own.

``evernear run`` starts this module with one line of JSON on standard input, ``{"pipeline": ..., "pipeline_root": ...,
"arguments": {...}}``, and keeps that pipe open: when it closes, the starter is gone and nothing of the run may stay
behind. ``pipeline`` is the name of a golden file without its suffix, or the path of another compiled pipeline.
"""

import json
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path

from kfp import components, local

from evernear.kubeflow import GOLDEN
from evernear.output import print_line


def main() -> int:
    """Run one pipeline; the exit code is 0 when every step succeeded."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_starter, daemon=True).start()
    # kfp guesses from an image's name whether it holds Python; ours does, and here it is not used.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    # kfp.local: `init` once per run, and never a workspace_root (it is deleted after the run).
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=order["pipeline_root"])
    compiled = Path(order["pipeline"])
    path = compiled if compiled.suffix else GOLDEN / f"{compiled}.yaml"
    # Where a component has the pipeline's own name, as in rollback, kfp would take that for the pipeline.
    text = re.sub(r"(?m)^(pipelineInfo:\n(?:  .*\n)*?  name: \S+)$", r"\1-local", path.read_text(), count=1)
    # A cluster's second chances, minutes apart, would only keep a person from the sentence that says what is wrong.
    text = re.sub(r"(?m)^( +)retryPolicy:\n(?:\1 +.*\n)+", "", text)
    pipeline = components.load_component_from_text(text)
    try:
        pipeline(**order["arguments"])
    except RuntimeError as error:  # kfp's word for "a task failed"; the step has said why
        print_line(str(error), sys.stderr)
        return 1
    return 0


def _die_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
