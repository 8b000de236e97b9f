"""Releases in Kubeflow's model registry, which cannot fail a run.

It is a server on loopback that checks requests against the models of Kubeflow's client, and also
the real one if ``TEST_MODEL_REGISTRY`` has the address of one.
"""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from mr_openapi.models import ModelArtifactCreate, ModelVersionCreate, ModelVersionUpdate, RegisteredModelCreate

from evernear.common.run_record import RunRecord, StepRecord
from evernear.integrations.model_registry import entries
from evernear.integrations.model_registry.entries import REGISTRY_API, follow_champion, register
from evernear.release.registry import Registry
from evernear.reporting.notify import finalize
from tests.ended_run import STARTED
from tests.releases import MakeRelease


class ModelRegistry(BaseHTTPRequestHandler):
    """The requests that create a release in Kubeflow's model registry, checked against its client's
    models."""

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
def model_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ModelRegistry]]:
    handler = type("Handler", (ModelRegistry,), {"created": [], "tokens": [], "updated": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("MODEL_REGISTRY_BASE_URL", f"http://127.0.0.1:{server.server_port}/")
        yield handler
        server.shutdown()
        thread.join()


def test_release_is_entered_once_into_the_model_registry(
    ended_run: RunRecord, model_registry: type[ModelRegistry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    assert [register(ended_run) for _ in range(2)] == [[], []]
    assert set(model_registry.tokens) == {"Bearer secret"}
    (_, model), (_, version), (_, artifact) = model_registry.created
    release = Registry(ended_run.store).get(ended_run.load("archived")["version"])
    assert model["name"] == release.manifest.dataset_name
    assert version["name"] == release.manifest.version
    assert version["customProperties"]["state"]["string_value"] == "held"
    assert version["customProperties"]["archive_sha256"]["string_value"] == release.archive_sha256
    assert version["customProperties"]["label_right"]["double_value"] == release.manifest.metrics["label_right"]
    assert artifact["uri"] == f"{ended_run.store.uri}/{release.archive_key}"
    assert artifact["customProperties"]["sha256"]["string_value"] == release.archive_sha256


def marked(registry: type[ModelRegistry]) -> set[str]:
    """The names of the versions that are marked as promoted."""
    versions = [body for kind, body in registry.created if kind == "model_version"]
    return {body["name"] for body in versions if body["customProperties"].get("promoted", {}).get("bool_value")}


def test_entry_of_the_champion_is_marked_after_promotion_and_rollback(
    ended_run: RunRecord,
    make_release: MakeRelease,
    model_registry: type[ModelRegistry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "PAGE_SIZE", 1)
    releases = Registry(ended_run.store)
    first = ended_run.load("archived")["version"]
    second = make_release()
    releases.publish(second.archive)
    assert follow_champion(releases.store) == [], "neither a champion nor an entry"
    register(ended_run)
    ended_run.save(archived={"version": second.version})
    finalize(ended_run, "continuous-training", "SUCCEEDED", "")
    register(ended_run)
    assert marked(model_registry) == set()

    releases.set_champion(first, None)
    assert follow_champion(releases.store) == []
    assert marked(model_registry) == {first}
    releases.set_champion(second.version, releases.champion())
    assert follow_champion(releases.store) == []
    assert marked(model_registry) == {second.version}
    (entry,) = [body for _, body in model_registry.created if body["name"] == second.version]
    assert entry["customProperties"]["archive_sha256"]["string_value"], "other properties stay"

    champion = releases.champion()
    assert champion
    releases.roll_back(champion)
    rollback = RunRecord(ended_run.store, "run-2")
    rollback.save_step(StepRecord(step="rollback", state="finished", started=STARTED, ended=STARTED))
    rollback.save(rollback={"version": first, "url": None, "previous": second.version, "why": "worse"})
    finalize(rollback, "rollback", "SUCCEEDED", "")
    assert register(rollback) == []
    assert marked(model_registry) == {first}
    changes = len(model_registry.updated)
    assert follow_champion(releases.store) == []
    assert len(model_registry.updated) == changes, "values that are already correct are not written"


@pytest.mark.skipif("TEST_MODEL_REGISTRY" not in os.environ, reason="TEST_MODEL_REGISTRY has no address")
def test_real_model_registry_has_the_release(ended_run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    address = os.environ["TEST_MODEL_REGISTRY"]
    monkeypatch.setenv("MODEL_REGISTRY_BASE_URL", address)
    assert [register(ended_run) for _ in range(2)] == [[], []]
    release = Registry(ended_run.store).get(ended_run.load("archived")["version"])
    with httpx.Client(base_url=address + REGISTRY_API) as client:
        model = client.get("/registered_model", params={"name": release.manifest.dataset_name}).json()
        query = {"name": release.manifest.version, "parentResourceId": model["id"]}
        version = client.get("/model_version", params=query).json()
        (artifact,) = client.get(f"/model_versions/{version['id']}/artifacts").json()["items"]
    assert artifact["uri"].endswith(release.archive_key)
