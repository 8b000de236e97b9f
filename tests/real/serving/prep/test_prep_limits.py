"""Limits on clients of the preprocessing server, and their isolation from other clients."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from evernear.data.image_file import EncodedImage
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import MAX_WAITING_LARGE, SMALL_PIXELS
from evernear.serving.prep import service
from evernear.serving.prep.service import prepare
from tests import hostile
from tests.prep_server import ReleaseStore, prep_client, refusal
from tests.real.serving.fake_servers import ANSWER, grpc_server


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
    monkeypatch.setattr(service, "PREP_TIMEOUT_S", 2)
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
