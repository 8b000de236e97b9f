"""The preprocessing server with predictors that change releases, are slow, or fail."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import grpc
import httpx
import pytest

from evernear.data.encoded_image import EncodedImage
from evernear.data.preprocess import Preprocessing
from evernear.serving.client.inference_pb2 import PredictionsRequest
from evernear.serving.decoding import SMALL_PIXELS
from evernear.serving.http import pods, remote
from evernear.serving.http.decoder import MAX_WAITING_LARGE
from evernear.serving.request_parsing import images_from_fields
from evernear.serving.responses import Rejection
from tests import hostile
from tests.hostile_requests import picture
from tests.prep_server import ReleaseStore, encoded, make_champion, prep_client, refusal
from tests.real.serving.fake_servers import answers, grpc_server
from tests.releases import settings_on_free_ports


def png(size_px: int = 100) -> dict[str, str]:
    return encoded(picture(size=(size_px, size_px)))


class Predictor:
    """Answers with ``version`` of ``releases``, and with the width of the images as the label."""

    def __init__(self, releases: ReleaseStore, version: str) -> None:
        self.releases = releases
        self.version = version
        self.calls = 0
        self.answer = self.recognize
        self.lock = threading.Lock()

    def __call__(self, request: PredictionsRequest, context: grpc.ServicerContext) -> bytes:
        with self.lock:
            self.calls += 1
        return self.answer(request, context)

    def recognize(self, request: PredictionsRequest, _: grpc.ServicerContext) -> bytes:
        release = self.releases.manifests[self.version]
        first = images_from_fields(request.input, release)[0]
        if isinstance(first, Rejection):
            return first.model_dump_json().encode()
        return answers(request, pred=str(release.preprocessing.width_px), version=release.version)

    def fail(self, _: PredictionsRequest, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.INTERNAL, "it is broken")

    def wait(self, request: PredictionsRequest, context: grpc.ServicerContext) -> bytes:
        while context.is_active():
            time.sleep(0.01)
        return b""


@pytest.fixture
def predictor(stored_releases: ReleaseStore) -> Predictor:
    """A predictor with release 1, the champion, whose input is 8 pixels wide."""
    return Predictor(stored_releases, stored_releases.release(1, champion=True))


@pytest.fixture
def grpc_port(predictor: Predictor) -> Iterator[int]:
    with grpc_server(predictor) as port:
        yield port


def test_rollout_changes_the_preprocessing(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_prep: httpx.Client
) -> None:
    assert grpc_prep.post("/predict/label", json=png()).json() == label_response("8", predictor.version)
    predictor.version = stored_releases.release(2, size_px=16)
    assert grpc_prep.post("/predict/label", json=png()).json() == label_response("16", predictor.version)
    assert grpc_prep.get("/metadata").json()["height_px"] == 16
    predictor.version = stored_releases.release(1)
    assert grpc_prep.post("/predict/label", json=png()).json() == label_response("8", predictor.version)


def label_response(label: str, version: str) -> dict[str, object]:
    return {"label": label, "unknown": False, "version": version}


def test_rollout_with_the_same_preprocessing_costs_no_second_call(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_prep: httpx.Client
) -> None:
    grpc_prep.post("/predict", json=png())
    calls = predictor.calls
    predictor.version = stored_releases.release(2)
    assert grpc_prep.post("/predict", json=png()).json()["version"] == predictor.version
    assert predictor.calls == calls + 1


@pytest.mark.slow
def test_rollouts_under_load_never_mix_preprocessing(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_port: int
) -> None:
    """Release 1 takes 8 pixels and release 2 takes 16, so a prediction with the other width is
    wrong."""
    versions = {stored_releases.release(1): "8", stored_releases.release(2, size_px=16): "16"}
    with prep_client(stored_releases.settings(grpc_port)) as client, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.post, "/predict", json=png()) for _ in range(300)]
        while not all(answer.done() for answer in answers):
            predictor.version = next(v for v in versions if v != predictor.version)
            time.sleep(0.05)
    versions_seen = set()
    for answer in answers:
        response = answer.result()
        if response.status_code == 200:
            assert response.json()["pred"] == versions[response.json()["version"]]
            versions_seen.add(response.json()["version"])
        else:
            assert "release changes faster" in refusal(response, 503)
    assert versions_seen == set(versions)


def test_predictions_of_an_unregistered_release_are_withheld(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_prep: httpx.Client
) -> None:
    predictor.version = version = stored_releases.release(2, published=False)
    for path in ("/health", "/metadata", "/label", "/predict/test", "/predict/test/label"):
        assert f"answers with release {version}, whose preprocessing is not available" in refusal(
            grpc_prep.get(path), 503
        )
    for path in ("/predict", "/predict/label"):
        assert "so its prediction may be wrong" in refusal(grpc_prep.post(path, json=png()), 503)
    stored_releases.release(2)  # finally published
    assert grpc_prep.get("/health").json()["version"] == version


def test_missing_first_release_is_reported(stored_releases: ReleaseStore, tmp_path: Path) -> None:
    predictor = Predictor(stored_releases, "x")
    with grpc_server(predictor) as port, prep_client(stored_releases.settings(port)) as client:
        assert "No release has been promoted in " in refusal(client.get("/health"), 503)
        assert "No release has been promoted in " in refusal(client.post("/predict", json=png()), 503)
        assert predictor.calls == 0


def test_damaged_registry_is_reported(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_prep: httpx.Client
) -> None:
    (stored_releases.directory / "releases" / "champion.json").write_text("{")
    assert "is not a valid" in refusal(grpc_prep.get("/health"), 503)
    make_champion(stored_releases.uri, predictor.version)
    assert grpc_prep.get("/health").status_code == 200


def test_predictor_is_reconnected_after_downtime(stored_releases: ReleaseStore, predictor: Predictor) -> None:
    port = settings_on_free_ports().inference_port
    with prep_client(stored_releases.settings(port)) as client:
        assert f"No server answers gRPC at 127.0.0.1:{port}" in refusal(client.post("/predict", json=png()), 503)
        assert refusal(client.get("/health"), 503)
        with grpc_server(predictor, port):
            deadline_s = time.monotonic() + 60
            while client.get("/health").status_code != 200:
                assert time.monotonic() < deadline_s
            assert client.post("/predict", json=png()).status_code == 200
        exported = client.get("/metrics").text
        assert 'evernear_prep_predictor_failures_total{reason="ServerUnreachableError"}' in exported


def test_slow_predictor_times_out(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PREP_TIMEOUT_S", 0.3)
    predictor.answer = predictor.wait
    with prep_client(stored_releases.settings(grpc_port)) as prep:
        assert "within 0.3 s" in refusal(prep.post("/predict", json=png()), 504)
        assert "within 0.3 s" in refusal(prep.get("/health"), 504)


def test_calls_are_not_retried_during_an_outage(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_port: int
) -> None:
    def fail(_: PredictionsRequest, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    predictor.answer = fail
    with prep_client(stored_releases.settings(grpc_port)) as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: client.post("/predict", json=png(8)), range(200)))
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        calls = predictor.calls
        assert refusal(client.post("/predict", json=png()), 503)
        assert predictor.calls == calls + 1
        predictor.answer = predictor.recognize
        assert client.post("/predict", json=png()).status_code == 200


def test_concurrent_requests_to_the_predictor_are_limited(
    stored_releases: ReleaseStore, predictor: Predictor, grpc_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, most = 0, 0

    def count(request: PredictionsRequest, context: grpc.ServicerContext) -> bytes:
        nonlocal together, most
        with predictor.lock:
            together += 1
            most = max(most, together)
        time.sleep(0.05)
        with predictor.lock:
            together -= 1
        return predictor.recognize(request, context)

    predictor.answer = count
    monkeypatch.setattr(pods, "MESSAGES_IN_FLIGHT", 2)
    with prep_client(stored_releases.settings(grpc_port)) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/predict", json=png()).status_code, range(16)))
    assert answers == [200] * 16
    assert most == 2


def test_foreign_predictor_is_reported(stored_releases: ReleaseStore, predictor: Predictor, grpc_port: int) -> None:
    predictor.answer = lambda *_: b"<html>"
    with prep_client(stored_releases.settings(grpc_port)) as client:
        assert "is not an evernear release" in refusal(client.get("/health"), 503)
    predictor.answer = lambda *_: json.dumps({"code": 400, "type": "x", "message": "Not for you."}).encode()
    with prep_client(stored_releases.settings(grpc_port)) as client:
        assert "The predictor rejects the requests of this server: Not for you." in refusal(client.get("/health"), 503)


@pytest.fixture
def grpc_prep(stored_releases: ReleaseStore, grpc_port: int) -> Iterator[httpx.Client]:
    with prep_client(stored_releases.settings(grpc_port)) as client:
        yield client


SMALL = encoded(hostile.png(28, 28))
LARGE = encoded(hostile.png(1001, 1000, 1))


PREPARE = pods.TorchServe.prepare


class Gate:
    """Blocks the decoding of large images until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Semaphore(0)

    def prepare(self, file: EncodedImage, shape: Preprocessing) -> pods.PreparedImage:
        if file.pixels > SMALL_PIXELS:
            self.reached.release()
            self.opened.wait()
        return PREPARE(file, shape)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(pods.TorchServe, "prepare", staticmethod(gate.prepare))
    yield gate
    gate.opened.set()


