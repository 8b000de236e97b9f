"""Paths, proxies and secrets in environment variables."""

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from evernear.common.disk import reread
from evernear.common.masking import mask, remember
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


def server_parts(url: str) -> SplitResult | None:
    """The parts of ``http://HOST:PORT/PATH``, or None if ``url`` has another form."""
    try:
        parts = urlsplit(url)
        is_valid = parts.port != 0  # reading the port checks it
    except ValueError:
        return None
    # `urlsplit` silently removes line breaks.
    is_printable = all(character.isprintable() and not character.isspace() for character in url)
    is_valid = is_valid and parts.scheme in ("http", "https") and bool(parts.hostname) and is_printable
    return parts if is_valid and not parts.query and not parts.fragment else None


def server_address(name: str, url: str) -> SplitResult:
    """The parts of ``url``, which ``name`` sets and which names only a server."""
    parts = server_parts(url)
    if parts is None or parts.path.strip("/") or parts.username is not None:
        raise SettingsError(f"{name}={mask(url)!r} is not of the form https://host:port.")
    return parts


def authorities(name: str, path: Path) -> Path:
    """``path``, which ``name`` sets, if it is a file with CA certificates in PEM format."""
    try:
        _load_authorities(path)
    except OSError as error:  # ssl.SSLError is an OSError
        raise SettingsError(f"{name}={path} cannot be used: {error.strerror or error}.") from None
    return path


@reread
def _load_authorities(path: Path) -> None:
    ssl.create_default_context(cafile=path)


def proxy_of(url: str) -> str | None:
    """The proxy in ``HTTP(S)_PROXY`` for ``url``, or None if ``NO_PROXY`` excludes it."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def proxy_options(proxy: str) -> dict[str, Any]:
    """The arguments of `urllib3.ProxyManager` for a proxy, whose login may be in its URL."""
    from urllib3 import make_headers

    parts = server_parts(proxy)
    if parts is None:
        raise SettingsError("HTTP_PROXY or HTTPS_PROXY is not of the form http://host:port.")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return {"proxy_url": proxy, "proxy_headers": make_headers(proxy_basic_auth=login) if login else None}


def through_proxy(url: str) -> str:
    """For a message: " through the proxy HOST:PORT (HTTPS_PROXY)", or an empty string."""
    proxy = proxy_of(url)
    host = urlsplit(proxy).netloc.rpartition("@")[2] if proxy else ""
    return f" through the proxy {host} ({urlsplit(url).scheme.upper()}_PROXY)" if host else ""


def usable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The secret in the variable ``name``, or an empty string. Raises `SettingsError` as
    `valid_secret`."""
    return valid_secret(name, environment.get(name, "").strip())


def secret(name: str) -> str:
    """The secret in the variable ``name``, else in the file that ``name_FILE`` names, or an empty
    string without both. Raises the errors of `usable` and `secret_file`."""
    file = os.environ.get(f"{name}_FILE", "")
    return usable(name) or (secret_file(f"{name}_FILE", Path(file)) if file else "")


def secret_file(name: str, path: Path) -> str:
    """The secret in the file ``path``, which ``name`` sets, for example of a mounted Secret.

    Raises:
        SettingsError: the file is empty or cannot be read, or as `valid_secret`.
    """
    if text := text_file(name, path):
        return valid_secret(f"{name}={path}", text)
    raise SettingsError(f"{name}={path} is empty.")


def text_file(name: str, path: Path) -> str:
    """The text in the file ``path``, which ``name`` sets, without spaces around it."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"{name}={path} cannot be read: {reason}.") from None


def valid_secret(named: str, value: str) -> str:
    """``value``, which is masked from now on. A character that is invalid in HTTP headers, such as
    a line break, is a `SettingsError`."""
    remember(value)
    if not all(" " <= character <= "~" for character in value):
        raise SettingsError(f"{named} contains a line break, or another character that is not ASCII; set it again.")
    return value
