"""The preprocessing server in front of a real TorchServe."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from evernear.common.output import JsonFormatter
from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.serving.client import AsyncClient, Client, Target
from evernear.serving.configuration import model_store
from evernear.serving.http.prep import prep_memory_size_bytes
from evernear.serving.responses import Metadata
from evernear.settings import Settings
from tests import command_line, hostile, hostile_requests
from tests.hostile_requests import fuzz, picture
from tests.prep_server import encoded, make_champion, prep_client
from tests.releases import settings_on_free_ports
from tests.served import Served

JPEG = picture("RGB", "JPEG", (301, 203))
EVERNEAR = str(Path(sys.executable).parent / "evernear")
PATHS = {"/health", "/metadata", "/label", "/predict/test", "/predict/test/label", "/predict", "/predict/label"}


@pytest.fixture(scope="module")
def published(served: Served) -> Settings:
    """Settings of a server whose release is the registry's champion."""
    registry = Registry(open_store(served.settings.store_uri))
    registry.publish(model_store(served.home) / "release.mar")
    make_champion(served.settings.store_uri, served.manifest.version)
    return served.settings


@pytest.fixture(scope="module")
def prep(published: Settings) -> Iterator[httpx.Client]:
    with prep_client(published) as client:
        yield client


def test_prediction_equals_torchserves(served: Served, prep: httpx.Client) -> None:
    with Client.of(served.settings) as direct:
        for image in [JPEG, *(image for image, _ in served.parts.smoke_queries())]:
            answer = prep.post("/predict", json=encoded(image))
            assert answer.status_code == 200, answer.text
            expected = direct.predict(image).model_dump(mode="json")
            received = answer.json()
            assert {**received, "dist": 0, "neighbors": 0, "id": 0} == {**expected, "dist": 0, "neighbors": 0, "id": 0}
            assert received["id"] not in ("", expected["id"])
            assert received["dist"] == pytest.approx(expected["dist"], abs=1e-5)
            label = prep.post("/predict/label", json=encoded(image)).json()
            assert label.pop("id") not in ("", received["id"])
            assert label == {
                "label": received["pred"],
                "unknown": received["unknown"],
                "version": served.manifest.version,
            }


def test_concurrent_requests_share_messages_and_get_their_own_answers(served: Served, prep: httpx.Client) -> None:
    queries = served.parts.smoke_queries()
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda image: prep.post("/predict", json=encoded(image)).json(), [i for i, _ in queries] * 8)
        )
    assert [answer["pred"] for answer in answers] == [query.pred for _, query in queries] * 8
    assert len({answer["id"] for answer in answers}) == len(answers)


def test_request_with_more_images_than_a_message_is_answered_in_order(served: Served, prep: httpx.Client) -> None:
    queries = (served.parts.smoke_queries() * 99)[:99]
    instances = [encoded(image) for image, _ in queries]
    instances.insert(50, encoded(b"text"))
    answers = prep.post("/v1/models/embedding:predict", json={"instances": instances}).json()["predictions"]
    assert answers.pop(50)["code"] == 400
    assert [answer["pred"] for answer in answers] == [query.pred for _, query in queries]


def test_health_label_and_metadata_name_the_release(served: Served, prep: httpx.Client) -> None:
    version, labels = served.manifest.version, list(served.manifest.labels)
    assert prep.get("/health").json() == {"status": "ok", "version": version}
    assert prep.get("/label").json() == {"labels": labels, "version": version}
    metadata = Metadata.model_validate(prep.get("/metadata").json())
    assert (metadata.height_px, metadata.channels, metadata.version) == (8, 1, version)


def test_prediction_is_logged_with_request_id_and_release(
    served: Served, prep: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("evernear.serving.http.app")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()  # of whether the level is enabled
    assert prep.get("/predict/test", headers={"X-Request-Id": "from-the-client"}).headers["X-Request-Id"] == (
        "from-the-client"
    )
    rejected = prep.post("/predict", json={}, headers={"X-Request-Id": "two words"})
    assert re.fullmatch("[0-9a-f]{32}", rejected.headers["X-Request-Id"])
    prep.get("/label")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["request"], first["release"], first["status"]) == ("from-the-client", served.manifest.version, 200)
    assert first["message"] == "GET /predict/test: 200"
    assert 0 < first["duration_s"] < 60
    assert (second["request"], second["path"], second["status"]) == (
        rejected.headers["X-Request-Id"],
        "/predict",
        422,
    )
    assert "release" not in second


