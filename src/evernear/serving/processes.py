"""The processes of a TorchServe: Java and its Python workers, told by what only this home's have in common."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from evernear.errors import ServingError
from evernear.serving.configuration import temporary_directory
from evernear.serving.connection import read_state

DRAINED_S = 5.0  # for Java to end after the time that it may drain
KILL_TIMEOUT_S = 15.0


def is_java_of(home: Path, pid: int) -> bool:
    """Whether ``pid`` is this home's Java; a recycled process id is not."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and _is_of(process.cmdline(), home)
    except psutil.Error:
        return False


def processes(home: Path) -> list[psutil.Process]:
    """Java and the Python workers of the server in ``home``, those of a Java that died among them."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and _is_of(process.cmdline(), home):
                found.append(process)
    return found


def end_processes(home: Path) -> bool:
    """Let Java drain, then end by force what is left; whether there was anything to end.

    Workers end with their Java; those of a Java that died are found as well.

    Raises:
        ServingError: a process cannot be ended.
    """
    found = processes(home)
    state = read_state(home)
    if state is not None:
        java = [process for process in found if process.pid == state.pid]
        _signal(java, psutil.Process.terminate)
        psutil.wait_procs(java, timeout=state.drain_timeout_s + DRAINED_S)
    remaining = processes(home)
    _signal(remaining, psutil.Process.kill)
    psutil.wait_procs(remaining, timeout=KILL_TIMEOUT_S)
    if immortal := processes(home):
        raise ServingError(f"Processes {', '.join(str(p.pid) for p in immortal)} of TorchServe cannot be ended.")
    return bool(found)


def _is_of(command: list[str], home: Path) -> bool:
    temporary = temporary_directory(home)
    return any(word == f"-Djava.io.tmpdir={temporary}" or word.startswith(f"{temporary}/.ts.sock.") for word in command)


def _signal(found: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)
