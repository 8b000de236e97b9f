"""Limits on clients of the preprocessing server, and their isolation from other clients."""

import base64
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Self

import httpx
import pytest

from evernear.data.encoded_image import EncodedImage
from evernear.release.archive_reader import ReleaseParts
from evernear.release.manifest import ReleaseManifest
from evernear.serving import http_limits
from evernear.serving.decoding import MAX_WAITING_LARGE, SMALL_PIXELS
from evernear.serving.prep import app, service
from evernear.serving.prep.service import prepare
from tests import hostile
from tests.prep_server import ReleaseStore, prep_client
from tests.serving.fake_servers import ANSWER, grpc_server


@pytest.fixture
def stored_releases(parts: ReleaseParts, tmp_path: Path) -> ReleaseStore:
    return ReleaseStore(tmp_path / "store", parts.manifest)


@pytest.fixture
def port(stored_releases: ReleaseStore) -> Iterator[int]:
    version = stored_releases.release(1, champion=True)
    with grpc_server(lambda *_: json.dumps(ANSWER | {"version": version}).encode()) as port:
        yield port


@pytest.fixture
def prep(stored_releases: ReleaseStore, port: int) -> Iterator[httpx.Client]:
    with prep_client(stored_releases.settings(port)) as client:
        yield client


def encoded(image: bytes) -> dict[str, str]:
    return {"data": base64.b64encode(image).decode()}


SMALL = encoded(hostile.png(28, 28))
LARGE = encoded(hostile.png(1001, 1000, 1))


