"""Find the proxies in the environment, so that an error message can name both the proxy and the
server."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_of(url: str) -> str | None:
    """The URL of the proxy in ``HTTP(S)_PROXY`` for requests to ``url``.

    Returns None if no proxy is set, or if ``NO_PROXY`` excludes ``url``.
    """
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def through_proxy(url: str) -> str:
    """The text ``through the proxy HOST:PORT (HTTPS_PROXY)`` with a leading space, for a message.
    Empty without a proxy."""
    proxy = proxy_of(url)
    host = urlsplit(proxy).netloc.rpartition("@")[2] if proxy else ""
    return f" through the proxy {host} ({urlsplit(url).scheme.upper()}_PROXY)" if host else ""
