"""HTTP as bytes on a socket, for requests that no client library sends."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from evernear.serving.endpoints import read_key
from tests.served import Served

TIMEOUT_S = 30


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def sentence(self) -> str:
        return json.loads(self.body)["message"]


@dataclass
class Raw:
    """One connection."""

    socket: socket.socket
    _received: bytes = field(default=b"", repr=False)

    @classmethod
    @contextmanager
    def to(cls, port: int) -> Iterator[Self]:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            yield cls(connection)

    def send(self, data: bytes) -> Self:
        self.socket.sendall(data)
        return self

    def end(self) -> Self:
        """Close our side, as ``nc -N`` does after its input."""
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def answer(self, *, head: bool = False) -> Answer:
        """Read the next response, without a body if it answers HEAD."""
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        body = b"" if head else self._take(int(headers.get("content-length", 0)))
        return Answer(int(lines[0].split()[1]), headers, body)

    def all_answers(self) -> list[Answer]:
        """Read responses until the server closes the connection; a reset is an error."""
        answers: list[Answer] = []
        while self._received or self._more():
            answers.append(self.answer())
        return answers

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._received:
            assert self._more(), f"the connection closed after {self._received!r}"
        head, _, self._received = self._received.partition(mark)
        return head

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            assert self._more(), f"the connection closed within a body, after {self._received!r}"
        data, self._received = self._received[:size], self._received[size:]
        return data

    def _more(self) -> bool:
        data = self.socket.recv(65536)
        self._received += data
        return bool(data)


def bearer(served: Served, api: str = "inference") -> bytes:
    """The header for ``api``."""
    return b"Authorization: Bearer %s\r\n" % read_key(served.home, api).encode()


def request(line: bytes, headers: bytes = b"", body: bytes | None = None) -> bytes:
    """Format a request; ``line`` is method and target, optionally with a version other than 1.1."""
    if line.count(b" ") < 2:
        line += b" HTTP/1.1"
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return b"%s\r\nHost: test\r\n%s%s\r\n%s" % (line, headers, length, body or b"")
