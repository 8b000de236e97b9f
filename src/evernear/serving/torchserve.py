"""Lifecycle of a TorchServe server: start, readiness and stop.

All its files are in its home directory (``WORKDIR/torchserve``, mode 0700): configuration, keys,
logs and model store. Java is started directly, because the ``torchserve`` script supports only one
process per machine. Tested with TorchServe 0.12.0 on Java 25.
"""

import contextlib
import errno
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import NoReturn

import psutil

from evernear.common.disk import disk_errors, file_lock, make_private, remove_own, scratch, write_atomically
from evernear.common.progress import typed_arguments
from evernear.errors import IntegrityError, ServingError
from evernear.serving.configuration import (
    DRAIN_TIMEOUT_S,
    LOOPBACK,
    MAIN_CLASS,
    java_command,
    java_environment,
    require_java,
    temporary_directory,
    write_configuration,
)
from evernear.serving.endpoints import (
    KEY_FILE,
    OWNER_FILE,
    STATE_FILE,
    Endpoints,
    Management,
    ServerState,
    bind_error,
    home_of,
    read_state,
)
from evernear.settings import ServingSettings
from evernear.settings.serving import MODEL_NAME, STARTUP_TIMEOUT_S

POLL_S = 0.1
CONNECT_TIMEOUT_S = 1.0
LOCK_TIMEOUT_S = 300  # longer than a server or a release takes to start
JAVA_EXIT_TIMEOUT_S = 5.0  # after the drain
KILL_TIMEOUT_S = 15.0
FIRST_PORT = 1024
"""Lower ports need privileges."""


def start_server(settings: ServingSettings, home: Path, *, model_api: bool = True) -> Endpoints:
    """Start TorchServe in ``home`` unless it is already running, and wait for its management API.

    The server outlives this process and inherits no pipes from it.

    Raises:
        BusyError: a different process is starting or stopping it, and does not finish in time.
    """
    _make_home(home)
    requested = Endpoints.of(settings)
    with _locked(home):
        if is_running(home):
            return _require_same_endpoints(home, requested)
        _remove_leftovers(home)
        _require_free_ports(requested)
        command = java_command(settings, home, {})
        write_configuration(settings, home, model_api=model_api)
        pid = _spawn_detached(command, settings, home)
        ServerState(pid=pid, endpoints=requested).save(home / STATE_FILE)
        try:
            _await_management(home, pid, STARTUP_TIMEOUT_S)
        except BaseException:
            _end_processes(home)
            _remove_leftovers(home)
            raise
    return requested


def exec_torchserve(settings: ServingSettings, home: Path, frontend: Mapping[str, object], *, tokens: bool) -> NoReturn:
    """Replace this process with a TorchServe server, which loads all archives in its model store.
    It receives this process's signals and writes to its console."""
    _make_home(home)
    _require_free_ports(Endpoints.of(settings))
    _remove_leftovers(home)
    command = java_command(settings, home, frontend)
    write_configuration(settings, home, tokens=tokens, model_api=False)
    make_private(temporary_directory(home))
    os.umask(0o077)
    os.chdir(home)
    os.execve(command[0], command, java_environment(settings, home))  # noqa: S606 - arguments built here


def require_startable(settings: ServingSettings, home: Path) -> None:
    """Check that `start_server` can succeed, before hours of training: Java, the ports, and a disk
    with file locks and a directory for sockets."""
    requested = Endpoints.of(settings)
    _make_home(home)
    with _locked(home):
        if is_running(home):
            _require_same_endpoints(home, requested)
            return
        require_java()
        _require_free_ports(requested)
        with scratch(temporary_directory(home)):
            pass


def stop_server(home: Path) -> bool:
    """Stop the server in ``home`` and its workers, and return whether it was running.

    For up to `DRAIN_TIMEOUT_S`, it rejects new connections and finishes in-flight requests.

    Raises:
        BusyError: a different process is starting or stopping it, and does not finish in time.
    """
    if not home.is_dir():
        return False
    with _locked(home):
        was_running = _end_processes(home)
        _remove_leftovers(home)
    return was_running


def adopt(home: Path) -> None:
    """Bind the lifetime of the server in ``home``, started before or after, to this process. When
    it exits or is killed, the server drains and exits."""
    _make_home(home)
    write_atomically(home / OWNER_FILE, str(os.getpid()))


