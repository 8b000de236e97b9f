"""Run a compiled pipeline on this machine, with each step in a separate process.

``evernear run`` starts this module as a process, writes one line of JSON to its standard input
(``{"pipeline": ..., "pipeline_root": ..., "arguments": {...}}``), and keeps the pipe open. When the
parent ends, the pipe closes, and the run ends too. ``pipeline`` is a golden file's name without
suffix, or the path of another one.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

os.environ["_KFP_RUNTIME"] = "true"  # as in a step, without kfp's client, which takes a second to import
import kfp  # noqa: F401 # pyright: ignore[reportUnusedImport]

del os.environ["_KFP_RUNTIME"]
from kfp import components, local
from kfp.local.status import Status
from kfp.local.subprocess_task_handler import SubprocessTaskHandler

from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.common.processes import describe_ending, oom_kills, shadowed_modules
from evernear.common.progress import EVENTS_VARIABLE, read_events, record_failure
from evernear.common.run_record import RUNNER_VARIABLE
from evernear.errors import EvernearError
from evernear.kubeflow import GOLDEN
from evernear.settings import OneRun
from evernear.settings.sources import parse

LAST_OUTPUT_BYTES = 8192


def main() -> int:
    """The exit code is 0 if every step succeeded."""
    mask_streams()
    order = json.loads(sys.stdin.readline())
    os.environ[RUNNER_VARIABLE] = str(os.getpid())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # kfp guesses from the image's name whether it contains Python. A local run uses none.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    # kfp's own method passes paths to a shell without quotes, replaces "python3" in them, discards
    # the exit status, and fails if the output is not UTF-8.
    SubprocessTaskHandler.run = lambda self: _run_task(self)
    # workspace_root is not set, because kfp deletes this directory after the run.
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=order["pipeline_root"])
    compiled = Path(order["pipeline"])
    path = compiled if compiled.suffix else GOLDEN / f"{compiled}.yaml"
    pipeline = components.load_component_from_text(_for_this_machine(path.read_text()))
    try:
        pipeline(**order["arguments"])
    except RuntimeError as error:  # a task failed and has already printed the reason
        print_line(str(error), sys.stderr)
        return 1
    return 0


def _run_task(task: SubprocessTaskHandler) -> Status:
    """Run the component of a compiled task, whose command is ``sh -ec SCRIPT SOURCE ARGUMENTS``."""
    _, _, _, source, *arguments = task.full_command
    return Status.FAILURE if run_step(source, arguments, task.env_vars) else Status.SUCCESS


def run_step(source: str, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a component in a process, print its output, and return the exit status. Steps record
    their own errors. If one ended without, for example killed, this records how."""
    oom_kills_before = oom_kills()
    last_output = b""
    with start_step(source, arguments, {**os.environ, **variables, "_KFP_RUNTIME": "true"}) as process:
        assert process.stdout is not None  # noqa: S101 - because of stdout=PIPE
        while part := os.read(process.stdout.fileno(), LAST_OUTPUT_BYTES):
            last_output = (last_output + part)[-LAST_OUTPUT_BYTES:]
            _print(part)
    if process.returncode:
        name = _value(arguments, "--function_to_execute")
        if not _recorded_failure(name):
            ran_out_of_memory = oom_kills() > oom_kills_before
            ending = describe_ending(process.returncode, last_output.decode(errors="replace"), ran_out_of_memory)
            _record(name, arguments, f"The step {ending} {shadowed_modules()}".rstrip())
    return process.returncode


@contextmanager
def start_step(
    source: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    """Start kfp's executor with ``source``, the code of a component. No shell interprets a path."""
    with tempfile.TemporaryDirectory(prefix="step-") as directory:
        module = Path(directory, "component.py")
        module.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "kfp.dsl.executor_main", "--component_module_path", str(module), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
            yield process


def _print(part: bytes) -> None:
    """Print a step's output, which the parent of this process masks."""
    try:
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    except OSError:  # the disk is full; the step continues, and fails when it writes output itself
        pass


def _recorded_failure(step: str) -> bool:
    path = os.environ.get(EVENTS_VARIABLE)
    events = read_events(Path(path))[0] if path else []
    return any(event.step == step and event.kind == "failed" for event in events)


def _record(step: str, arguments: Sequence[str], message: str) -> None:
    parameters: dict[str, Any] = json.loads(_value(arguments, "--executor_input"))["inputs"]["parameterValues"]
    store = parameters.get("store") or parse(OneRun, parameters["settings"]).store_uri
    record_failure(step, parameters["run"], store, message, EvernearError.exit_code)


def _value(arguments: Sequence[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def _for_this_machine(compiled: str) -> str:
    documents = list(yaml.load_all(compiled, yaml.CSafeLoader))
    spec = documents[0]
    # Without the suffix, kfp would mistake a component with the pipeline's name, as in rollback,
    # for the pipeline.
    spec["pipelineInfo"]["name"] += "-local"
    return yaml.dump_all(documents, Dumper=yaml.CSafeDumper)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
