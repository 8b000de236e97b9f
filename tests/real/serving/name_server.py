"""A DNS server on loopback whose answers change, as for a headless Service, and pods at addresses
of 127.0.0.0/8."""

import socket
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

TTL_S = 30
NXDOMAIN = 3


class NameServer:
    """Answers each query for an A record with ``addresses``; no addresses are NXDOMAIN.

    With ``caching``, an answer is repeated until its TTL ends, as by a caching server on a node.
    """

    def __init__(self, *, caching: bool = False) -> None:
        self.addresses: list[str] = []
        self.queries = 0
        self._caching = caching
        self._cached: tuple[float, list[str]] = (0.0, [])
        self._socket = socket.socket(type=socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    @contextmanager
    def running(self) -> Generator["NameServer"]:
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield self
        finally:
            with socket.socket(type=socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", ("127.0.0.1", self.port))
            thread.join()
            self._socket.close()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            if not query:
                return
            self.queries += 1
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", 12) + 5
        (kind,) = struct.unpack("!H", query[end - 4 : end - 2])
        current = self._current()
        addresses = current if kind == 1 else []
        head = query[:2] + struct.pack("!5H", 0x8180 | (0 if current else NXDOMAIN), 1, len(addresses), 0, 0)
        records = [
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, TTL_S, 4) + socket.inet_aton(address) for address in addresses
        ]
        return head + query[12:end] + b"".join(records)

    def _current(self) -> list[str]:
        if not self._caching:
            return self.addresses
        if time.monotonic() > self._cached[0]:
            self._cached = (time.monotonic() + TTL_S, self.addresses)
        return self._cached[1]


def lookup(port: int, host: str) -> list[str]:
    """The addresses of ``host`` by the name server on ``port``.

    Raises:
        socket.gaierror: the name does not exist.
    """
    name = b"".join(bytes([len(label)]) + label.encode() for label in host.split("."))
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.sendto(
            struct.pack("!6H", 1, 0x100, 1, 0, 0, 0) + name + b"\0" + struct.pack("!HH", 1, 1), ("127.0.0.1", port)
        )
        answer = client.recv(4096)
    flags, _, count = struct.unpack("!3H", answer[2:8])
    if flags & 15:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    records = answer[len(answer) - 16 * count :]
    return [socket.inet_ntoa(records[16 * index + 12 : 16 * index + 16]) for index in range(count)]


def use_name_server(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve names below ``.test`` by the name server on ``port``, in this process."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: object, service: object, *args: object, **options: object) -> object:
        name = host.decode() if isinstance(host, bytes) else host
        if not (isinstance(name, str) and name.endswith(".test")):
            return resolve(host, service, *args, **options)  # type: ignore[arg-type]
        return [
            found
            for address in lookup(port, name)
            for found in resolve(address, service, *args, **options)  # type: ignore[arg-type]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
