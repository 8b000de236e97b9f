"""A real TorchServe, over its APIs, and the arithmetic of its meter."""

import json
import re
import stat
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from evernear.embedding import openvino_version
from evernear.errors import PredictionRejectedError, ServingError
from evernear.serving import torchserve
from evernear.serving.client import Client, Format
from evernear.serving.configuration import MAIN_CLASS
from evernear.serving.endpoints import Endpoints, read_key
from evernear.serving.metrics import DISTANCE_BOUNDS, FLUSH_EVERY_S, METRICS, SECONDS_BOUNDS, Labels, Meter
from evernear.serving.query_log_files import decode_embedding
from tests.served import Served
from tests.waiting import until


def headers(served: Served, key: str = "inference") -> dict[str, str]:
    return {"Authorization": f"Bearer {read_key(served.home, key)}"}


def url(served: Served) -> str:
    return Endpoints.of(served.settings.serving).inference_url + "/predictions/embedding"


def test_response_has_exactly_the_documented_fields(served: Served) -> None:
    image, query = served.parts.smoke_queries()[0]
    response = requests.post(url(served), data=image, headers=headers(served), timeout=10)
    assert response.headers["content-type"] == "application/json"
    prediction = response.json()
    assert set(prediction) == {"pred", "dist", "unknown", "neighbors", "version", "id"}
    assert prediction["id"] == response.headers["x-request-id"]
    assert prediction["pred"] == query.pred
    assert set(prediction["neighbors"][0]) == {"label", "dist", "row"}
    assert prediction["version"] == served.manifest.version


@pytest.mark.parametrize("format", ["rest", "grpc"])
def test_embedding_is_in_the_answer_to_a_request_that_asks_for_it(served: Served, format: Format) -> None:
    image, _ = served.parts.smoke_queries()[0]
    with Client.of(served.settings, format) as client:
        assert not client.predict(image).embedding
        answer = client.predict(image, embedding=True)
    embedding = decode_embedding(answer.embedding)
    assert embedding is not None
    assert embedding.shape == (served.manifest.embedding_dim,)
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-2)
    assert answer.neighbors[0].row >= 0


def test_invalid_keys_are_rejected(served: Served) -> None:
    image, _ = served.parts.smoke_queries()[0]
    management = Endpoints.of(served.settings.serving).management_url
    for invalid in ({}, {"Authorization": "Bearer x"}, headers(served, "management")):
        assert requests.post(url(served), data=image, headers=invalid, timeout=10).status_code == 401
    for invalid in ({}, headers(served, "inference")):
        assert requests.get(f"{management}/models", headers=invalid, timeout=10).status_code == 401


def test_only_the_owner_can_read_the_keys_and_they_do_not_expire(served: Served) -> None:
    assert stat.S_IMODE(served.home.stat().st_mode) == 0o700
    assert stat.S_IMODE((served.home / "key_file.json").stat().st_mode) == 0o600
    keys = json.loads((served.home / "key_file.json").read_bytes())
    for api in ("inference", "management"):
        expiry = datetime.fromisoformat(keys[api]["expiration time"])
        assert expiry > datetime.now(UTC) + timedelta(days=3650 - 2)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/release.mar", "file:///etc/release.mar"])
def test_models_load_only_from_the_model_store(served: Served, address: str) -> None:
    with pytest.raises(ServingError, match="does not match any allowed URL"):
        served.management.register(address, served.settings.serving)


def test_workers_do_not_spin_and_inherit_no_secret(served: Served) -> None:
    worker = next(process for process in torchserve.processes(served.home) if "java" not in process.name())
    environment = worker.environ()
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert not [name for name in environment if name.startswith(("AWS_", "EVERNEAR_"))]


def test_start_is_idempotent_and_rejects_other_ports(served: Served) -> None:
    before = {process.pid for process in torchserve.processes(served.home)}
    torchserve.start_server(served.settings.serving, served.home)
    assert {process.pid for process in torchserve.processes(served.home)} == before
    other = served.settings.serving.model_copy(update={"inference_port": 1234})
    with pytest.raises(ServingError, match=r"already runs at .* run `evernear stop` first"):
        torchserve.start_server(other, served.home)


SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
Series = dict[tuple[str, frozenset[str]], float]


def scrape(served: Served) -> Series:
    """All samples by name and labels (``key="value"``), without the host's."""
    text = requests.get(f"http://127.0.0.1:{served.settings.serving.metrics_port}/metrics", timeout=10).text
    return {
        (name, frozenset(label for label in labels.split(",") if label and not label.startswith("Host"))): float(value)
        for name, labels, value in SAMPLE.findall(text)
    }