def is_running(home: Path) -> bool:
    """Whether the Java process that was last started in ``home`` is still running."""
    state = read_state(home)
    return state is not None and _is_java_of(home, state.pid)


def await_ready(settings: ServingSettings, home: Path, version: str) -> None:
    """Wait until all workers of ``version`` are READY. ``/ping`` is no check: it returns 200 even
    if no worker is running or one crashes repeatedly.

    Raises:
        ServerUnreachableError: the server died.
    """
    management = Management(home)
    deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if management.describe(MODEL_NAME, version).ready_workers >= settings.workers:
            return
        time.sleep(POLL_S)
    raise ServingError(f"Release {version} is not ready after {STARTUP_TIMEOUT_S} s; see {home}/logs/model.log.")


def is_ready(home: Path, model: str) -> bool:
    """Whether the server accepts connections and its default version has a READY worker. It is not
    ready while it drains, or while its workers are loading or crashing."""
    state = read_state(home)
    if state is None:
        return False
    try:
        ready = Management(home).describe(model).ready_workers > 0
    except ServingError:
        return False
    return ready and _accepts_connections(state.endpoints)


def processes(home: Path) -> list[psutil.Process]:
    """The server's Java process and workers, including those that outlived it."""
    matching: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and _belongs_to(process.cmdline(), home):
                matching.append(process)
    return matching


def _accepts_connections(endpoints: Endpoints) -> bool:
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
    busy = f"Another process is starting or stopping the TorchServe in {home}; wait for it and try again."
    return file_lock(home / "server.lock", LOCK_TIMEOUT_S, lambda: busy)


def _require_same_endpoints(home: Path, requested: Endpoints) -> Endpoints:
    state = read_state(home)
    if state is None or state.endpoints != requested:
        current = state.endpoints.inference_url if state else "other ports"
        raise ServingError(
            f"TorchServe already runs at {current}, not where the settings say; run `evernear stop` first."
        )
    return requested


def _require_free_ports(requested: Endpoints) -> None:
    ports = requested.model_dump(exclude={"host"})
    names = sorted(f"serving.{name}" for name, port in ports.items() if list(ports.values()).count(port) > 1)
    if names:
        raise ServingError(f"The ports of the server must differ from each other: {' and '.join(names)} do not.")
    _refuse(requested, _unbindable(requested, _bind), _user_of)


def _refuse(requested: Endpoints, taken: Mapping[str, int], user_of: Callable[[int], str]) -> None:
    if taken:
        users = ", ".join(f"port {port} by {user_of(port)}" for port in taken.values())
        words = ["evernear", *typed_arguments()]
        for name, port in free_ports(requested).items():
            words += ["--set", f"serving.{name}={port}"]
        raise ServingError(f"In use on {requested.host}: {users}. `{shlex.join(words)}` uses free ports.")


@contextlib.contextmanager
def reserved_ports(settings: ServingSettings, home: Path) -> Generator[None]:
    """Keep other runs away from the ports of the server that this run starts at its end. The sign
    is a UDP socket of the same number, which TorchServe does not use, and which closes with this
    process.

    Raises:
        ServingError: another run has reserved a port.
    """
    requested = Endpoints.of(settings)
    with contextlib.ExitStack() as stack:

        def hold(requested: Endpoints, name: str, port: int) -> None:
            stack.enter_context(_reservation(requested, name, port))

        if not is_running(home):
            taken = _unbindable(requested, hold)
            _refuse(requested, taken, lambda _: "another run, for its server")
        yield


def free_ports(requested: Endpoints) -> dict[str, int]:
    """The next free port for each one that another program uses, or that another run has
    reserved."""
    free: dict[str, int] = {}
    for name, taken in (_unbindable(requested, _bind) | _unbindable(requested, _reserve)).items():
        known = {*requested.model_dump(exclude={"host"}).values(), *free.values()}
        for port in (*range(taken + 1, 2**16), *range(FIRST_PORT, taken)):
            with contextlib.suppress(OSError):
                if port not in known:
                    _bind(requested, name, port)
                    _reserve(requested, name, port)
                    free[name] = port
                    break
    return free


