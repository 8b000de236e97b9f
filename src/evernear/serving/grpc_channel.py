"""gRPC channels to a server whose addresses change when its pods are replaced."""

import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, ip_address
from typing import Any

from evernear.serving.endpoints import host_and_port

RESOLUTION_PERIOD_S = 1.0
RECONNECT_BACKOFF_MS = 1000
"""Longest connection attempt and pause before the next. gRPC's defaults: 20 s and two minutes."""
DEAD_CONNECTION_MS = 2000
"""Time without a TCP acknowledgment after which a connection counts as dead."""
KEEPALIVE_MS = 600_000
"""Also enables `DEAD_CONNECTION_MS`. Netty accepts at most one ping every five minutes."""
RETRY_TOKENS = 200
"""A failed attempt removes a token, and a successful one adds a token. While at most half remain,
calls are not retried."""


class Addresses:
    """The gRPC target for a host name, which a thread resolves every second.

    gRPC itself resolves a name at most every 30 s, and waits up to two minutes if it has no
    address. As long as its connections are alive, it does not look for new pods. A new channel
    reuses existing connections, so an address change is cheap. If the name cannot be resolved, the
    previous target remains in use.
    """

    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)
        self._closed = threading.Event()
        self.target = host_and_port(host, port)
        if not _is_address(host):
            threading.Thread(target=self._follow, name=f"addresses of {host}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError, UnicodeError):
                self.target = _resolve(*self._name)
            self._closed.wait(RESOLUTION_PERIOD_S)


def channel_options(authority: str, attempts: int) -> Sequence[tuple[str, Any]]:
    """Options for a channel to `Addresses`. ``authority`` is the server name for HTTP/2 and TLS.

    If the server is unavailable, a call, which must be idempotent, is attempted up to ``attempts``
    times while enough `RETRY_TOKENS` remain. In a long outage, calls fail without retries.
    """
    # Use all pods in turn. By default, gRPC sends all calls to one.
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if attempts > 1:
        policy = {
            "maxAttempts": attempts,
            "initialBackoff": "0.1s",
            "maxBackoff": "1s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        config["methodConfig"] = [{"name": [{}], "retryPolicy": policy}]
        config["retryThrottling"] = {"maxTokens": RETRY_TOKENS, "tokenRatio": 1}
    return [
        ("grpc.default_authority", authority),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", DEAD_CONNECTION_MS),
        ("grpc.service_config", json.dumps(config)),
    ]


def _resolve(host: str, port: int) -> str:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    if all(isinstance(ip_address(address), IPv4Address) for address in addresses):
        return "ipv4:" + ",".join(f"{address}:{port}" for address in addresses)
    return "ipv6:" + ",".join(f"[{_as_ipv6(address)}]:{port}" for address in addresses)


def _as_ipv6(text: str) -> str:
    """A gRPC target needs addresses of one family. For an IPv4-mapped one, the kernel uses IPv4."""
    return f"::ffff:{text}" if isinstance(ip_address(text), IPv4Address) else text


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
