"""A loopback proxy that forwards requests to another server and injects faults into some of
them."""

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
    """A received request."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class FaultyProxy:
    """The proxy: received requests and pending faults."""

    upstream: str
    requests: list[Request] = field(default_factory=list[Request])
    ignored_headers: frozenset[str] = frozenset()
    refuses_early: bool = False
    """Like MinIO, reject a failed conditional PUT before reading its body, then reset the
    connection."""
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _faults: list[tuple[str, Fault]] = field(default_factory=list[tuple[str, Fault]])

    def inject(self, method: str, *faults: Fault) -> None:
        """Inject one fault into each of the next requests of ``method``."""
        self._faults += [(method, fault) for fault in faults]

    def forget(self) -> None:
        """Clear the faults and the recorded requests."""
        self._faults.clear()
        self.requests.clear()

    def fault(self, method: str) -> Fault:
        """Return the fault for a request of ``method``."""
        for index, (name, _) in enumerate(self._faults):
            if name == method:
                return self._faults.pop(index)[1]
        return forward

    def count(self, method: str) -> int:
        """Return the number of received requests of ``method``."""
        return sum(request.method == method for request in self.requests)


@contextmanager
def start_faulty_proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultyProxy]:
    """Start a reverse proxy, which also works as a forward proxy, for the server at
    ``upstream``."""
    faulty_proxy = FaultyProxy(upstream)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"faulty_proxy": faulty_proxy}))
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    faulty_proxy.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield faulty_proxy
    finally:
        faulty_proxy.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The concurrent requests of a probe arrive together.
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnects, which these tests provoke."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty_proxy: FaultyProxy
    body: bytes

    def _handle(self) -> None:
        path = self.path[self.path.index("/", len("http://")) :] if self.path.startswith("http://") else self.path
        self.path = path
        self.faulty_proxy.requests.append(Request(self.command, path, dict(self.headers)))
        fault = self.faulty_proxy.fault(self.command)
        if self.faulty_proxy.refuses_early and self.command == "PUT" and self._loses():
            fault = reject_early
        if fault is reset_upload:
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
        elif fault is not reject_early:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault(self)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _loses(self) -> bool:
        """Whether the condition of this PUT currently fails."""
        connection = http.client.HTTPConnection(urlsplit(self.faulty_proxy.upstream).netloc, timeout=30)
        try:
            with self.faulty_proxy.lock:
                connection.request("HEAD", self.path, headers={"Authorization": self.headers["Authorization"]})
                response = connection.getresponse()
        finally:
            connection.close()
        etag = response.headers.get("etag") if response.status == 200 else None
        expected = self.headers.get("If-Match")
        return etag != expected if expected else etag is not None and self.headers.get("If-None-Match") == "*"

    def forward(self) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the response of the upstream server."""
        headers = {name: value for name, value in self.headers.items() if name not in self.faulty_proxy.ignored_headers}
        connection = http.client.HTTPConnection(urlsplit(self.faulty_proxy.upstream).netloc, timeout=30)
        try:
            # One at a time, because moto's operations are not atomic.
            with self.faulty_proxy.lock:
                connection.request(self.command, self.path, self.body, headers)
                response = connection.getresponse()
                return response, response.read()
        finally:
            connection.close()

    def head(self, response: http.client.HTTPResponse, size_bytes: int) -> None:
        """Send status and headers."""
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", response.getheader("content-length") or "0")
        elif response.status != 204:
            self.send_header("Content-Length", str(size_bytes))
        self.end_headers()

    def disconnect(self, graceful: bool = False) -> None:
        """Close the connection with FIN or RST."""
        self.close_connection = True
        self.wfile.flush()
        if not graceful:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def forward(handler: _Handler) -> None:
    """Forward the request without a fault."""
    response, body = handler.forward()
    handler.head(response, len(body))
    if handler.command != "HEAD":
        handler.wfile.write(body)


def flip(handler: _Handler) -> None:
    """Flip one bit of the response."""
    response, body = handler.forward()
    handler.head(response, len(body))
    handler.wfile.write(bytes([body[0] ^ 1]) + body[1:])


def truncate(handler: _Handler) -> None:
    """Send half of the response and close the connection."""
    response, body = handler.forward()
    handler.head(response, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.disconnect(graceful=True)


def reset_download(handler: _Handler) -> None:
    """Send half of the response and reset the connection."""
    response, body = handler.forward()
    handler.head(response, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.disconnect()


def reset_upload(handler: _Handler) -> None:
    """Reset the connection after half of the body."""
    handler.disconnect()


def reject_early(handler: _Handler) -> None:
    """Send a 412 before reading the body, then reset the connection."""
    _answer(handler, 412, "application/xml", b"<Error><Code>PreconditionFailed</Code></Error>", {})
    handler.disconnect()


class DelayedRequest:
    """A request whose connection breaks, and which is executed just before the next request of its
    method."""

    def __init__(self) -> None:
        self._handler: _Handler | None = None

    def disconnect(self, handler: _Handler) -> None:
        """Fault of the first request."""
        self._handler = handler
        handler.disconnect()

    def execute(self, handler: _Handler) -> None:
        """Fault of the second request."""
        assert self._handler is not None
        self._handler.forward()
        forward(handler)


def lose_response(handler: _Handler) -> None:
    """Execute the request and drop the response."""
    handler.forward()
    handler.disconnect()


def hang(handler: _Handler) -> None:
    """Delay the response beyond the client's timeout."""
    handler.faulty_proxy.closing.wait(30)
    handler.disconnect()


def refuse(status: int, code: str, **headers: str) -> Fault:
    """Return an S3 error without contacting the upstream server."""

    def fault(handler: _Handler) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}, sorry</Message></Error>".encode()
        _answer(handler, status, "application/xml", body, headers)

    return fault


def page(status: int) -> Fault:
    """Return an HTML page, like an ingress or a captive portal."""
    return lambda handler: _answer(handler, status, "text/html", b"<html><h1>Bad gateway</h1></html>", {})


def _answer(handler: _Handler, status: int, kind: str, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response_only(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)
