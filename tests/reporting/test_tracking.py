"""Runs in MLflow and releases in Kubeflow's model registry; neither can fail a run.

The model registry is a server on loopback that checks requests against the models of Kubeflow's client, and also the
real one if ``TEST_MODEL_REGISTRY`` has the address of one. MLflow is the real server.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from mr_openapi.models import ModelArtifactCreate, ModelVersionCreate, ModelVersionUpdate, RegisteredModelCreate
from ports import free_ports, wait_for_port
from releases import MakeRelease

from evernear import steps
from evernear.release.registry import Registry
from evernear.reporting import model_registry
from evernear.reporting.model_registry import REGISTRY_API, follow_champion
from evernear.reporting.notify import finalize
from evernear.reporting.tracking import track
from evernear.run_record import RunRecord, StepRecord
from evernear.settings import RunSettings
from evernear.store import open_store

ROOT = Path(__file__).resolve().parents[2]
MLFLOW = ROOT / ".venv/mlflow/bin/mlflow"
STARTED = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
EPOCHS = [
    {"epoch": n, "train_loss": 1 / n, "gallery_loss": 2 / n, "gallery_accuracy": 0.9, "learning_rate": 0.1}
    for n in (1, 2)
]


@pytest.fixture
def record(tmp_path: Path, make_release: MakeRelease) -> RunRecord:
    """The record of a run whose release is held."""
    store = open_store((tmp_path / "store").as_uri())
    release = make_release(promote=False)
    Registry(store).publish(release.archive)
    record = RunRecord(store, "run-1")
    record.save_step(StepRecord(step="ingest", state="finished", started=STARTED, ended=STARTED))
    record.save(
        settings=RunSettings(store=store.uri).model_dump(mode="json"),
        training={"epochs": EPOCHS, "best_epoch": 2},
        metrics={"accuracy": 0.875},
        archived={"version": release.version},
        verdict=json.loads(release.verdict.read_text()),
    )
    finalize(record, "continuous-training", "SUCCEEDED", "")
    return record


class ModelRegistry(BaseHTTPRequestHandler):
    """The requests that create a release in Kubeflow's model registry, checked against its client's models."""

    models = {"registered_model": RegisteredModelCreate, "model_version": ModelVersionCreate}
    created: list[tuple[str, dict[str, Any]]]
    tokens: list[str | None]
    updated: list[str]
    """The names of changed versions."""

    def do_GET(self) -> None:
        self.tokens.append(self.headers["Authorization"])
        url = urlsplit(self.path.removeprefix(REGISTRY_API))
        if url.path.endswith("/versions"):
            query = parse_qs(url.query)
            first = int(query.get("nextPageToken", ["0"])[0])
            return self.page(url.path.split("/")[-2], first, first + int(query["pageSize"][0]))
        wanted = {key: values[0] for key, values in parse_qs(url.query).items()}
        for number, (kind, body) in enumerate(self.created, 1):
            parent = wanted.get("parentResourceId", body.get("parent"))
            if (kind, body["name"], body.get("parent")) == (url.path.strip("/"), wanted["name"], parent):
                return self.answer(200, body | {"id": str(number)})
        return self.answer(404, {"code": "404", "message": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path.removeprefix(REGISTRY_API).strip("/").split("/"):
            case ["model_versions", version, "artifacts"]:
                ModelArtifactCreate.from_dict(body)
                entry = "model_artifact", body | {"parent": version}
            case [collection]:
                kind = collection.removesuffix("s")
                self.models[kind].from_dict(body)
                parent = {"parent": body["registeredModelId"]} if "registeredModelId" in body else {}
                entry = kind, body | parent
            case _:
                return self.answer(404, {})
        self.created.append(entry)
        return self.answer(201, entry[1] | {"id": str(len(self.created))})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        collection, number = self.path.removeprefix(REGISTRY_API).strip("/").split("/")
        assert collection == "model_versions"
        ModelVersionUpdate.from_dict(body)
        kind, entry = self.created[int(number) - 1]
        assert kind == "model_version"
        entry.update(body)
        self.updated.append(entry["name"])
        return self.answer(200, entry | {"id": number})

    def page(self, model: str, first: int, end: int) -> None:
        """A page of the versions of a model; the token is the index of the next one."""
        entries = [body | {"id": str(n)} for n, (kind, body) in enumerate(self.created, 1) if kind == "model_version"]
        entries = [body for body in entries if body["registeredModelId"] == model]
        token = str(end) if end < len(entries) else ""
        self.answer(200, {"items": entries[first:end], "pageSize": end - first, "nextPageToken": token})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ModelRegistry]]:
    handler = type("Handler", (ModelRegistry,), {"created": [], "tokens": [], "updated": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("MODEL_REGISTRY_BASE_URL", f"http://127.0.0.1:{server.server_port}/")
        yield handler
        server.shutdown()
        thread.join()


def test_release_is_entered_once_into_the_model_registry(
    record: RunRecord, registry: type[ModelRegistry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    assert [track(record, "<p>page</p>") for _ in range(2)] == [[], []]
    assert set(registry.tokens) == {"Bearer secret"}
    (_, model), (_, version), (_, artifact) = registry.created
    release = Registry(record.store).get(record.load("archived")["version"])
    assert model["name"] == release.manifest.dataset_name
    assert version["name"] == release.manifest.version
    assert version["customProperties"]["state"]["string_value"] == "held"
    assert version["customProperties"]["archive_sha256"]["string_value"] == release.archive_sha256
    assert version["customProperties"]["accuracy"]["double_value"] == release.manifest.metrics["accuracy"]
    assert artifact["uri"] == f"{record.store.uri}/{release.archive_key}"
    assert artifact["customProperties"]["sha256"]["string_value"] == release.archive_sha256


def marked(registry: type[ModelRegistry]) -> set[str]:
    """The names of the versions that are marked as promoted."""
    versions = [body for kind, body in registry.created if kind == "model_version"]
    return {body["name"] for body in versions if body["customProperties"].get("promoted", {}).get("bool_value")}


def test_entry_of_the_champion_is_marked_after_promotion_and_rollback(
    record: RunRecord, make_release: MakeRelease, registry: type[ModelRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_registry, "PAGE_SIZE", 1)
    releases = Registry(record.store)
    first = record.load("archived")["version"]
    second = make_release()
    releases.publish(second.archive)
    assert follow_champion(record.store) == [], "neither a champion nor an entry"
    track(record, "")
    record.save(archived={"version": second.version})
    finalize(record, "continuous-training", "SUCCEEDED", "")
    track(record, "")
    assert marked(registry) == set()

    releases.set_champion(first, None)
    assert follow_champion(record.store) == []
    assert marked(registry) == {first}
    releases.set_champion(second.version, releases.champion())
    assert follow_champion(record.store) == []
    assert marked(registry) == {second.version}
    (entry,) = [body for _, body in registry.created if body["name"] == second.version]
    assert entry["customProperties"]["archive_sha256"]["string_value"], "other properties stay"

    champion = releases.champion()
    assert champion
    releases.roll_back(champion)
    rollback = RunRecord(record.store, "run-2")
    rollback.save_step(StepRecord(step="rollback", state="finished", started=STARTED, ended=STARTED))
    rollback.save(rollback={"version": first, "url": None, "previous": second.version, "why": "worse"})
    finalize(rollback, "rollback", "SUCCEEDED", "")
    assert track(rollback, "") == []
    assert marked(registry) == {first}
    changes = len(registry.updated)
    assert follow_champion(record.store) == []
    assert len(registry.updated) == changes, "values that are already correct are not written"


@pytest.mark.skipif("TEST_MODEL_REGISTRY" not in os.environ, reason="TEST_MODEL_REGISTRY has no address")
def test_real_model_registry_has_the_release(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    address = os.environ["TEST_MODEL_REGISTRY"]
    monkeypatch.setenv("MODEL_REGISTRY_BASE_URL", address)
    assert [track(record, "<p>page</p>") for _ in range(2)] == [[], []]
    release = Registry(record.store).get(record.load("archived")["version"])
    with httpx.Client(base_url=address + REGISTRY_API) as client:
        model = client.get("/registered_model", params={"name": release.manifest.dataset_name}).json()
        query = {"name": release.manifest.version, "parentResourceId": model["id"]}
        version = client.get("/model_version", params=query).json()
        (artifact,) = client.get(f"/model_versions/{version['id']}/artifacts").json()["items"]
    assert artifact["uri"].endswith(release.archive_key)


def test_unreachable_systems_are_warnings_of_a_run_that_succeeds(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MODEL_REGISTRY_BASE_URL", f"http://user:secret@127.0.0.1:{port}")
    files = str(tmp_path / "outcome.json"), str(tmp_path / "page.html")
    steps.notify("run-1", record.store.uri, "continuous-training", "SUCCEEDED", "", *files)
    (message,) = [step.message for step in record.steps() if step.step == "notify"]
    assert message.startswith("held:")
    assert "; WARNING: MLflow of MLFLOW_TRACKING_URI rejected the run: [Errno 111] Connection refused." in message
    assert "; WARNING: The model registry of MODEL_REGISTRY_BASE_URL rejected the run: [Errno 111]" in message
    assert "secret" not in message


def test_missing_client_is_a_warning(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert track(record, "") == ["MLFLOW_TRACKING_URI is set, but the client is missing: install evernear[mlflow]."]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # of MLflow's
def test_artifacts_of_a_run_in_a_sqlite_database_are_beside_it(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow would put them into the current directory, which is deleted after a step."""
    pytest.importorskip("sqlalchemy")
    step = tmp_path / "step"
    step.mkdir()
    monkeypatch.chdir(step)
    (tmp_path / "tracking").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking/mlflow.db")
    assert track(record, "<p>page</p>") == []
    (page,) = (tmp_path / "tracking").rglob("run.html")
    assert page.read_text() == "<p>page</p>"
    assert list(step.iterdir()) == []


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of MLflow's tracking server."""
    (port,) = free_ports(1)
    command = [MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", tmp_path / "files"]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            wait_for_port(port, process, timeout_s=240)
            address = f"http://127.0.0.1:{port}"
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            yield address
        finally:
            os.killpg(process.pid, 15)


@pytest.mark.slow
@pytest.mark.skipif(not MLFLOW.exists(), reason="make .venv/mlflow/.installed installs the server")
def test_run_is_logged_once_to_mlflow(record: RunRecord, mlflow: str) -> None:
    assert [track(record, "<p>page</p>") for _ in range(2)] == [[], []]
    with httpx.Client(base_url=f"{mlflow}/api/2.0/mlflow", timeout=60) as client:
        experiment = client.get("/experiments/get-by-name", params={"experiment_name": "evernear"}).json()
        identifier = experiment["experiment"]["experiment_id"]
        (run,) = client.post("/runs/search", json={"experiment_ids": [identifier]}).json()["runs"]
        query = {"run_id": run["info"]["run_id"], "metric_key": "train_loss"}
        losses = client.get("/metrics/get-history", params=query).json()["metrics"]
        page = httpx.get(f"{mlflow}/get-artifact", params={"run_id": run["info"]["run_id"], "path": "run.html"})
    parameters = {entry["key"]: entry["value"] for entry in run["data"]["params"]}
    metrics = {entry["key"]: entry["value"] for entry in run["data"]["metrics"]}
    tags = {entry["key"]: entry["value"] for entry in run["data"]["tags"]}
    assert (run["info"]["run_name"], run["info"]["status"]) == ("run-1", "FINISHED")
    assert run["info"]["start_time"] == STARTED.timestamp() * 1000
    assert parameters["train.batch_size"] == "256"
    assert metrics["accuracy"] == 0.875
    assert {(point["step"], point["value"]) for point in losses} == {(1, 1.0), (2, 0.5)}
    assert (tags["evernear.state"], tags["evernear.release"]) == ("held", record.load("archived")["version"])
    assert page.text == "<p>page</p>"
