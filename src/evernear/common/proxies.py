"""Find the proxies in the environment, so that an error can name them."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_of(url: str) -> str | None:
    """The proxy in ``HTTP(S)_PROXY`` for ``url``, or None if ``NO_PROXY`` excludes it."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def through_proxy(url: str) -> str:
    """For a message: " through the proxy HOST:PORT (HTTPS_PROXY)", or an empty string."""
    proxy = proxy_of(url)
    host = urlsplit(proxy).netloc.rpartition("@")[2] if proxy else ""
    return f" through the proxy {host} ({urlsplit(url).scheme.upper()}_PROXY)" if host else ""
