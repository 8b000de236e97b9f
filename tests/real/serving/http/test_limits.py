"""Limits of heads and bodies: in front of an application that echoes, with the protocols of all
servers, and at the preprocessing server, the console and Slack's endpoint themselves."""

import asyncio
import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from slack_bolt import App
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from evernear.common.store import open_store
from evernear.console.server import create_server as create_console_server
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.http import limits, protocol
from evernear.serving.http.limits import DrainingServer, limited_server
from evernear.serving.http.prep import create_prep_server
from evernear.serving.http.protocol import H11WithHeadTimeout, LimitedHttpProtocol
from evernear.settings import Settings
from evernear.settings.triggers import ConsoleSettings
from evernear.triggers.slack.server import EVENTS_PATH
from evernear.triggers.slack.server import create_server as create_slack_server
from tests.consoles import TOKEN, console_client
from tests.prep_server import ReleaseStore, running
from tests.real.serving.raw import Raw, request
from tests.waiting import until

LIMIT_BYTES = 2**20
TOO_LARGE = f"The request is larger than the limit of {LIMIT_BYTES} bytes."
Serve = Callable[..., AbstractContextManager[int]]


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """`/wait` answers when it is set."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture(params=[H11WithHeadTimeout, LimitedHttpProtocol])
def serve(request: pytest.FixtureRequest, go_on: threading.Event) -> Serve:
    """Runs a server with limits and yields its port."""

    async def echo(request: Request) -> Response:
        size_bytes = len(await request.body())
        if request.url.path == "/wait":
            await asyncio.to_thread(go_on.wait)
        return JSONResponse(size_bytes)

    def serve(**limits: Any) -> AbstractContextManager[int]:
        app = Starlette(routes=[Route(path, echo, methods=["GET", "POST"]) for path in ("/", "/wait")])
        defaults = {"max_size_bytes": LIMIT_BYTES, "upload_timeout_s": 30, "shutdown_timeout_s": 30}
        server = limited_server(app, **(defaults | limits))
        server.config.http = request.param
        return running(server)

    return serve


@pytest.fixture
def echo_port(serve: Serve) -> Iterator[int]:
    with serve() as port:
        yield port


def post(port: int, *bodies: bytes) -> tuple[int, str]:
    """Status and text of the response to a client that sends its whole body before it reads.
    Several ``bodies`` are chunks, whose total size is not declared."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", "/", iter(bodies) if len(bodies) > 1 else bodies[0])
        response = connection.getresponse()
        return response.status, response.read().decode()


def head(size_bytes: int, fields: bytes = b"") -> bytes:
    return request(b"POST /", b"Content-Length: %d\r\n%s" % (size_bytes, fields))