def test_small_images_do_not_wait_for_large_ones(gate: Gate, grpc_prep: httpx.Client) -> None:
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(grpc_prep.post, "/predict", json=LARGE) for _ in range(4)]
        gate.reached.acquire()
        for _ in range(20):
            assert grpc_prep.post("/predict", json=SMALL).status_code == 200
        assert not any(answer.done() for answer in large)
        gate.opened.set()
        assert {answer.result().status_code for answer in large} == {200}


def test_excess_large_images_are_rejected_immediately(
    stored_releases: ReleaseStore, grpc_port: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LARGE_DECODES", 2)
    monkeypatch.setattr(remote, "PREP_TIMEOUT_S", 60)
    count = 2 + MAX_WAITING_LARGE + 1
    with prep_client(stored_releases.settings(grpc_port)) as prep, ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(prep.post, "/predict", json=LARGE) for _ in range(count)]
        excess = next(as_completed(answers)).result()
        assert "Too many large images" in refusal(excess, 503)
        assert excess.headers["retry-after"] == "1"
        assert prep.post("/predict", json=SMALL).status_code == 200
        gate.opened.set()
        assert Counter(answer.result().status_code for answer in answers) == {200: count - 1, 503: 1}
        assert prep.post("/predict", json=LARGE).status_code == 200


def test_waiting_too_long_for_decoding_times_out(
    stored_releases: ReleaseStore, grpc_port: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PREP_TIMEOUT_S", 2)
    with prep_client(stored_releases.settings(grpc_port)) as prep:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: prep.post("/predict", json=LARGE), range(2)))
        assert [refusal(answer, 504) == "No prediction within 2 s." for answer in answers] == [True, True]
        assert prep.post("/predict", json=SMALL).status_code == 200
        gate.opened.set()
    # The decode in progress finished; the waiting one never started.
    assert gate.reached.acquire(blocking=False)
    assert not gate.reached.acquire(blocking=False)


def test_pixel_limits_of_server_and_release_both_apply(stored_releases: ReleaseStore, grpc_port: int) -> None:
    settings = stored_releases.settings(grpc_port)
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
def test_json_without_an_image_is_rejected_cheaply(grpc_prep: httpx.Client, body: bytes) -> None:
    message = refusal(grpc_prep.post("/predict", content=body), 422)
    assert len(message) < 300
