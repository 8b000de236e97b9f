"""A server on loopback that passes requests on to another one, and does harm to some of them."""

import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Fault = Callable[["_Handler"], None]


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Front:
    """The server: what it was asked, and what harm it is to do."""

    upstream: str
    seen: list[Request] = field(default_factory=list[Request])
    ignored_headers: frozenset[str] = frozenset()
    refuses_early: bool = False
    """As MinIO: a conditional PUT that loses is answered before its body is read, and the connection is reset."""
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _faults: list[tuple[str, Fault]] = field(default_factory=list[tuple[str, Fault]])

    def harm(self, method: str, *faults: Fault) -> None:
        """Do the next requests of ``method`` this harm, one fault each."""
        self._faults += [(method, fault) for fault in faults]

    def forget(self) -> None:
        """No more harm, nothing seen."""
        self._faults.clear()
        self.seen.clear()

    def fault(self, method: str) -> Fault:
        """What to do with a request of ``method``."""
        for index, (name, _) in enumerate(self._faults):
            if name == method:
                return self._faults.pop(index)[1]
        return pass_on

    def count(self, method: str) -> int:
        """How many requests of ``method`` came."""
        return sum(request.method == method for request in self.seen)


@contextmanager
def front_of(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[Front]:
    """A front of the server at the URL ``upstream``; it is also a forward proxy to it."""
    front = Front(upstream)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"front": front}))
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    front.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield front
    finally:
        front.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The racers of a probe arrive at once.
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what is tested here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: Front
    body: bytes

    def _handle(self) -> None:
        path = self.path[self.path.index("/", len("http://")) :] if self.path.startswith("http://") else self.path
        self.path = path
        self.front.seen.append(Request(self.command, path, dict(self.headers)))
        fault = self.front.fault(self.command)
        if self.front.refuses_early and self.command == "PUT" and self._loses():
            fault = refuse_early
        if fault is reset_upload:
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
        elif fault is not refuse_early:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault(self)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _loses(self) -> bool:
        """Whether the condition of this PUT does not hold now."""
        connection = http.client.HTTPConnection(urlsplit(self.front.upstream).netloc, timeout=30)
        try:
            with self.front.lock:
                connection.request("HEAD", self.path, headers={"Authorization": self.headers["Authorization"]})
                answer = connection.getresponse()
        finally:
            connection.close()
        etag = answer.headers.get("etag") if answer.status == 200 else None
        wanted = self.headers.get("If-Match")
        return etag != wanted if wanted else etag is not None and self.headers.get("If-None-Match") == "*"

    def forward(self) -> tuple[http.client.HTTPResponse, bytes]:
        """The answer of the server behind."""
        headers = {name: value for name, value in self.headers.items() if name not in self.front.ignored_headers}
        connection = http.client.HTTPConnection(urlsplit(self.front.upstream).netloc, timeout=30)
        try:
            # One at a time: moto's own steps are no transactions.
            with self.front.lock:
                connection.request(self.command, self.path, self.body, headers)
                answer = connection.getresponse()
                return answer, answer.read()
        finally:
            connection.close()

    def head(self, answer: http.client.HTTPResponse, size_bytes: int) -> None:
        """Send status and headers."""
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", answer.getheader("content-length") or "0")
        elif answer.status != 204:
            self.send_header("Content-Length", str(size_bytes))
        self.end_headers()

    def hang_up(self, politely: bool = False) -> None:
        """Close the connection: with FIN, or with RST."""
        self.close_connection = True
        self.wfile.flush()
        if not politely:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def pass_on(handler: _Handler) -> None:
    """No harm."""
    answer, body = handler.forward()
    handler.head(answer, len(body))
    if handler.command != "HEAD":
        handler.wfile.write(body)


def flip(handler: _Handler) -> None:
    """One bit of the answer turns."""
    answer, body = handler.forward()
    handler.head(answer, len(body))
    handler.wfile.write(bytes([body[0] ^ 1]) + body[1:])


def flip_upload(handler: _Handler) -> None:
    """One bit of what is written turns."""
    handler.body = bytes([handler.body[0] ^ 1]) + handler.body[1:]
    pass_on(handler)


def truncate(handler: _Handler) -> None:
    """Half an answer, and the connection is closed."""
    answer, body = handler.forward()
    handler.head(answer, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.hang_up(politely=True)


def reset_download(handler: _Handler) -> None:
    """Half an answer, and the connection is reset."""
    answer, body = handler.forward()
    handler.head(answer, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.hang_up()


def reset_upload(handler: _Handler) -> None:
    """The connection is reset when half of the body has come."""
    handler.hang_up()


def refuse_early(handler: _Handler) -> None:
    """A condition that does not hold: 412 before the body is read, then the connection is reset."""
    _answer(handler, 412, "application/xml", b"<Error><Code>PreconditionFailed</Code></Error>", {})
    handler.hang_up()


class Postponed:
    """A request whose connection breaks, and which is carried out only before the next request of its method."""

    def __init__(self) -> None:
        self._handler: _Handler | None = None

    def hang_up(self, handler: _Handler) -> None:
        """The fault of the first request."""
        self._handler = handler
        handler.hang_up()

    def catch_up(self, handler: _Handler) -> None:
        """The fault of the second."""
        assert self._handler is not None
        self._handler.forward()
        pass_on(handler)


def lose_answer(handler: _Handler) -> None:
    """The request is carried out, the answer gets lost."""
    handler.forward()
    handler.hang_up()


def hang(handler: _Handler) -> None:
    """No answer, for longer than a client waits."""
    handler.front.closing.wait(30)
    handler.hang_up()


def refuse(status: int, code: str, **headers: str) -> Fault:
    """An S3 error without asking the server behind."""

    def fault(handler: _Handler) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}, sorry</Message></Error>".encode()
        _answer(handler, status, "application/xml", body, headers)

    return fault


def page(status: int) -> Fault:
    """A page as ingresses and captive portals give it."""
    return lambda handler: _answer(handler, status, "text/html", b"<html><h1>Bad gateway</h1></html>", {})


def empty_listing(handler: _Handler) -> None:
    """A listing that lags behind."""
    body = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
    _answer(handler, 200, "application/xml", body, {})


def _answer(handler: _Handler, status: int, kind: str, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response_only(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)