def test_server_exports_metrics_of_its_requests(served: Served) -> None:
    image, query = served.parts.smoke_queries()[0]
    version = f'version="{served.manifest.version}"'

    def value(series: Series, name: str, *labels: str) -> float:
        return series.get((name, frozenset({version, *labels})), 0)

    time.sleep(2 * FLUSH_EVERY_S)  # by then, the requests of earlier tests are counted
    before = scrape(served)
    answer, _ = [served.client().predict(image) for _ in range(2)]
    hidden = requests.post(url(served), image, headers=headers(served) | {"evernear-probe": "1"}, timeout=30)
    assert hidden.status_code == 200, "it counts: a client cannot pretend to be a readiness probe"
    with pytest.raises(PredictionRejectedError):
        served.client().predict(b"no image")
    rejected = value(before, "evernear_requests_total", 'outcome="BadImage"') + 1
    until(lambda: value(scrape(served), "evernear_batch_size_sum") == value(before, "evernear_batch_size_sum") + 4)
    until(lambda: value(scrape(served), "evernear_requests_total", 'outcome="BadImage"') == rejected)
    after = scrape(served)

    def more(name: str, *labels: str) -> float:
        return value(after, name, *labels) - value(before, name, *labels)

    assert more("evernear_requests_total", 'outcome="ok"') == 3
    assert more("evernear_requests_total", 'outcome="BadImage"') == 1
    assert more("evernear_predictions_total", f'unknown="{str(query.unknown).lower()}"') == 3
    assert more("evernear_distance_count") == 3
    assert more("evernear_distance_sum") == pytest.approx(3 * query.dist, abs=1e-3)
    assert more("evernear_distance_bucket", 'le="+Inf"') == 3
    bounds = [bound for bound in DISTANCE_BOUNDS if query.dist <= bound - 1e-3]
    assert more("evernear_distance_bucket", f'le="{bounds[0]}"') == 3
    for stage in ("decode", "network", "search"):
        assert 0 < more("evernear_stage_seconds_total", f'stage="{stage}"') < 60
    assert value(after, "evernear_unknown_threshold") == pytest.approx(served.manifest.threshold, abs=1e-6)
    network, engine = served.manifest.network_sha256[:12], "OpenVINO" if openvino_version() else "TorchScript"
    assert value(after, "evernear_release_info", f'network="{network}"', f'engine="{engine}"') == 1
    agreeing = sum(neighbor.label == answer.pred for neighbor in answer.neighbors)
    known = 0 if answer.unknown else 3
    assert more("evernear_neighbors_total", 'agrees="true"') == known * agreeing
    assert more("evernear_neighbors_total", 'agrees="false"') == known * (len(answer.neighbors) - agreeing)
    assert value(after, "evernear_test_accuracy") == pytest.approx(served.manifest.metrics["label_right"], abs=1e-6)
    age_s = time.time() - served.manifest.created.timestamp()
    assert value(after, "evernear_index_age_seconds") == pytest.approx(age_s, abs=120)


@pytest.mark.parametrize("format", ["rest", "grpc"])
def test_time_in_the_queue_is_part_of_what_a_client_waits(served: Served, format: Format) -> None:
    """The batch of a request that waits for a worker is as fast as ever."""
    image, _ = served.parts.smoke_queries()[0]
    bound_s = next(bound for bound in SECONDS_BOUNDS if bound > 0.3)

    def slow() -> float:
        series = scrape(served)
        within = series["evernear_request_seconds_bucket", frozenset({f'le="{bound_s}"'})]
        return series["evernear_request_seconds_count", frozenset()] - within

    client = Client.of(served.settings, format)
    client.predict(image)
    before = slow()
    (worker,) = (item for item in torchserve.processes(served.home) if MAIN_CLASS not in item.cmdline())
    worker.suspend()
    waiting = threading.Thread(target=client.predict, args=(image,))
    waiting.start()
    waiting.join(2 * bound_s)
    assert waiting.is_alive()
    worker.resume()
    waiting.join()
    assert slow() == before + 1


class Sink:
    """Accumulates emitted values as Prometheus would."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, Labels]] = Counter()

    def emit(self, name: str, value: float, labels: Labels) -> None:
        assert len(labels) == len(METRICS[name].labels)
        if METRICS[name].kind == "gauge":
            self.values[name, labels] = value  # type: ignore[assignment]
        else:
            self.values[name, labels] += value  # type: ignore[assignment]


@given(st.lists(st.lists(st.floats(0, 2), max_size=6), max_size=5))
def test_histogram_buckets_are_cumulative(batches: list[list[float]]) -> None:
    sink = Sink()
    meter = Meter(sink.emit, "v", "0" * 64, 0.0, 0.5, "OpenVINO")
    for distances in batches:
        meter.record_batch(["ok"] * len(distances), distances, sum(d > 0.5 for d in distances), {"decode": 0.25})
        meter.flush()
    everything = [distance for batch in batches for distance in batch]
    for bound in DISTANCE_BOUNDS:
        assert sink.values["evernear_distance_bucket", ("v", str(bound))] == sum(d <= bound for d in everything)
    assert sink.values["evernear_distance_count", ("v",)] == len(everything)
    assert sink.values["evernear_distance_sum", ("v",)] == pytest.approx(sum(everything), abs=1e-4)
    assert sink.values["evernear_predictions_total", ("v", "true")] == sum(d > 0.5 for d in everything)
    assert sink.values["evernear_stage_seconds_total", ("v", "decode")] == 0.25 * len(batches)
    assert sink.values["evernear_batch_size_count", ("v",)] == len(batches)


def test_reference_is_emitted_as_a_cumulative_distribution() -> None:
    sink = Sink()
    Meter(sink.emit, "v", "0" * 64, 0.0, 0.5, "OpenVINO", test_accuracy=0.9, reference=[0.05, 0.1, 0.25, 1.9])
    shares = {bound: sink.values["evernear_reference_distance_ratio", ("v", str(bound))] for bound in DISTANCE_BOUNDS}
    assert (shares[0.1], shares[0.2], shares[0.3], shares[1.4], shares[2.0]) == (0.5, 0.5, 0.75, 0.75, 1.0)
    assert sink.values["evernear_test_accuracy", ("v",)] == 0.9
