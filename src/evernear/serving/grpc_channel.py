"""gRPC channels to a server whose pods, and therefore addresses, change."""

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
"""Maximum time of a connection attempt, and between two attempts.

gRPC's defaults are 20 s and two minutes.
"""
DEAD_CONNECTION_MS = 2000
"""Time without a TCP acknowledgment after which a connection counts as dead,
as after the loss of a node.
"""
KEEPALIVE_MS = 600_000
"""Interval of pings. Netty accepts pings only every five minutes.
This also enables `DEAD_CONNECTION_MS`.
"""
RETRY_TOKENS = 200
"""Number of retry tokens. A failed attempt takes a token,
and a successful attempt returns a token.

Below half of this number, calls are not retried.
"""


class Addresses:
    """The gRPC target of a host, which a thread resolves every second.

    gRPC resolves a name at most every 30 s, waits up to two minutes while a name has no
    address, and does not look for new pods while its connections last. A new channel
    uses the existing connection to an address, so a change of addresses costs little.
    If the name cannot be resolved, the last target stays.
    """

    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)
        self._closed = threading.Event()
        self.target = host_and_port(host, port)
        if not _is_address(host):
            threading.Thread(target=self._follow, name=f"addresses of {host}", daemon=True).start()

    def close(self) -> None:
        """Stop resolving the host."""
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError, UnicodeError):
                self.target = _resolve(*self._name)
            self._closed.wait(RESOLUTION_PERIOD_S)


def channel_options(authority: str, attempts: int) -> Sequence[tuple[str, Any]]:
    """Options of a channel to a target of `Addresses`.
    ``authority`` is the server's name in HTTP/2 and TLS.

    If the server does not respond, a call is attempted up to ``attempts`` times, until
    `RETRY_TOKENS` are spent. During an outage, calls therefore fail immediately. The
    call must be idempotent.
    """
    # Use all pods in turn. By default, gRPC stays with one pod.
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
    """Convert an address to IPv6, because a gRPC target has one address family.

    The kernel uses IPv4 for a mapped address.
    """
    return f"::ffff:{text}" if isinstance(ip_address(text), IPv4Address) else text


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
