"""Limits on clients of a server with the smallest Java heap, which keeps working at every limit."""

import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
import requests

from evernear.errors import PredictionRejectedError, ServingError, SettingsError
from evernear.serving import configuration, torchserve
from evernear.serving.client import Client, Target
from evernear.settings import ServingSettings, load
from evernear.settings.serving import HEAP_SIZE_BYTES
from tests.real.serving.raw import Answer, Raw, bearer, request
from tests.releases import PackedRelease
from tests.served import Served, serving
from tests.waiting import until

CLIENTS = 150
LARGEST = ServingSettings.model_fields["max_request_size_bytes"].default
SMALL_HEAP = 128 * 2**20
FORM = (b'--x\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n', b"\r\n--x--\r\n")
FORM_TYPE = b"Content-Type: multipart/form-data; boundary=x\r\n"


@pytest.fixture(scope="module")
def small(release: PackedRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a small heap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "HEAP_SIZE_BYTES", SMALL_HEAP)
        with serving(release, tmp_path_factory.mktemp("small")) as served:
            yield served
            assert not [log for log in (served.home / "logs").iterdir() if b"OutOfMemory" in log.read_bytes()]


@contextmanager
def connections(served: Served, count: int) -> Iterator[list[Raw]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Raw.to(served.settings.serving.inference_port)) for _ in range(count)]


@contextmanager
def admitted_uploads(served: Served) -> Iterator[list[Raw]]:
    """Connections that fill the server, once it has noticed that those of earlier tests are
    closed."""
    clients: list[Raw] = []

    def are_enough() -> bool:
        client = stack.enter_context(Raw.to(served.settings.serving.inference_port))
        if is_admitted(client, served):
            clients.append(client)
        return len(clients) == most_uploads(served)

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


def most_uploads(served: Served) -> int:
    return configuration.frontend_limits(served.settings.serving)["max_in_flight_bytes"] // LARGEST


def predicts(served: Served) -> bool:
    image, query = served.parts.smoke_queries()[0]
    with Client.of(served.settings) as client, Client.of(served.settings, "grpc") as grpc:
        return client.predict(image).pred == query.pred == grpc.predict(image).pred


def test_missing_token_is_rejected_before_the_body_arrives(small: Served) -> None:
    with connections(small, 1) as (client,):
        answer = client.send(upload(b"")).answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")


def test_bodies_without_a_token_are_not_stored(small: Served) -> None:
    with connections(small, CLIENTS) as clients:
        for client in clients:
            client.send(upload(b"") + bytes(LARGEST - 1))
        assert {client.answer().status for client in clients} == {401}
        assert predicts(small)


def test_heap_fits_all_requests_in_flight_and_more_are_rejected(small: Served) -> None:
    """Forms are parsed twice."""
    begin, end = FORM
    body = begin + bytes(LARGEST - len(begin) - len(end)) + end
    for _ in range(2):  # the memory of these requests is free again
        with connections(small, CLIENTS) as clients:
            admitted = [client for client in clients if is_admitted(client, small, FORM_TYPE)]
            assert len(admitted) == most_uploads(small) == 5
            for client in admitted:
                client.send(body[:-1])
            assert predicts(small)  # an image of the usual size still fits
            for client in admitted:
                client.send(body[-1:])
            for client in admitted:
                answer = client.answer()
                assert (answer.status, "is not a PNG, JPEG or WebP" in answer.sentence) == (400, True)
    assert predicts(small)


def test_chunks_count_as_they_arrive(small: Served) -> None:
    chunk = b"%x\r\n%s\r\n" % (1_000_000, bytes(1_000_000))
    head = request(b"POST /predictions/embedding", bearer(small) + b"Transfer-Encoding: chunked\r\n")
    with connections(small, 6) as clients:
        for client in clients:
            client.send(head + 6 * chunk)
        for client in clients:
            client.send(b"0\r\n\r\n")
        answers = [client.answer() for client in clients]
    assert {answer.status for answer in answers} == {400, 503}
    assert all(is_overload(answer) for answer in answers if answer.status == 503)
    assert predicts(small)


def test_queued_requests_of_disconnected_clients_count(small: Served) -> None:
    (worker,) = [process for process in torchserve.processes(small.home) if "java" not in process.name()]
    before = requests_received(small)
    worker.send_signal(signal.SIGSTOP)
    try:
        with admitted_uploads(small) as clients:
            for client in clients:
                client.send(bytes(LARGEST))
            until(lambda: requests_received(small) == before + len(clients))
            for client in clients:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        for _ in range(10):
            assert not has_room(small)
            time.sleep(0.1)
    finally:
        worker.send_signal(signal.SIGCONT)
    until(lambda: has_room(small))
    assert predicts(small)


def requests_received(served: Served) -> int:
    """Total number of prediction requests that TorchServe has received."""
    url = f"http://127.0.0.1:{served.settings.serving.metrics_port}/metrics"
    lines = requests.get(url, timeout=30).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("ts_inference_requests_total{"))


def has_room(served: Served) -> bool:
    with connections(served, 1) as (client,):
        return is_admitted(client, served)


def test_grpc_calls_count_toward_the_limit(small: Served) -> None:
    with (
        admitted_uploads(small),
        Client.of(small.settings, "grpc") as grpc,
        pytest.raises(ServingError, match="reached the server's limit in bytes"),
    ):
        grpc.predict(bytes(LARGEST - 10_000))
    assert predicts(small)


def test_grpc_messages_without_a_token_are_not_stored(small: Served) -> None:
    target = replace(Target.local(small.settings, "grpc"), token=lambda: "x")

    def ask(_: int) -> str:
        with Client(target) as unauthorized, pytest.raises(PredictionRejectedError) as refusal:
            unauthorized.predict(bytes(LARGEST - 10_000))
        return str(refusal.value)

    with ThreadPoolExecutor(40) as pool:
        assert all("Token Authorization failed" in refusal for refusal in pool.map(ask, range(CLIENTS)))
    assert predicts(small)


def test_settings_reject_a_request_size_beyond_the_heap_quarter() -> None:
    with pytest.raises(SettingsError, match=r"max_request_size_bytes = 134217729: .*134217728"):
        load(overrides=[f"serving.max_request_size_bytes={HEAP_SIZE_BYTES // 4 + 1}"])


@pytest.fixture(scope="module")
def hasty(release: PackedRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with short timeouts and few connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "UPLOAD_TIMEOUT_S", 1)
        patch.setattr(configuration, "IDLE_TIMEOUT_S", 3)
        patch.setattr(configuration, "CONNECTION_BYTES", SMALL_HEAP // 20)
        patch.setattr(configuration, "HEAP_SIZE_BYTES", SMALL_HEAP)
        with serving(release, tmp_path_factory.mktemp("hasty")) as served:
            yield served


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
            assert client.send(ping).answer().status == 200
        with connections(hasty, 1) as (late,):
            late.send(ping).socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                late.answer()
            late.socket.settimeout(30)
            with Raw.to(hasty.settings.serving.metrics_port) as metrics:
                assert metrics.send(request(b"GET /metrics")).answer().status == 200
            clients[0].socket.close()
            assert late.answer().status == 200