def test_predict_test_recognizes_a_stored_query(served: Served, prep: httpx.Client) -> None:
    _, query = served.parts.smoke_queries()[0]
    received = prep.get("/predict/test").json()
    assert (received["pred"], received["unknown"]) == (query.pred, query.unknown)
    assert received["dist"] == pytest.approx(query.dist, abs=1e-3)
    assert prep.get("/predict/test/label").json()["label"] == query.pred


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (encoded(b"text"), 400, "The image is not a PNG, JPEG, WebP or HEIC image."),
        (encoded(JPEG[:900]), 400, "The image is a broken image"),
        ({"data": "***"}, 400, 'The text under "data" is not base64.'),
        ({"data": "\u00e4"}, 400, 'The text under "data" is not base64.'),
        ({"data": ""}, 400, "The image is empty."),
        ({"data": 3}, 422, "Expected `str`, got `int` - at `$.data`."),
        ({}, 422, "Object missing required field `data`."),
        ({"data": "AA==", "image": 1}, 422, "Object contains unknown field `image`."),
        ([], 422, "Expected `object`, got `array`."),
    ],
)
def test_bad_request_gets_one_message(prep: httpx.Client, body: object, status: int, sentence: str) -> None:
    for path in ("/predict", "/predict/label"):
        answer = prep.post(path, json=body)
        assert answer.status_code == status
        assert sentence in answer.json()["message"]
        assert answer.json()["code"] == status


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"data": "\xff"}', b'{"data": "\\ud800"}', b"null"])
def test_invalid_json_gets_one_message(prep: httpx.Client, body: bytes) -> None:
    answer = prep.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["message"]


@pytest.mark.parametrize(
    "media_type", ["IMAGE/JPEG", "application/octet-stream", "application/x-www-form-urlencoded", ""]
)
def test_image_file_is_recognized_whatever_its_media_type(prep: httpx.Client, media_type: str) -> None:
    assert prep.post("/predict", content=JPEG, headers={"Content-Type": media_type}).status_code == 200


@pytest.mark.parametrize("request_", [{"content": b""}, {"files": {"data": JPEG}}])
def test_request_without_an_image_is_told_how_to_send_one(prep: httpx.Client, request_: dict[str, Any]) -> None:
    answer = prep.post("/predict", **request_)
    assert answer.status_code == 422
    assert answer.json()["message"].startswith("The request has no image; send it as the body with Content-Type")


def test_rejected_body_is_counted(prep: httpx.Client, published: Settings) -> None:
    assert prep.post("/predict", content=bytes(published.prep.max_request_size_bytes + 1)).status_code == 413
    assert 'path="/predict",status="413"' in prep.get("/metrics").text


def test_unknown_paths_and_methods_get_the_same_error_format(prep: httpx.Client) -> None:
    assert prep.get("/nothing").json() == {"code": 404, "type": "NotFound", "message": "Not Found"}
    assert prep.get("/predict").status_code == 405
    assert prep.get("/predict").headers["allow"] == "POST"


def test_client_supports_the_preprocessing_server(served: Served, prep: httpx.Client) -> None:
    image, query = served.parts.smoke_queries()[0]
    target = Target("127.0.0.1", prep.base_url.port or 0, "embedding", "prep")

    async def ask() -> tuple[str, str]:
        async with AsyncClient(target) as client:
            return (await client.predict(image)).pred, (await client.metadata()).version

    assert asyncio.run(ask()) == (query.pred, served.manifest.version)
    with Client(target) as client:
        assert (client.predict(image).pred, client.metadata().version) == (query.pred, served.manifest.version)


def test_exports_prometheus_metrics(prep: httpx.Client, served: Served) -> None:
    prep.post("/predict", json=encoded(b"text"))
    prep.get("/health")
    received = prep.get("/metrics").text
    assert 'evernear_prep_requests_total{path="/predict",status="400"}' in received
    assert 'evernear_prep_requests_total{path="/health",status="200"}' in received
    assert f'evernear_prep_release_info{{model_name="embedding",version="{served.manifest.version}"}} 1.0' in received
    prep.get("/some/odd/path")
    assert "odd" not in prep.get("/metrics").text