def refusal(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == status
    assert answer.json()["message"].endswith(".")
    return answer.json()["message"]


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_decompression_bomb_is_rejected_with_a_message(prep: httpx.Client, name: str) -> None:
    bomb = hostile.REFUSED[name]
    assert bomb.sentence in refusal(prep.post("/predict", json=encoded(bomb.make())), 400)


class Gate:
    """Blocks the decoding of large images until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Semaphore(0)

    def prepare(self, file: EncodedImage, manifest: ReleaseManifest) -> bytes:
        if file.pixels > SMALL_PIXELS:
            self.reached.release()
            self.opened.wait()
        return prepare(file, manifest)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(service, "prepare", gate.prepare)
    yield gate
    gate.opened.set()


def test_small_images_do_not_wait_for_large_ones(prep: httpx.Client, gate: Gate) -> None:
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(prep.post, "/predict", json=LARGE) for _ in range(4)]
        gate.reached.acquire()
        for _ in range(20):
            assert prep.post("/predict", json=SMALL).status_code == 200
        assert not any(answer.done() for answer in large)
        gate.opened.set()
        assert {answer.result().status_code for answer in large} == {200}


def test_excess_large_images_are_rejected_immediately(
    stored_releases: ReleaseStore, port: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LARGE_DECODES", 2)
    capacity = 2 + MAX_WAITING_LARGE
    with prep_client(stored_releases.settings(port)) as prep, ThreadPoolExecutor(capacity) as pool:
        waiting: list[Future[httpx.Response]] = []
        for _ in range(capacity):
            waiting.append(pool.submit(prep.post, "/predict", json=LARGE))
        gate.reached.acquire()
        gate.reached.acquire()
        answer = until(lambda: prep.post("/predict", json=LARGE, timeout=1), 503, waiting)
        assert "Too many large images" in refusal(answer, 503)
        assert answer.headers["retry-after"] == "1"
        assert prep.post("/predict", json=SMALL).status_code == 200
        gate.opened.set()
        statuses = [future.result().status_code for future in waiting]
        assert prep.post("/predict", json=LARGE).status_code == 200
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 2 + MAX_WAITING_LARGE - 1


def until(ask: Callable[[], httpx.Response], status: int, waiting: list[Future[httpx.Response]]) -> httpx.Response:
    """Repeat until the response has ``status``: earlier requests may still be in flight."""
    while True:
        try:
            answer = ask()
        except httpx.ReadTimeout:  # this request occupied one of the slots itself
            continue
        if answer.status_code == status:
            return answer
        assert not all(future.done() for future in waiting)


def test_waiting_too_long_for_decoding_times_out(
    stored_releases: ReleaseStore, port: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "TIMEOUT_S", 2)
    with prep_client(stored_releases.settings(port)) as prep:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: prep.post("/predict", json=LARGE), range(2)))
        assert [refusal(answer, 504) == "No prediction within 2 s." for answer in answers] == [True, True]
        assert prep.post("/predict", json=SMALL).status_code == 200
        gate.opened.set()
    # The decode in progress finished; the waiting one never started.
    assert gate.reached.acquire(blocking=False)
    assert not gate.reached.acquire(blocking=False)


def test_pixel_limits_of_server_and_release_both_apply(stored_releases: ReleaseStore, port: int) -> None:
    settings = stored_releases.settings(port)
    few = settings.model_copy(update={"serving": settings.serving.model_copy(update={"max_pixels": 1_000})})
    with prep_client(few) as prep:
        assert "1000 are allowed by serving.max_pixels" in refusal(
            prep.post("/predict", json=encoded(hostile.png(40, 40))), 400
        )


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [' + b"{}," * 3_000_000 + b"{}]}",
        b'{"more": [' + b"{}," * 3_000_000 + b'{}], "data": "AAAA"}',
        b'{"' + b"k" * 9_000_000 + b'": 1}',
        b'{"data":' * 1_000_000,
    ],
)
def test_json_without_an_image_is_rejected_cheaply(prep: httpx.Client, body: bytes) -> None:
    message = refusal(prep.post("/predict", content=body), 422)
    assert len(message) < 300


class RawClient:
    """A client that sends exactly the given bytes."""

    def __init__(self, prep: httpx.Client) -> None:
        self.socket = socket.create_connection(("127.0.0.1", prep.base_url.port or 0), timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def head(self, size_bytes: int) -> None:
        self.socket.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size_bytes)

    def answer(self) -> tuple[int, dict[str, str], str]:
        """Status, headers and message of the response."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, json.loads(response.read())["message"]


def test_slow_body_is_rejected(stored_releases: ReleaseStore, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "UPLOAD_TIMEOUT_S", 1)
    with prep_client(stored_releases.settings(port)) as prep, RawClient(prep) as slow:
        slow.head(1_000)
        slow.socket.sendall(b'{"data"')
        status, _, message = slow.answer()
        assert (status, message) == (408, "The request's body did not arrive within 1 s.")
        assert prep.post("/predict", json=SMALL).status_code == 200
        assert 'path="/predict",status="408"' in prep.get("/metrics").text


def test_total_size_of_bodies_in_flight_is_limited(
    stored_releases: ReleaseStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_BODIES_SIZE_BYTES", 100_000)
    size_bytes = 60_000
    body = json.dumps(SMALL).encode().ljust(size_bytes)
    settings = stored_releases.settings(port, max_request_size_bytes=size_bytes)
    with prep_client(settings) as prep, RawClient(prep) as slow:
        slow.head(size_bytes)
        slow.socket.sendall(body[:-1])
        prep.get("/metrics")  # when it is answered, the server has read the body, and rejects the next one
        status = 0
        while status != 503:  # the bodies are still passing through the kernel
            with RawClient(prep) as refused:
                refused.head(size_bytes)
                refused.socket.sendall(body[:-1])
                status, headers, message = refused.answer()
        assert (message, headers["retry-after"]) == (
            "The server is busy with other requests; try again in a second.",
            "1",
        )
        assert prep.post("/predict", json=SMALL).status_code == 200, "a small body still fits"
        slow.socket.sendall(body[-1:])
        assert slow.socket.recv(15) == b"HTTP/1.1 200 OK"
        answer = prep.post("/predict", content=body)
        assert answer.status_code == 200, "the memory of the bodies is free again"


@pytest.mark.parametrize("sent", [b"", b"POST /predict HTTP/1.1\r\nHost:"])
def test_connection_without_a_head_is_closed(
    stored_releases: ReleaseStore, port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 1.0)
    with prep_client(stored_releases.settings(port)) as prep, RawClient(prep) as silent:
        silent.socket.sendall(sent)
        assert silent.socket.recv(1) == b""
        assert prep.post("/predict", json=SMALL).status_code == 200


def test_connection_with_a_stalled_second_head_is_closed(
    stored_releases: ReleaseStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 1.0)
    with prep_client(stored_releases.settings(port)) as prep, RawClient(prep) as client:
        client.socket.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.socket.recv(2**16).startswith(b"HTTP/1.1 404")
        client.socket.sendall(b"GET /nothing HTTP/1.1\r\n")
        while part := client.socket.recv(2**16):
            assert b"HTTP" not in part


def test_slow_request_outlives_the_head_timeout(
    stored_releases: ReleaseStore, port: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 1.0)
    with prep_client(stored_releases.settings(port)) as prep, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(prep.post, "/predict", json=LARGE)
        gate.reached.acquire()
        with RawClient(prep) as silent:
            assert silent.socket.recv(1) == b"", "the head timeout has expired"
        gate.opened.set()
        assert answer.result().status_code == 200


def test_endless_head_is_rejected(prep: httpx.Client) -> None:
    with RawClient(prep) as endless:
        endless.socket.sendall(b"GET /label HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert endless.socket.recv(12) == b"HTTP/1.1 400"


class TestRejectedBody:
    """`http.client` sends its whole body before it reads the response."""

    LIMIT_BYTES = 4 * 2**20

    def post(self, prep: httpx.Client, *bodies: bytes, **headers: str) -> tuple[int, str]:
        """The status and the message; ``bodies`` are the chunks of a body whose size is not
        declared."""
        with closing(http.client.HTTPConnection("127.0.0.1", prep.base_url.port, timeout=30)) as connection:
            connection.request("POST", "/predict", iter(bodies) if len(bodies) > 1 else bodies[0], headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())["message"]

    @pytest.fixture
    def limited(
        self, stored_releases: ReleaseStore, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[httpx.Client]:
        monkeypatch.setattr(app, "MAX_BODIES_SIZE_BYTES", self.LIMIT_BYTES)
        with prep_client(stored_releases.settings(port, max_request_size_bytes=self.LIMIT_BYTES)) as client:
            yield client

    @pytest.mark.parametrize("chunks", [1, 16])
    def test_body_above_the_limit_gets_413(self, limited: httpx.Client, chunks: int) -> None:
        body = [bytes(8 * self.LIMIT_BYTES // chunks)] * chunks
        for _ in range(8):
            assert self.post(limited, *body) == (
                413,
                f"The request is larger than the limit of {self.LIMIT_BYTES} bytes.",
            )

    def test_many_large_bodies_get_a_response(self, limited: httpx.Client) -> None:
        body = json.dumps(SMALL).encode().ljust(self.LIMIT_BYTES)
        with ThreadPoolExecutor(12) as pool:
            answers = [*pool.map(lambda _: self.status(limited, body), range(48))]
        assert set(answers) == {200, 503}

    def status(self, prep: httpx.Client, body: bytes) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", prep.base_url.port, timeout=30)) as connection:
            connection.request("POST", "/predict", body)
            return connection.getresponse().status

    def test_endless_body_is_discarded_up_to_a_limit(
        self, limited: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_limits, "MAX_DISCARDED_BYTES", self.LIMIT_BYTES)
        sent_bytes = 0
        with RawClient(limited) as endless, suppress(OSError):
            endless.head(2**40)
            while sent_bytes < 64 * self.LIMIT_BYTES:
                sent_bytes += endless.socket.send(bytes(2**16))
        assert sent_bytes < 16 * self.LIMIT_BYTES

    def test_body_that_stalls_after_the_rejection_is_abandoned(
        self, stored_releases: ReleaseStore, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(app, "UPLOAD_TIMEOUT_S", 1)
        with prep_client(stored_releases.settings(port)) as prep, RawClient(prep) as stalled:
            stalled.head(2**30)
            stalled.socket.sendall(bytes(10))
            assert stalled.answer()[0] == 413
            assert prep.post("/predict", json=SMALL).status_code == 200

    def test_client_that_awaits_100_continue_is_not_asked_for_its_body(self, limited: httpx.Client) -> None:
        with RawClient(limited) as polite:
            polite.socket.sendall(
                b"POST /predict HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n"
            )
            assert polite.answer()[0] == 413
