"""The life of one TorchServe: its start, readiness and end.

Everything of a server lies in one directory, its home (``WORKDIR/torchserve``, mode 0700): the generated
configuration, the keys, the logs and the model store. Java is started directly, as the ``torchserve`` script
keeps one process id per machine. Verified against TorchServe 0.12.0 on Java 17 and 25.
"""

import contextlib
import errno
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from evernear.disk import disk_errors, write_atomically
from evernear.errors import PortInUseError, ServingError
from evernear.scratch import make_private, remove_own
from evernear.serving.configuration import LOOPBACK, model_store, temporary_directory, write_configuration
from evernear.serving.connection import KEY_FILE, OWNER_FILE, STATE_FILE, Endpoints, ServerState, read_state
from evernear.serving.java import find_java, java_command, java_environment
from evernear.serving.lock import exclusively
from evernear.serving.management import Management
from evernear.serving.processes import end_processes, is_java_of, processes
from evernear.settings import ServingSettings

__all__ = [
    "adopt",
    "await_ready",
    "become",
    "find_java",
    "is_ready",
    "is_running",
    "model_store",
    "processes",
    "require_startable",
    "start",
    "stop",
]

POLL_S = 0.1
CONNECT_TIMEOUT_S = 1.0


def start(settings: ServingSettings, home: Path) -> Endpoints:
    """Start TorchServe in ``home`` unless it runs already, and wait until its management API answers.

    The server outlives this process and holds none of its pipes.

    Raises:
        PortInUseError: a port is in use by another program.
        ServingError: Java or TorchServe is not installed, the server runs with other ports, or it does not
            come up within ``settings.startup_timeout_s``.
        StoreError: ``home``, or the server's directory in /tmp, cannot be made.
        BusyError: another process starts or stops this server and does not end.
    """
    _make_home(home)
    wanted = Endpoints.of(settings)
    with _locked(home):
        if is_running(home):
            return _running_endpoints(home, wanted)
        _clear_remains(home)
        _require_free_ports(wanted)
        command = java_command(settings, home, {})
        write_configuration(settings, home)
        pid = _spawn_detached(command, settings, home)
        state = ServerState(pid=pid, endpoints=wanted, drain_timeout_s=settings.drain_timeout_s)
        write_atomically(home / STATE_FILE, state.model_dump_json())
        try:
            _await_answer(home, pid, settings.startup_timeout_s)
        except BaseException:
            end_processes(home)
            _clear_remains(home)
            raise
    return wanted


def become(settings: ServingSettings, home: Path, frontend: Mapping[str, object], *, tokens: bool) -> NoReturn:
    """Replace this process by the TorchServe of ``home``: signals reach it, and its console is this one's.

    It loads what lies in its model store. ``frontend`` is what `java_command` is told, ``tokens`` is as for
    `write_configuration`.

    Raises:
        PortInUseError: a port is in use by another program.
        ServingError: Java or TorchServe is not installed.
        StoreError: ``home``, or the server's directory in /tmp, cannot be made.
    """
    _make_home(home)
    _require_free_ports(Endpoints.of(settings))
    _clear_remains(home)
    command = java_command(settings, home, frontend)
    write_configuration(settings, home, tokens=tokens)
    make_private(temporary_directory(home))
    os.umask(0o077)
    os.chdir(home)
    os.execve(command[0], command, java_environment(settings, home))  # noqa: S606 - a list of our own words


def require_startable(settings: ServingSettings, home: Path) -> None:
    """Refuse early what `start` would refuse: hours of training should not end at a port that is taken.

    Raises:
        PortInUseError, ServingError: as `start`.
    """
    wanted = Endpoints.of(settings)
    if is_running(home):
        _running_endpoints(home, wanted)
        return
    find_java()
    _require_free_ports(wanted)


def stop(home: Path) -> bool:
    """End the server of ``home`` with all its workers; whether there was one to end.

    It drains: new connections are refused, requests that came in are answered, for at most the
    ``drain_timeout_s`` it was started with.

    Raises:
        ServingError: a process of it cannot be ended.
        BusyError: another process starts or stops this server and does not end.
    """
    if not home.is_dir():
        return False
    with _locked(home):
        found = end_processes(home)
        _clear_remains(home)
    return found


def adopt(home: Path) -> None:
    """Bind the life of the server in ``home`` to this process, before or after its start.

    When this process ends, even by SIGKILL, the server drains and ends as well.

    Raises:
        StoreError: ``home`` cannot be written.
    """
    _make_home(home)
    write_atomically(home / OWNER_FILE, str(os.getpid()))


def is_running(home: Path) -> bool:
    """Whether the Java process that was last started in ``home`` is alive."""
    state = read_state(home)
    return state is not None and is_java_of(home, state.pid)


