"""Run a compiled pipeline on this machine, with each step in a separate process.

``evernear run`` starts this module as a process, writes one line of JSON to its standard input
(``{"pipeline": ..., "pipeline_root": ..., "arguments": {...}}``), and keeps the pipe open. When the
parent ends, the pipe closes, and the run ends too. ``pipeline`` is a golden file's name without
suffix, or the path of another one.

On Linux, the processes of the steps are forks of a server that has imported what most steps need,
because these imports take longer than the rest of most steps.
"""

import atexit
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.common.processes import describe_ending, oom_kills, shadowed_modules
from evernear.common.progress import EVENTS_VARIABLE, read_events, record_failure
from evernear.common.run_record import RUNNER_VARIABLE
from evernear.errors import EvernearError
from evernear.kubeflow import GOLDEN
from evernear.settings import OneRun
from evernear.settings.sources import parse

if TYPE_CHECKING:
    from kfp.local.status import Status
    from kfp.local.subprocess_task_handler import SubprocessTaskHandler

LAST_OUTPUT_BYTES = 8192
KFP_RUNTIME = "_KFP_RUNTIME"
"""If "true", as in a step, kfp does not import its client, which takes a second."""
FRESH = multiprocessing.get_context("spawn")
CONTEXT = multiprocessing.get_context("forkserver") if sys.platform == "linux" else FRESH
PRELOADED = (
    "evernear.kubeflow.local_pipeline",
    "kfp.dsl.executor_main",
    "evernear.steps",
    "evernear.embedding.train",
    "evernear.embedding.export",
    "evernear.embedding.embed",
    "scipy.stats",
    "evernear.evaluation.probe",
    "evernear.evaluation.evaluate",
    "evernear.release.archive",
    "evernear.reporting.page",
    *([] if find_spec("pandas") else ["sklearn.manifold"]),  # it would import pandas, and so pyarrow
)
"""None of them may import a library whose threads do not end before a fork, such as pyarrow,
obstore and grpc. A step whose server has such threads starts afresh."""
CONTEXT.set_forkserver_preload(list(PRELOADED))


def main() -> int:
    """The exit code is 0 if every step succeeded."""
    mask_streams()
    os.environ[KFP_RUNTIME] = "true"
    if CONTEXT.get_start_method() == "forkserver":
        with suppress(OSError):  # the path of its socket is too long
            forkserver.ensure_running()  # it imports while this process does
    import kfp  # noqa: F401 # pyright: ignore[reportUnusedImport]

    del os.environ[KFP_RUNTIME]
    from kfp import components, local
    from kfp.local.subprocess_task_handler import SubprocessTaskHandler

    request = json.loads(sys.stdin.readline())
    os.environ[RUNNER_VARIABLE] = str(os.getpid())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # kfp guesses from the image's name whether it contains Python. A local run uses none.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    # kfp's own method passes paths to a shell without quotes, replaces "python3" in them, discards
    # the exit status, and fails if the output is not UTF-8.
    SubprocessTaskHandler.run = lambda self: _run_task(self)
    # workspace_root is not set, because kfp deletes this directory after the run.
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=request["pipeline_root"])
    compiled = Path(request["pipeline"])
    path = compiled if compiled.suffix else GOLDEN / f"{compiled}.yaml"
    pipeline = components.load_component_from_text(_for_this_machine(path.read_text()))
    try:
        pipeline(**request["arguments"])
    except RuntimeError as error:  # a task failed and has already printed the reason
        print_line(str(error), sys.stderr)
        return 1
    return 0


def _run_task(task: "SubprocessTaskHandler") -> "Status":
    """Run the component of a compiled task, whose command is ``sh -ec SCRIPT SOURCE ARGUMENTS``."""
    from kfp.local.status import Status

    _, _, _, source, *arguments = task.full_command
    return Status.FAILURE if run_step(source, arguments, task.env_vars) else Status.SUCCESS


def run_step(source: str, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a component in a process, print its output, and return the exit status. Steps record
    their own errors. If a step could not, for example because it was killed, this records how it
    ended."""
    oom_kills_before = oom_kills()
    last_output = b""
    with start_step(source, arguments, {**os.environ, **variables, KFP_RUNTIME: "true"}) as (process, output):
        while part := os.read(output.fileno(), LAST_OUTPUT_BYTES):
            last_output = (last_output + part)[-LAST_OUTPUT_BYTES:]
            _print(part)
    status = process.exitcode
    assert status is not None  # noqa: S101 - because it has ended
    if status:
        name = _value(arguments, "--function_to_execute")
        if not _recorded_failure(name):
            ran_out_of_memory = oom_kills() > oom_kills_before
            ending = describe_ending(status, last_output.decode(errors="replace"), ran_out_of_memory)
            _record(name, arguments, f"The step {ending} {shadowed_modules()}".rstrip())
    return status


@contextmanager
def start_step(
    source: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Generator[tuple[BaseProcess, Connection]]:
    """Run kfp's executor with ``source``, the code of a component, in a process. Yields the process
    and its output, and waits for its end."""
    with tempfile.TemporaryDirectory(prefix="step-") as directory:
        module = Path(directory, "component.py")
        module.write_text(source, encoding="utf-8")
        output, written = CONTEXT.Pipe(duplex=False)
        with output:
            with written:
                words = ["--component_module_path", str(module), *arguments]
                process = _start(words, dict(environment), written)
            yield process, output
        process.join()


def _start(words: list[str], environment: dict[str, str], written: Connection) -> BaseProcess:
    process = CONTEXT.Process(target=_execute, args=(words, environment, written))
    try:
        process.start()
    except (EOFError, OSError):  # no server: its socket's path is too long, or it died of an import
        process = FRESH.Process(target=_execute, args=(words, environment, written))
        process.start()
    return process


def _execute(words: list[str], environment: dict[str, str], written: Connection) -> None:
    """``python -m kfp.dsl.executor_main WORDS`` in this process, which has started for it."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(written.fileno(), stream.fileno())
    written.close()
    os.environ.update(environment)  # which keeps what imports have set, such as the instruction sets of oneDNN
    if server_threads() > 1:
        os.execve(sys.executable, [sys.executable, "-m", "kfp.dsl.executor_main", *words], os.environ)  # noqa: S606
    from kfp.dsl import executor_main

    sys.argv[1:] = words
    try:
        executor_main.executor_main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)  # the status says so, as that of any Python
    finally:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - a process of multiprocessing ends without them


def server_threads() -> int:
    """Threads of the server of which this process is a fork, or 1. Those that end themselves before
    a fork, as OpenBLAS's do, do not count."""
    return 1 if forkserver.get_inherited_fds() is None else sum(1 for _ in Path(f"/proc/{os.getppid()}/task").iterdir())


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
