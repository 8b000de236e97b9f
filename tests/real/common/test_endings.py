"""Messages about processes that ended without recording an error, and about modules that hide
others."""

import json
import os
import subprocess
import sys
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

from evernear.common.processes import describe_ending, oom_kills, shadowed_modules
from evernear.common.progress import EVENTS_VARIABLE, read_events, step
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.kubeflow import local_pipeline

TRACEBACK = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
pyo3_runtime.PanicException: invalid endpoint
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace

----
"""


@pytest.mark.parametrize(
    ("status", "output", "out_of_memory", "expected"),
    [
        (-9, "epoch 1", False, "was killed by SIGKILL, which another process or the kernel sent"),
        (137, "epoch 1", True, "ran out of memory: the kernel killed it (SIGKILL)."),
        (-6, "free(): invalid pointer\n", False, "was killed by SIGABRT: free(): invalid pointer"),
        (139, "", False, "was killed by SIGSEGV."),
        (1, TRACEBACK, True, "ended with exit status 1: pyo3_runtime.PanicException: invalid endpoint"),
        (3, "", False, "ended with exit status 3 and printed nothing."),
    ],
)
def test_only_a_signal_kills(status: int, output: str, out_of_memory: bool, expected: str) -> None:
    assert describe_ending(status, output, out_of_memory).startswith(expected)


def test_out_of_memory_kills_are_counted_by_cgroups(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/step\n")
    (tmp_path / "sys/fs/cgroup/pod/step").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pod/step/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2


@pytest.mark.parametrize("context", [local_pipeline.CONTEXT, local_pipeline.FRESH])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "The step was killed by SIGKILL, which another process or the kernel sent",
        ),
        (
            r"import os; os.write(1, b'started\n\xe9t\xe9: broken\n'); os._exit(1)",
            "The step ended with exit status 1: \ufffdt\ufffd: broken",
        ),
        ("raise KeyboardInterrupt", "The step was killed by SIGINT, which another process or the kernel sent"),
        ("raise ValueError('no images')", "The step ended with exit status 1: ValueError: no images"),
    ],
)
def test_step_that_could_not_record_its_end_is_recorded(
    source: str, expected: str, context: BaseContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one prints text that is not UTF-8."""
    monkeypatch.setattr(local_pipeline, "CONTEXT", context)
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # pytest's has no buffer
    store = (tmp_path / "store").as_uri()
    inputs = json.dumps({"inputs": {"parameterValues": {"run": "1", "settings": {"store": store}}}})
    arguments = ["--executor_input", inputs, "--function_to_execute", "train"]
    assert local_pipeline.run_step(source, arguments, {}) != 0
    (event,), _ = read_events(tmp_path / "events.jsonl")
    assert (event.step, event.kind) == ("train", "failed")
    assert event.message.startswith(expected)
    (record,) = RunRecord(open_store(store), "1").steps()
    assert (record.state, record.message) == ("failed", event.message)
    local_pipeline.run_step(source, arguments, {})
    assert len(read_events(tmp_path / "events.jsonl")[0]) == 1, "a recorded error is not replaced"


class Panic(BaseException):
    """As pyo3 raises for a panic in Rust."""


@pytest.mark.parametrize("error", [Panic("called `Result::unwrap()`"), SystemExit("this is my own faiss.py")])
def test_panic_and_exit_of_a_library_are_recorded(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), step("ingest", "1", tmp_path.as_uri()):
        raise error
    (record,) = RunRecord(open_store(tmp_path.as_uri()), "1").steps()
    assert record.state == "failed"
    assert record.message.startswith(f"Unexpected {type(error).__name__}: {error} (test_endings.py:")


def test_modules_of_python_path_that_hide_installed_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "faiss.py").touch()
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "__init__.py").touch()
    (tmp_path / "pipelines.py").touch()
    files = f"{tmp_path / 'faiss.py'}, {tmp_path / 'random'}"
    assert shadowed_modules(f"{tmp_path}{os.pathsep}") == (
        f"On PYTHONPATH, {files} hides the installed module of that name; rename it or unset PYTHONPATH."
    )
    assert shadowed_modules("") == ""


@pytest.mark.parametrize(
    "program", [[str(Path(sys.executable).parent / "evernear")], [sys.executable, "-m", "evernear"]]
)
def test_command_names_a_module_that_hides_the_standard_library(program: list[str], tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(1)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    failed = subprocess.run([*program, "--version"], env=environment, cwd="/", capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"evernear: On PYTHONPATH, {tmp_path / 'random.py'} hides")
    assert len(failed.stderr.splitlines()) == 1


def test_module_in_the_current_directory_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(1)")
    done = subprocess.run([sys.executable, "-m", "evernear", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("evernear "), done.stderr