def _unbindable(requested: Endpoints, bind: Callable[[Endpoints, str, int], None]) -> dict[str, int]:
    """The requested ports that are in use, by the name of the setting.

    Raises:
        ServingError: a port cannot be bound for another reason.
    """
    taken: dict[str, int] = {}
    for name, port in requested.model_dump(exclude={"host"}).items():
        try:
            bind(requested, name, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise bind_error(error, _host(requested, name), port, f"serving.{name}") from None
            taken[name] = port
    return taken


def _bind(requested: Endpoints, name: str, port: int) -> None:
    host = _host(requested, name)
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Java does the same: TIME_WAIT does not matter
        probe.bind((host, port))


def _reserve(requested: Endpoints, name: str, port: int) -> None:
    _reservation(requested, name, port).close()


def _reservation(requested: Endpoints, name: str, port: int) -> socket.socket:
    host = _host(requested, name)
    held = socket.socket(_family(host), socket.SOCK_DGRAM)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _host(requested: Endpoints, name: str) -> str:
    return LOOPBACK if "management" in name else requested.host


def _user_of(port: int) -> str:
    home = _home_of_server_on(port)
    if home is None:
        return "another program"
    stop = shlex.join(["evernear", "stop", "--workdir", str(home.parent)])
    return f"the server of {home.parent} (`{stop}` stops it)"


def _home_of_server_on(port: int) -> Path | None:
    """The home directory of the TorchServe server on ``port`` if this user may inspect it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ServingError, IntegrityError):
            if MAIN_CLASS in process.cmdline():
                home = Path(process.cwd())
                state = read_state(home) if home == home_of(home.parent) else None
                if state and state.pid == process.pid and port in state.endpoints.model_dump().values():
                    return home
    return None


def _spawn_detached(command: list[str], settings: ServingSettings, home: Path) -> int:
    make_private(temporary_directory(home))
    # The shell exits immediately, so Java has no parent that waits for it or terminates it.
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


def _await_management(home: Path, pid: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    management = Management(home)
    while time.monotonic() < deadline_s:
        if _has_ended(pid):
            raise _start_error(home)
        try:
            management.list_models()
        except ServingError:  # the server is not listening yet, or the key file is incomplete
            time.sleep(POLL_S)
        else:
            return
    raise ServingError(f"TorchServe does not answer after {timeout_s} s; see {home / 'logs'}.")


def _start_error(home: Path) -> ServingError:
    console = home / "logs" / "console.log"
    text = console.read_text(errors="replace") if console.exists() else ""
    if "Address already in use" in text:
        return ServingError(
            f"Another program took a port while TorchServe started (see {console}); run the command again."
        )
    lines = text.strip().splitlines()
    last_line = f" with {lines[-1].strip()!r}" if lines else ""
    return ServingError(f"TorchServe exited during startup{last_line}; see {console}.")


def _remove_leftovers(home: Path) -> None:
    """Remove the files that a stopped or crashed server left behind."""
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


def _has_ended(pid: int) -> bool:
    """Not by its command line, which is empty for a moment when Java replaces the shell."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_java_of(home: Path, pid: int) -> bool:
    """False for a different process with a reused process ID."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and _belongs_to(process.cmdline(), home)
    except psutil.Error:
        return False


def _end_processes(home: Path) -> bool:
    """Terminate Java, which drains first, and kill the remaining processes. False without any."""
    running = processes(home)
    state = read_state(home)
    if state is not None:
        java = [process for process in running if process.pid == state.pid]
        _signal(java, psutil.Process.terminate)
        psutil.wait_procs(java, timeout=DRAIN_TIMEOUT_S + JAVA_EXIT_TIMEOUT_S)
    remaining = processes(home)  # workers exit with their Java process, unless it died first
    _signal(remaining, psutil.Process.kill)
    psutil.wait_procs(remaining, timeout=KILL_TIMEOUT_S)
    if survivors := processes(home):
        raise ServingError(f"Processes {', '.join(str(p.pid) for p in survivors)} of TorchServe do not end.")
    return bool(running)


def _belongs_to(command: list[str], home: Path) -> bool:
    temporary = temporary_directory(home)
    return any(word == f"-Djava.io.tmpdir={temporary}" or word.startswith(f"{temporary}/.ts.sock.") for word in command)


def _signal(targets: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)