@pytest.mark.parametrize("chunks", [1, 16])
def test_client_that_sends_all_of_a_large_body_gets_413(echo_port: int, chunks: int) -> None:
    assert post(echo_port, *[bytes(LIMIT_BYTES // chunks)] * chunks) == (200, str(LIMIT_BYTES))
    for _ in range(4):
        assert post(echo_port, *[bytes(8 * LIMIT_BYTES // chunks)] * chunks) == (413, TOO_LARGE)


@pytest.mark.parametrize("fields", [b"", b"Expect: 100-continue\r\n"])
def test_client_that_declares_a_large_body_is_not_asked_for_it(echo_port: int, fields: bytes) -> None:
    with Raw.to(echo_port) as client:
        answer = client.send(head(LIMIT_BYTES + 1, fields)).answer()
        assert (answer.status, answer.body.decode()) == (413, TOO_LARGE)


def test_endless_body_is_discarded_up_to_a_limit(echo_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_DISCARDED_BYTES", LIMIT_BYTES)
    with Raw.to(echo_port) as endless:

        def send_much() -> None:
            for _ in range(1024):
                endless.send(bytes(2**20))

        endless.send(head(2**40))
        with pytest.raises(ConnectionError):
            send_much()


def test_slow_body_gets_408(serve: Serve) -> None:
    with serve(upload_timeout_s=1) as port, Raw.to(port) as slow:
        answer = slow.send(head(1_000) + b"abc").answer()
        assert (answer.status, answer.body) == (408, b"The request's body did not arrive within 1 s.")
        assert post(port, b"abc") == (200, "3")


def test_body_that_stalls_after_the_rejection_is_abandoned(serve: Serve) -> None:
    with serve(upload_timeout_s=1) as port, Raw.to(port) as stalled:
        assert [answer.status for answer in stalled.send(head(2**30) + b"abc").all_answers()] == [413]


def test_total_size_of_bodies_in_flight_is_limited(serve: Serve, go_on: threading.Event) -> None:
    with serve(max_total_size_bytes=100_000) as port, Raw.to(port) as first, Raw.to(port) as second:
        first.send(head(60_000) + bytes(59_999))
        while True:  # until the server has read the first body
            answer = second.send(request(b"POST /", body=bytes(60_000))).answer()
            if answer.status == 503:
                break
        assert answer.body == b"The server is busy with other requests; try again in a second."
        assert answer.headers["retry-after"] == "1"
        assert post(port, bytes(30_000))[0] == 200, "a small body still fits"
        assert first.send(b"a").answer().status == 200
        assert post(port, bytes(60_000))[0] == 200, "the memory of the first body is free again"


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost:"])
def test_connection_without_a_head_is_closed(
    serve: Serve, earlier: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.5)
    with serve(timeout_keep_alive=60 if sent else 1) as port, Raw.to(port) as client:
        for _ in range(earlier):
            assert client.send(request(b"GET /")).answer().status == 200
        assert client.send(sent).all_answers() == []


def test_slow_response_outlives_the_head_timeout(
    echo_port: int, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.5)
    with Raw.to(echo_port) as client, Raw.to(echo_port) as silent:
        client.send(request(b"GET /wait"))
        assert silent.socket.recv(1) == b"", "the head timeout has expired"
        go_on.set()
        assert client.answer().status == 200


def test_endless_head_is_rejected(echo_port: int) -> None:
    with Raw.to(echo_port) as endless, suppress(ConnectionError):  # the server may close before it has read all
        assert endless.send(b"GET / HTTP/1.1\r\nX: " + b"x" * 1_000_000).answer().status == 400


@pytest.fixture(params=["prep", "console", "slack"])
def public_server(
    request: pytest.FixtureRequest, parts: ReleaseParts, tmp_path: Path
) -> tuple[uvicorn.Server, str, dict[str, str]]:
    """A server, and path and headers of a request with a body."""
    match request.param:
        case "prep":
            store = ReleaseStore(tmp_path, parts.manifest)
            store.release(1, champion=True)
            return create_prep_server(store.settings(1)), "/predict", {}
        case "console":
            client = console_client(Settings(), open_store(tmp_path.as_uri()), Any)  # pyright: ignore[reportArgumentType]
            client.get(f"/?token={TOKEN}", follow_redirects=False)
            cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
            headers = {"Cookie": cookies, "X-Evernear-CSRF": client.cookies["evernear-csrf"]}
            assert isinstance(client.app, Starlette)
            return create_console_server(client.app, ConsoleSettings()), "/try", headers
        case _:
            app = App(token="xoxb-1", signing_secret="0", token_verification_enabled=False)
            return create_slack_server(app, "0"), EVENTS_PATH, {}


def test_each_server_limits_heads_and_bodies(
    public_server: tuple[uvicorn.Server, str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.5)
    limited, path, headers = public_server
    with running(limited) as port:
        with Raw.to(port) as silent:
            assert silent.send(b"GET / HTTP/1.1\r\n").all_answers() == []
        too_large = bytes(64 * 2**20 + 1)
        answer = httpx.post(f"http://127.0.0.1:{port}{path}", content=too_large, headers=headers, timeout=30)
    assert answer.status_code == 413
    assert "The request is larger than the limit of " in answer.text


def test_client_is_asked_to_leave_its_connection_before_the_server_stops(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrainingServer, "drain_s", 30.0)
    servers: list[DrainingServer] = []

    class Draining(DrainingServer):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    with (
        serve(server=Draining) as port,
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection,
    ):
        assert not ask_again(connection).will_close
        (server,) = servers
        server.should_exit = True
        until(lambda: (b"connection", b"close") in server.server_state.default_headers)
        assert ask_again(connection).will_close


def ask_again(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    connection.request("POST", "/", b"1234")
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"4")
    return response