def await_ready(settings: ServingSettings, home: Path, version: str) -> None:
    """Wait until ``version`` of the model has all its workers READY.

    ``/ping`` is no measure: it answers 200 without any worker and while one crashes in a loop.

    Raises:
        ServingError: they are not within ``settings.startup_timeout_s``.
        ServerUnreachableError: the server died.
    """
    management = Management(home)
    deadline_s = time.monotonic() + settings.startup_timeout_s
    while time.monotonic() < deadline_s:
        if management.describe(settings.model_name, version).ready_workers >= settings.workers:
            return
        time.sleep(POLL_S)
    raise ServingError(
        f"Release {version} is not ready after {settings.startup_timeout_s} s; see {home}/logs/model.log."
    )


def is_ready(home: Path, model: str) -> bool:
    """Whether the server in ``home`` would answer: it takes connections, and the default version has a READY worker.

    A server that drains is not ready, nor is one whose workers load or crash.
    """
    state = read_state(home)
    if state is None:
        return False
    try:
        ready = Management(home).describe(model).ready_workers > 0
    except ServingError:
        return False
    return ready and _takes_connections(state.endpoints)


def _takes_connections(endpoints: Endpoints) -> bool:
    try:
        socket.create_connection((endpoints.inference_host, endpoints.inference_port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _make_home(home: Path) -> None:
    with disk_errors(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
        for name in ("logs", "model-store"):
            (home / name).mkdir(exist_ok=True)


def _locked(home: Path) -> contextlib.AbstractContextManager[None]:
    busy = f"Another process starts or stops the TorchServe in {home}; wait for it and try again."
    return exclusively(home / "server.lock", busy)


def _running_endpoints(home: Path, wanted: Endpoints) -> Endpoints:
    state = read_state(home)
    if state is None or state.endpoints != wanted:
        now = state.endpoints.inference_url if state else "other ports"
        raise ServingError(f"TorchServe already runs at {now}, not where the settings say; run `evernear stop` first.")
    return wanted


def _require_free_ports(wanted: Endpoints) -> None:
    ports = wanted.model_dump(exclude={"host"})
    if len(set(ports.values())) < len(ports):
        raise ServingError(f"Each port of the server must be another one: {ports}; see --set serving.*_port.")
    for setting, port in ports.items():
        host = LOOPBACK if "management" in setting else wanted.host
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no owner
            try:
                probe.bind((host, port))
            except OSError as error:
                raise _bind_error(error, host, port, setting) from None


def _bind_error(error: OSError, host: str, port: int, setting: str) -> ServingError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"Port {port} on {host} is in use by another program; stop that, or choose a free port with "
            f"--set serving.{setting}=NUMBER."
        )
    return ServingError(f"serving.{setting}: {host}:{port} cannot be bound: {error.strerror}.")


def _spawn_detached(command: list[str], settings: ServingSettings, home: Path) -> int:
    make_private(temporary_directory(home))
    # The shell ends at once, so Java belongs to no process that could wait for it or take it along.
    script = 'umask 077; "$@" </dev/null >logs/console.log 2>&1 & echo $!'
    shell = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *command],
        cwd=home,
        env=java_environment(settings, home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
    )
    return int(shell.stdout)


def _await_answer(home: Path, pid: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    management = Management(home)
    while time.monotonic() < deadline_s:
        if not is_java_of(home, pid):
            raise _died(home)
        try:
            management.list_models()
        except ServingError:  # not listening yet, or the key file is half written
            time.sleep(POLL_S)
        else:
            return
    raise ServingError(f"TorchServe does not answer after {timeout_s} s; see {home / 'logs'}.")


def _died(home: Path) -> ServingError:
    console = home / "logs" / "console.log"
    text = console.read_text(errors="replace") if console.exists() else ""
    if "Address already in use" in text:
        return PortInUseError(
            f"A port was taken while TorchServe started ({console} tells which); run again, or choose others "
            "with --set serving.inference_port=NUMBER and its like."
        )
    lines = text.strip().splitlines()
    said = f", and its last words were {lines[-1].strip()!r}" if lines else ""
    return ServingError(f"TorchServe ended while it started{said}; see {console}.")


def _clear_remains(home: Path) -> None:
    """Remove what a server that is gone left behind, whether it was stopped or died."""
    for name in (STATE_FILE, KEY_FILE):
        (home / name).unlink(missing_ok=True)
    if _owner(home) != os.getpid():
        (home / OWNER_FILE).unlink(missing_ok=True)
    remove_own(temporary_directory(home))


def _owner(home: Path) -> int | None:
    try:
        return int((home / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return None
