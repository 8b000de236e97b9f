"""A real TorchServe, over its APIs."""

import json
import stat
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import requests

from evernear.errors import ServingError
from evernear.serving import torchserve
from evernear.serving.client import Client, Format
from evernear.serving.endpoints import Endpoints, read_key
from evernear.serving.query_log_files import decode_embedding
from tests.served import Served


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


def test_workers_use_one_thread_and_inherit_no_secret(served: Served) -> None:
    worker = next(process for process in torchserve.processes(served.home) if "java" not in process.name())
    environment = worker.environ()
    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
    assert not [name for name in environment if name.startswith(("AWS_", "EVERNEAR_"))]


def test_start_is_idempotent_and_rejects_other_ports(served: Served) -> None:
    before = {process.pid for process in torchserve.processes(served.home)}
    torchserve.start_server(served.settings.serving, served.home)
    assert {process.pid for process in torchserve.processes(served.home)} == before
    other = served.settings.serving.model_copy(update={"inference_port": 1234})
    with pytest.raises(ServingError, match=r"already runs at .* run `evernear stop` first"):
        torchserve.start_server(other, served.home)
