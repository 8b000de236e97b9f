"""Ctrl-C and a kill: no process remains, and the same command resumes."""

import signal
import subprocess

import psutil
import pytest

from tests.real.scenarios.test_interrupted import interrupted, workspace
from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, Workspace

__all__ = ["workspace"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("step", ["ingest", "train", "deploy"])
def test_run_resumes_after_an_interrupt(workspace: Workspace, step: str) -> None:
    workspace.environment["EVERNEAR_TARGET"] = "local"
    with workspace.start("run", "--preset", "quick") as process:
        workspace.await_step(step, process)
        message = interrupted(process)
    assert step in message
    assert ("`evernear status` shows which release is live" in message) is (step == "deploy")
    words = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in words if str(workspace.workdir) in line], "a TorchServe that was starting is stopped"
    try:
        assert workspace.run()["promoted"]
    finally:
        workspace.command("stop")


def training_processes(pipeline: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that the train step has started."""
    descendants = psutil.Process(pipeline.pid).children(recursive=True)
    return [process for process in descendants if "--multiprocessing-fork" in _command(process)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_training_processes_end_with_the_run(workspace: Workspace) -> None:
    words = ("--set", "train.processes=2", "--set", "train.epochs=1000")
    for end in (signal.SIGINT, signal.SIGKILL):
        with workspace.start("run", "--preset", "quick", *words) as process:
            workspace.await_step("train", process)
            workers: list[psutil.Process] = []
            while len(workers) < 2:
                assert process.poll() is None
                workers = training_processes(process)
            process.send_signal(end)
            process.communicate(timeout=COMMAND_TIMEOUT_S)
        _, alive = psutil.wait_procs(workers, timeout=120)
        assert not alive, end