def test_openapi_documents_every_path_with_errors_and_examples(prep: httpx.Client) -> None:
    schema = prep.get("/openapi.json").json()
    assert set(schema["paths"]) == PATHS
    for page in ("/docs", "/redoc"):  # they would load scripts from a CDN
        assert prep.get(page).status_code == 404
    post = schema["paths"]["/predict"]["post"]["responses"]
    assert set(post) == {"200", "400", "408", "413", "422", "503", "504"}
    assert post["200"]["content"]["application/json"]["example"]["pred"] == "7"
    example = schema["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    (example,) = example["properties"]["data"]["examples"]
    assert prep.post("/predict", json={"data": example}).status_code == 200


@pytest.mark.slow
def test_survives_a_minute_of_fuzzing_without_5xx(served: Served, prep: httpx.Client) -> None:
    image, query = served.parts.smoke_queries()[0]
    assert fuzz(hostile_requests.prep(prep.base_url.port or 0, image, query.pred), seconds=60) > 100


@pytest.fixture
def prep_process(published: Settings) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``evernear prep``, as a user starts it."""
    port = settings_on_free_ports().inference_port
    environment = os.environ | {"EVERNEAR_WORKDIR": str(published.workdir), "EVERNEAR_PREP__PORT": str(port)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([EVERNEAR, "prep"], env=environment, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert f":{port}/predict" in process.stdout.readline()
            with httpx.Client(transport=httpx.HTTPTransport(retries=8), trust_env=False) as client:
                assert client.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
            yield process, port
        finally:
            process.kill()


def test_process_loads_no_torch_listens_on_loopback_and_exits_cleanly(
    prep_process: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    running, port = prep_process
    running_process = psutil.Process(running.pid)
    libraries = {Path(mapping.path).name for mapping in running_process.memory_maps()}
    assert not [name for name in libraries if "torch" in name or "faiss" in name]
    assert {c.laddr for c in running_process.net_connections("inet") if c.status == psutil.CONN_LISTEN} == {
        ("127.0.0.1", port)
    }
    variables = {"EVERNEAR_PREP__PORT": str(port), "EVERNEAR_PREP__PREDICTOR_HOST": "127.0.0.1"}
    second = command_line.evernear("prep", "--workdir", str(tmp_path), environment=variables)
    assert second.returncode == 4
    assert f"Port {port} on 127.0.0.1 is in use" in second.stderr
    assert second.stdout == "", "the URL is printed once it works"
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) in (0, -signal.SIGTERM)


def test_ctrl_c_exits_with_a_message(prep_process: tuple[subprocess.Popen[str], int]) -> None:
    running, _ = prep_process
    running.send_signal(signal.SIGINT)
    _, received = running.communicate(timeout=60)
    assert (running.returncode, received) == (
        130,
        "evernear: Interrupted. All requests in flight were answered; `evernear prep` starts the server again.\n",
    )


@pytest.mark.slow
def test_memory_stays_below_the_pods_limit(
    prep_process: tuple[subprocess.Popen[str], int], published: Settings
) -> None:
    running, port = prep_process
    limit = published.prep.max_request_size_bytes
    images = [make() for make in hostile.largest_valid_files(published.serving.max_pixels).values()]
    bodies = [body for image in images if len(body := json.dumps(encoded(image)).encode()) <= limit]
    bodies += [json.dumps(encoded(JPEG)).encode().ljust(limit)] * 8
    with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        answers = [*pool.map(lambda body: client.post("/predict", content=body), bodies * 3)]
    assert {answer.status_code for answer in answers} <= {200, 503, 504}
    assert 200 in {answer.status_code for answer in answers}
    status = Path(f"/proc/{running.pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) * 1024 <= prep_memory_size_bytes(published)


def test_does_not_start_without_a_predictor(tmp_path: Path) -> None:
    completed = command_line.evernear("prep", "--workdir", str(tmp_path))
    assert completed.returncode == 4
    assert "No TorchServe runs in" in completed.stderr
