"""The HTTP protocol of the servers, in front of an application that echoes."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from evernear.serving.http.protocol import MAX_PIPELINED, ON_DISCONNECT, LimitedHttpProtocol
from tests.prep_server import running
from tests.real.serving.raw import Raw, request

CHUNKED = b"Transfer-Encoding: chunked\r\n"
MUCH = b"x" * 1_000_000


class Echo:
    """Answers with the names of the headers and the size of the body; `/wait` answers when `gate`
    is set."""

    def __init__(self) -> None:
        self.calls = 0
        self.gone = threading.Event()
        self.waiting = threading.Event()
        self.gate = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.calls += 1
        scope[ON_DISCONNECT] = self.gone.set
        body, more = b"", True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            body += message.get("body", b"")
        if scope["path"] == "/wait":
            self.waiting.set()
            await asyncio.to_thread(self.gate.wait)
        names = sorted(name.decode() for name, _ in scope["headers"])
        answer = json.dumps({"headers": names, "size": len(body), "path": scope["path"]}).encode()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def app() -> Iterator[Echo]:
    app = Echo()
    yield app
    app.gate.set()


@pytest.fixture
def protocol_port(app: Echo) -> Iterator[int]:
    config = uvicorn.Config(app, http=LimitedHttpProtocol, loop="asyncio", ws="none", lifespan="off", log_config=None)
    with running(uvicorn.Server(config)) as port:
        yield port
        app.gate.set()


def status_of_rejection(port: int, data: bytes) -> int:
    """Send ``data``, and read the status of the last response before the connection is closed."""
    with Raw.to(port) as client:
        with suppress(ConnectionError):  # the server may close before it has read all
            client.send(data)
        received = b""
        with suppress(ConnectionError):
            while part := client.socket.recv(2**16):
                received += part
    return int(received.rpartition(b"HTTP/1.1 ")[2][:3])


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nX: " + MUCH,
        b"GET /" + MUCH,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200_000,
        request(b"POST /", CHUNKED) + b"5;" + MUCH,
        request(b"POST /", CHUNKED) + b"2\r\nab\r\n0\r\nX: " + MUCH,
        request(b"POST /", CHUNKED) + b"2\r\nab\r\n0\r\n" + b"X: y\r\n" * 200_000,
    ],
    ids=["header", "target", "headers", "extension of a chunk", "trailer", "trailers"],
)
def test_endless_text_without_a_body_is_rejected(protocol_port: int, data: bytes) -> None:
    assert status_of_rejection(protocol_port, data) == 400


def test_body_of_many_chunks_is_read(protocol_port: int) -> None:
    with Raw.to(protocol_port) as client:
        client.send(request(b"POST /", CHUNKED) + b"1;a=b\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert json.loads(client.answer().body)["size"] == 100_000


def test_fields_after_the_body_are_no_headers(protocol_port: int) -> None:
    with Raw.to(protocol_port) as client:
        client.send(request(b"POST /", CHUNKED) + b"2\r\nab\r\n0\r\nX-Late: 1\r\n\r\n" + request(b"GET /next"))
        assert json.loads(client.answer().body) == {"headers": ["host", "transfer-encoding"], "size": 2, "path": "/"}
        assert json.loads(client.answer().body)["path"] == "/next"


def test_pipelined_requests_are_answered_in_their_order(protocol_port: int) -> None:
    with Raw.to(protocol_port) as client:
        client.send(b"".join(request(b"POST /%d" % number, body=b"ab") for number in range(MAX_PIPELINED)))
        paths = [json.loads(client.answer().body)["path"] for _ in range(MAX_PIPELINED)]
    assert paths == [f"/{number}" for number in range(MAX_PIPELINED)]


def test_endless_pipelining_is_rejected(protocol_port: int, app: Echo) -> None:
    assert status_of_rejection(protocol_port, request(b"GET /wait") + request(b"GET /") * 1_000) == 400
    app.gate.set()
    assert app.calls <= 2


def test_application_learns_that_its_client_is_gone(protocol_port: int, app: Echo) -> None:
    with Raw.to(protocol_port) as client:
        client.send(request(b"GET /wait"))
        app.waiting.wait()
    assert app.gone.wait(60)


def test_application_learns_nothing_about_a_client_that_has_its_response(protocol_port: int, app: Echo) -> None:
    with Raw.to(protocol_port) as client:
        client.send(request(b"GET /", b"Connection: close\r\n"))
        assert len(client.all_answers()) == 1
    assert not app.gone.is_set()


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_request_for_an_upgrade_is_answered_with_its_body(protocol_port: int, upgrade: bytes) -> None:
    """As Java's HttpClient sends it."""
    headers = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEA\r\n" % upgrade
    with Raw.to(protocol_port) as client:
        for size in (3, 300_000):
            client.send(request(b"POST /path", headers, b"a" * size))
            answer = json.loads(client.answer().body)
            assert (answer["path"], answer["size"]) == ("/path", size)
        client.send(request(b"GET /next"))
        assert json.loads(client.answer().body)["path"] == "/next"


def test_pipelined_request_for_an_upgrade_is_rejected(protocol_port: int, app: Echo) -> None:
    upgrade = request(b"GET /", b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
    assert status_of_rejection(protocol_port, request(b"GET /wait") + upgrade) == 400


@pytest.mark.parametrize(
    "data",
    [
        request(b"POST /", CHUNKED + b"Content-Length: 3\r\n") + b"0\r\n\r\n",
        request(b"POST /", b"Content-Length: 3\r\nContent-Length: 4\r\n") + b"abcd",
        request(b"POST /", b"Content-Length: +3\r\n") + b"abc",
        request(b"POST /", b"Content-Length : 3\r\n") + b"abc",
        request(b"GET /", b"X: a\0b\r\n"),
        request(b"GET /\xff"),
        b"\x16\x03\x01 not HTTP\r\n\r\n",
    ],
    ids=["two lengths", "two values", "sign", "space", "NUL", "target", "TLS"],
)
def test_ambiguous_request_is_rejected(protocol_port: int, data: bytes) -> None:
    assert status_of_rejection(protocol_port, data) == 400


def test_half_closed_connection_ends(protocol_port: int) -> None:
    with socket.create_connection(("127.0.0.1", protocol_port), 30) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
