"""Ctrl-C and a kill: no process remains, and the same command resumes."""

import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from tests.real.scenarios.test_interrupted import interrupted
from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, Workspace, step_processes
from tests.slow.scenarios.test_bad_luck import each_workspace

__all__ = ["each_workspace"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("step", ["ingest", "train", "deploy"])
def test_run_resumes_after_an_interrupt(each_workspace: Workspace, step: str) -> None:
    each_workspace.environment["EVERNEAR_TARGET"] = "local"
    with each_workspace.start("run", "--preset", "quick") as process:
        each_workspace.await_step(step, process)
        message = interrupted(process)
    assert step in message
    assert ("`evernear status` shows which release is live" in message) is (step == "deploy")
    words = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in words if str(each_workspace.workdir) in line], (
        "a TorchServe that was starting is stopped"
    )
    try:
        assert each_workspace.run()["promoted"]
    finally:
        each_workspace.command("stop")


def training_processes(pipeline: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that the train step has started."""
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for step in step_processes(pipeline):
            started += [child for child in step.children() if "--multiprocessing-fork" in child.cmdline()]
    return started


def test_training_processes_end_with_the_run(each_workspace: Workspace) -> None:
    words = ("--set", "train.processes=2", "--set", "train.epochs=1000")
    for end in (signal.SIGINT, signal.SIGKILL):
        with each_workspace.start("run", "--preset", "quick", *words) as process:
            each_workspace.await_step("train", process)
            workers: list[psutil.Process] = []
            while len(workers) < 2:
                assert process.poll() is None
                workers = training_processes(process)
            process.send_signal(end)
            process.communicate(timeout=COMMAND_TIMEOUT_S)
        _, alive = psutil.wait_procs(workers, timeout=120)
        assert not alive, end
