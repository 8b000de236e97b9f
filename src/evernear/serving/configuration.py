"""TorchServe's configuration files, derived from the settings."""

import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from evernear.common.disk import write_atomically
from evernear.common.frozen import Frozen
from evernear.common.scratch import scratch_name
from evernear.serving.metrics import metrics_file
from evernear.settings import ServingSettings

LOOPBACK = "127.0.0.1"
GRPC_CONNECTION_AGE_MS = 60_000  # clients then reconnect, and so discover new servers
KEYS_EXPIRE_AFTER_MIN = 10 * 365 * 24 * 60  # instead of an hour, because new keys are created at each start
UNIX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less its terminating zero

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
    """Unpacked archives and the workers' sockets, whose paths must be short. Create it with
    `make_private`.

    The path does not depend on ``TMPDIR``, so every process derives the same one.
    """
    inside = home / "tmp"
    if len(os.fsencode(inside / ".ts.sock.99999")) <= UNIX_SOCKET_PATH_BYTES:
        return inside
    return Path("/tmp") / scratch_name(home)  # noqa: S108 - created by make_private


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
