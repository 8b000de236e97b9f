"""Paths, proxies and secrets in environment variables."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from evernear.errors import SettingsError

_PATHS = re.compile(
    r"\w+_(FILE|PATH|DIR|HOME|BUNDLE)"
    r"|HF_HUB_CACHE|HUGGINGFACE_HUB_CACHE|TRANSFORMERS_CACHE|NETRC|MPLCONFIGDIR|TMPDIR"
    r"|GOOGLE_APPLICATION_CREDENTIALS|OTEL_EXPORTER_OTLP_\w*(CERTIFICATE|CLIENT_KEY)"
)
"""Variables that contain a path and are read by evernear or its libraries."""
_LISTS = frozenset({"KUBECONFIG", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_DIR"})
"""Variables that contain several paths."""
_ADDRESSES = frozenset({"MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "EVERNEAR_MILVUS_URI"})
"""Variables that contain a server URL or a path."""
_NO_PATHS = frozenset({"databricks", "databricks-uc", "uc"})
"""MLflow addresses without a colon."""
_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)([^/:?].*)")
"""``sqlite:///mlflow.db``. After a fourth slash, the path is absolute. ``:memory:`` is no path."""
_FILE = re.compile(r"(file:)([^/].*)")
"""``file:./mlruns``"""


def with_absolute_locations(environment: Mapping[str, str], directory: Path | None = None) -> dict[str, str]:
    """Resolve relative paths against ``directory`` or the current one, because steps and TorchServe
    run elsewhere. Server URLs do not change, nor do paths in a home directory (``~/...``), which
    libraries expand."""
    base = directory or Path.cwd()
    return {name: _absolute(name, value, base) for name, value in environment.items()}


def _absolute(name: str, value: str, base: Path) -> str:
    if name in _LISTS:
        return os.pathsep.join(_absolute_path(part, base) for part in value.split(os.pathsep))
    if name in _ADDRESSES:
        if sqlite := _SQLITE.fullmatch(value):
            return f"{sqlite[1]}{base / sqlite[2]}"
        if file := _FILE.fullmatch(value):
            return f"{file[1]}{Path(quote(str(base))) / file[2]}"
        return value if ":" in value or value in _NO_PATHS else _absolute_path(value, base)
    return _absolute_path(value, base) if _PATHS.fullmatch(name) and "://" not in value else value


def _absolute_path(path: str, base: Path) -> str:
    return path if not path or path.startswith("~") else str(base / path)


def proxy_of(url: str) -> str | None:
    """The proxy in ``HTTP(S)_PROXY`` for ``url``, or None if ``NO_PROXY`` excludes it."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def proxy_options(proxy: str) -> dict[str, Any]:
    """The arguments of `urllib3.ProxyManager` for a proxy, whose login may be in its URL."""
    from urllib3 import make_headers

    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError("HTTP_PROXY or HTTPS_PROXY is not of the form http://host:port.")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return {"proxy_url": proxy, "proxy_headers": make_headers(proxy_basic_auth=login) if login else None}


def through_proxy(url: str) -> str:
    """For a message: " through the proxy HOST:PORT (HTTPS_PROXY)", or an empty string."""
    proxy = proxy_of(url)
    host = urlsplit(proxy).netloc.rpartition("@")[2] if proxy else ""
    return f" through the proxy {host} ({urlsplit(url).scheme.upper()}_PROXY)" if host else ""


def usable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The secret in the variable ``name``, or an empty string. A character that is invalid in HTTP
    headers, such as a line break, is a `SettingsError`."""
    value = environment.get(name, "").strip()
    if not all(" " <= character <= "~" for character in value):
        raise SettingsError(f"{name} contains a line break, or another character that is not ASCII; set it again.")
    return value
