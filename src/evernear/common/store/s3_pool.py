"""HTTP connections to S3. Responses of other servers are rejected."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3

from evernear.common.environment import proxy_of
from evernear.errors import SettingsError, StoreError

CONNECT_TIMEOUT_S = 10.0
# Timeout between two packets, not for the whole transfer.
READ_TIMEOUT_S = 60.0
_OTHER_CONTENT = ("text/html", "application/xhtml", "application/json", "text/plain")
"""Content types that S3 returns only for objects, which also have an etag."""


def not_s3(endpoint: str, content: str) -> StoreError:
    """The error for a response that reports success but was not sent by S3."""
    return StoreError(
        f"{endpoint} does not behave like S3: it answers with {content}; check AWS_ENDPOINT_URL, which may name a "
        "console or a login page."
    )


class _OnlyS3:
    """Accepts no response of another server as an object, a listing or a successful write."""

    def urlopen(self, method: str, url: str, *args: Any, **kwargs: Any) -> urllib3.BaseHTTPResponse:
        response: urllib3.BaseHTTPResponse = super().urlopen(method, url, *args, **kwargs)  # pyright: ignore
        kind = response.headers.get("content-type", "").lower()
        if 200 <= response.status < 204 and kind.startswith(_OTHER_CONTENT) and "etag" not in response.headers:
            response.release_conn()
            content = "a web page" if "html" in kind else "content"
            server = urlsplit(url)
            raise not_s3(f"{server.scheme}://{server.netloc}", f"{content} of type {kind.partition(';')[0]}")
        return response


class _PoolManager(_OnlyS3, urllib3.PoolManager):
    pass


class _ProxyManager(_OnlyS3, urllib3.ProxyManager):
    pass


def pool(endpoint: str, certificates: Path, retries: urllib3.Retry) -> urllib3.PoolManager:
    proxy = proxy_of(endpoint)
    manager: Callable[..., urllib3.PoolManager] = _proxied(proxy) if proxy else _PoolManager
    return manager(
        maxsize=64,
        timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
        retries=retries,
        ca_certs=str(certificates),
    )


def _proxied(proxy: str) -> Callable[..., urllib3.PoolManager]:
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError("HTTP_PROXY or HTTPS_PROXY is not of the form http://host:port.")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    headers = urllib3.make_headers(proxy_basic_auth=login) if login else None
    return partial(_ProxyManager, proxy, proxy_headers=headers)
