"""Ctrl-C: a message about what was stopped and what remains, exit code 130, and no remaining
process."""

import json
import signal
import socket
import subprocess
from contextlib import suppress

import psutil
import pytest

from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, Workspace


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; init may reap one that has ended only later."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def interrupted(process: subprocess.Popen[str], progress: str = "") -> str:
    """Interrupt the command; check that it shows ``progress`` and its processes end, and return its
    last message."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not [child for child in children if is_alive(child)], "a process outlived its command"
    assert progress in output
    (message,) = [line for line in output.splitlines() if line.startswith("evernear: ")]
    return message


@pytest.mark.slow
def test_interrupted_run_reports_what_remains(digits_workspace: Workspace) -> None:
    temporary = digits_workspace.directory / "tmp"
    temporary.mkdir()
    digits_workspace.environment["TMPDIR"] = str(temporary)
    with digits_workspace.start("run", "--preset", "quick") as process:
        digits_workspace.await_step("train", process)
        in_progress = json.loads(digits_workspace.command("status", "--json").stdout)["run"]
        message = interrupted(process, "waiting up to 10 s for the steps to clean up")
    assert in_progress["step"] in ("train", "probe")
    assert in_progress["process"] == process.pid
    assert json.loads(digits_workspace.command("status", "--json").stdout)["run"] is None
    assert message.startswith("evernear: Interrupted during ")
    assert "train" in message
    assert message.endswith(
        ": all processes of the run have ended, and no release is live. Ingested images and finished epochs "
        "are saved; the same command resumes from there."
    )
    assert not list(temporary.glob("evernear-*")), "the steps clean up"


def test_other_commands_can_be_interrupted(digits_workspace: Workspace) -> None:
    image = next((digits_workspace.directory / "images").rglob("*.png"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        words = ("--target", "127.0.0.1", "--port", port, "--format", "prep", "--timeout-s", "300")
        with digits_workspace.start("predict", str(image), *words) as process, silent.accept()[0]:
            message = interrupted(process)
    assert message == "evernear: Interrupted. Nothing is half-written; run the command again to continue."
