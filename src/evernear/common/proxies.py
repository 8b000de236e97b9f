"""The proxies of the environment, to name them where a request fails: otherwise only the server is named."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_of(url: str) -> str | None:
    """The URL of the proxy in ``HTTP(S)_PROXY`` for requests to ``url``; None without one, or as ``NO_PROXY`` says."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def through_proxy(url: str) -> str:
    """``through the proxy HOST:PORT (HTTPS_PROXY)`` for a message, after a space; empty without a proxy."""
    proxy = proxy_of(url)
    host = urlsplit(proxy).netloc.rpartition("@")[2] if proxy else ""
    return f" through the proxy {host} ({urlsplit(url).scheme.upper()}_PROXY)" if host else ""
