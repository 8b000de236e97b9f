"""Limits on clients of a server with a small Java heap, which keeps working at every limit."""

import shutil
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from evernear.errors import PredictionRejectedError, ServingError, SettingsError
from evernear.release.manifest import MODEL_CONFIG_FILE
from evernear.serving import torchserve
from evernear.serving.client import Client, Target
from evernear.serving.configuration import model_store
from evernear.settings import ServingSettings, load
from evernear.settings.serving import HEAP_SIZE_BYTES
from tests.real.serving.raw import Answer, Raw, bearer, request
from tests.releases import MakeRelease, PackedRelease, forge
from tests.served import SMALL_HEAP, Served
from tests.waiting import until

CLIENTS = 60  # their bodies are three times the heap
LARGEST = ServingSettings.model_fields["max_request_size_bytes"].default
MOST_UPLOADS = SMALL_HEAP // 4 // LARGEST
FORM = (b'--x\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n', b"\r\n--x--\r\n")
FORM_TYPE = b"Content-Type: multipart/form-data; boundary=x\r\n"


@contextmanager
def connections(served: Served, count: int) -> Iterator[list[Raw]]:
    """Connections that the server has closed, too, at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(connection(served)) for _ in range(count)]


@contextmanager
def connection(served: Served) -> Iterator[Raw]:
    with Raw.to(served.settings.serving.inference_port) as client:
        yield client
        with suppress(OSError):  # a reset, or closed by the test
            client.end()
            while client.socket.recv(65536):
                pass


@contextmanager
def admitted_uploads(served: Served, headers: bytes = b"") -> Iterator[list[Raw]]:
    """Connections that fill the server, once requests of earlier tests have ended."""
    clients: list[Raw] = []

    def are_enough() -> bool:
        client = stack.enter_context(connection(served))
        if is_admitted(client, served, headers):
            clients.append(client)
        return len(clients) == MOST_UPLOADS

    with ExitStack() as stack:
        until(are_enough)
        yield clients


def upload(token: bytes, headers: bytes = b"") -> bytes:
    """The head of a prediction request with the largest body."""
    return request(b"POST /predictions/embedding", token + headers + b"Content-Length: %d\r\n" % LARGEST)


def is_admitted(client: Raw, served: Served, headers: bytes = b"") -> bool:
    """Whether the server admits a body of the largest size from ``client``."""
    answer = client.send(upload(bearer(served), b"Expect: 100-continue\r\n" + headers)).answer()
    return answer.status == 100 or not is_overload(answer)


def is_overload(answer: Answer) -> bool:
    assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
    return "reached the server's limit in bytes" in answer.sentence


def predicts(served: Served) -> bool:
    image, query = served.parts.smoke_queries()[0]
    with Client.of(served.settings) as client, Client.of(served.settings, "grpc") as grpc:
        return client.predict(image).pred == query.pred == grpc.predict(image).pred


def test_bodies_without_a_token_are_not_stored(stub: Served) -> None:
    with connections(stub, CLIENTS) as clients:
        for client in clients:
            client.send(upload(b"") + bytes(LARGEST - 1))
        assert {client.answer().status for client in clients} == {401}
        assert predicts(stub)


@pytest.mark.slow
def test_heap_fits_all_requests_in_flight_and_more_are_rejected(stub: Served) -> None:
    """Forms are parsed twice."""
    begin, end = FORM
    body = begin + bytes(LARGEST - len(begin) - len(end)) + end
    for _ in range(2):  # the memory of these requests is free again
        with admitted_uploads(stub, FORM_TYPE) as admitted, connections(stub, CLIENTS) as others:
            assert len(admitted) == 5
            assert not [client for client in others if is_admitted(client, stub)]
            for client in admitted:
                client.send(body[:-1])
            assert predicts(stub)  # an image of the usual size still fits
            for client in admitted:
                client.send(body[-1:])
            for client in admitted:
                answer = client.answer()
                assert (answer.status, "is not a PNG, JPEG, WebP or HEIC" in answer.sentence) == (400, True)
    assert predicts(stub)


def test_chunks_count_as_they_arrive(stub: Served) -> None:
    chunk = b"%x\r\n%s\r\n" % (1_000_000, bytes(1_000_000))
    head = request(b"POST /predictions/embedding", bearer(stub) + b"Transfer-Encoding: chunked\r\n")
    with admitted_uploads(stub):
        pass  # nothing of other tests is in flight
    with connections(stub, MOST_UPLOADS + 1) as clients:
        for client in clients:
            client.send(head + 6 * chunk)
        for client in clients:
            client.send(b"0\r\n\r\n")
        answers = [client.answer() for client in clients]
    assert {answer.status for answer in answers} == {400, 503}
    assert all(is_overload(answer) for answer in answers if answer.status == 503)
    assert predicts(stub)


def test_queued_requests_of_disconnected_clients_count(stub: Served, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with connections(stub, 1) as (first,):
        first.send(request(b"POST /predictions/embedding", bearer(stub), b"hold " + bytes(hold)))
        until(hold.exists)
        with admitted_uploads(stub) as clients:
            for client in clients:
                client.send(bytes(LARGEST))
            until(lambda: stub.management.describe("embedding").queue.pending == len(clients))
            for client in clients:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.socket.close()  # a reset
        for _ in range(10):
            with connections(stub, 1) as (client,):
                assert not is_admitted(client, stub)
            time.sleep(0.1)
        hold.unlink()
        assert first.answer().status == 400
    with admitted_uploads(stub):
        assert predicts(stub)


def test_grpc_calls_count_toward_the_limit(stub: Served) -> None:
    with (
        admitted_uploads(stub),
        Client.of(stub.settings, "grpc") as grpc,
        pytest.raises(ServingError, match="reached the server's limit in bytes"),
    ):
        grpc.predict(bytes(LARGEST - 10_000))
    assert predicts(stub)


def test_grpc_messages_without_a_token_are_not_stored(stub: Served) -> None:
    target = replace(Target.local(stub.settings, "grpc"), token=lambda: "x")

    def ask(_: int) -> str:
        with Client(target) as unauthorized, pytest.raises(PredictionRejectedError) as refusal:
            unauthorized.predict(bytes(LARGEST - 10_000))
        return str(refusal.value)

    with ThreadPoolExecutor(40) as pool:
        assert all("refuses the token" in refusal for refusal in pool.map(ask, range(CLIENTS)))
    assert predicts(stub)


def test_settings_reject_a_request_size_beyond_the_heap_quarter() -> None:
    with pytest.raises(SettingsError, match=r"max_request_size_bytes = 134217729: .*134217728"):
        load(overrides=[f"serving.max_request_size_bytes={HEAP_SIZE_BYTES // 4 + 1}"])


def test_slow_body_times_out(hasty: Served) -> None:
    with connections(hasty, 1) as (client,):
        client.send(upload(bearer(hasty)))
        client.socket.settimeout(0.1)
        answer = None
        while answer is None:
            client.send(b"x")  # each byte alone would be in time
            with suppress(TimeoutError):
                answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert "did not arrive within 1 s" in answer.sentence


@pytest.mark.parametrize("sent", [b"", b"GET /ping HTTP/1.1\r\nHost: x\r\n"])
def test_connection_without_a_request_is_closed(hasty: Served, sent: bytes) -> None:
    with connections(hasty, 1) as (client,):
        assert client.send(sent).all_answers() == []


@pytest.mark.slow
def test_connection_in_use_stays_open(hasty: Served) -> None:
    with connections(hasty, 1) as (client,):
        deadline_s = time.monotonic() + 4
        while time.monotonic() < deadline_s:
            assert client.send(request(b"GET /ping", bearer(hasty))).answer().status == 200
            time.sleep(0.2)
        assert client.all_answers() == []


def test_connections_beyond_the_limit_wait(hasty: Served) -> None:
    ping = request(b"GET /ping", bearer(hasty))
    with connections(hasty, 20) as clients:
        for client in clients:
            client.send(ping)
        assert {client.answer().status for client in clients} == {200}
        with connections(hasty, 1) as (late,):
            late.send(ping).socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                late.answer()
            late.socket.settimeout(30)
            with Raw.to(hasty.settings.serving.metrics_port) as metrics:
                assert metrics.send(request(b"GET /metrics")).answer().status == 200
            clients[0].socket.close()
            assert late.answer().status == 200


def test_without_the_model_api_no_model_can_be_changed(hasty: Served) -> None:
    for refused in (
        lambda: hasty.management.register("embedding.mar", hasty.settings.serving),
        lambda: hasty.management.unregister("embedding", hasty.manifest.version),
    ):
        with pytest.raises(ServingError, match="rejected"):
            refused()
    assert torchserve.is_ready(hasty.home, "embedding")


QUEUED = 3


@pytest.fixture
def registered(stub: Served, delayed: PackedRelease) -> Iterator[Served]:
    """The server of the stub, with a second version."""
    shutil.copy(delayed.archive, model_store(stub.home) / "delayed.mar")
    stub.management.register("delayed.mar", stub.settings.serving)
    yield stub
    stub.management.unregister("embedding", delayed.version)


@pytest.mark.parametrize("loaded", ["registered", "hasty"], ids=["while it runs", "at startup"])
def test_lone_requests_do_not_wait_and_those_for_a_busy_worker_form_a_batch(
    request: pytest.FixtureRequest, delayed: PackedRelease, loaded: str, tmp_path: Path
) -> None:
    stub: Served = request.getfixturevalue(loaded)
    image, hold = stub.parts.smoke_queries()[0][0], tmp_path / "hold"
    with stub.client() as client, ThreadPoolExecutor(1 + QUEUED) as pool:
        started_s = time.monotonic()
        for _ in range(3):
            client.predict(image, delayed.version)
        assert time.monotonic() - started_s < 60
        first = pool.submit(client.predict, b"hold " + bytes(hold), delayed.version)
        until(hold.exists)
        others = [pool.submit(client.predict, image, delayed.version) for _ in range(QUEUED)]
        until(lambda: stub.management.describe("embedding", delayed.version).queue.pending == QUEUED)
        hold.unlink()
        assert isinstance(first.exception(), PredictionRejectedError)
        assert len({other.result().id for other in others}) == 1
        assert client.predict(image, delayed.version)  # alone again, after a batch of several


@pytest.mark.slow
def test_a_worker_that_takes_too_long_is_replaced(stub: Served, make_stub: MakeRelease, tmp_path: Path) -> None:
    config = {MODEL_CONFIG_FILE: b"batchSize: 2\nresponseTimeout: 2\n"}
    release, hold = forge(make_stub(), tmp_path / "release.mar", **config), tmp_path / "hold"
    shutil.copy(release.archive, model_store(stub.home) / "impatient.mar")
    stub.management.register("impatient.mar", stub.settings.serving)
    image, query = stub.parts.smoke_queries()[0]
    with stub.client() as client:
        with pytest.raises(ServingError, match="Worker died"):
            client.predict(b"hold " + bytes(hold), release.version)
        assert client.predict(image, release.version).pred == query.pred
    stub.management.unregister("embedding", release.version)
