"""Releases in Kubeflow's model registry: an entry for each, and a mark on the champion's.

The store is authoritative, so a failure is only a warning, which the next call makes good.
"""

import os
from collections import deque
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from evernear.common.environment import secret_file
from evernear.common.plugins import rejection
from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.errors import EvernearError, StoreError
from evernear.release.records import Record
from evernear.release.registry import Registry
from evernear.reporting.run_report import RunReport

ADDRESS = "MODEL_REGISTRY_BASE_URL"
REGISTRY_API = "/api/model_registry/v1alpha3"
SYSTEM = "The model registry"
TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105 - the variable of Kubeflow's client that names the file
TIMEOUT_S = 10
PAGE_SIZE = 100
PROMOTED = "promoted"
"""The entry property that states whether the release is the champion."""
_ERRORS = (EvernearError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, LookupError)


def register(record: RunRecord) -> list[str]:
    """Register the release that a run created, and mark the champion. A failure is a warning. If
    the deployment failed, the release was not published and gets no entry. A run without a release
    may have been a rollback or promotion, so the champion is always marked."""
    if not os.environ.get(ADDRESS):
        return []
    report = RunReport.load(record)
    if version := report.outcome.candidate:
        try:
            _register(record.store, version, report.outcome.summary(), report.facts())
        except _ERRORS as error:
            return [rejection(SYSTEM, ADDRESS, error, "run")]
    return follow_champion(record.store)


def follow_champion(store: Store) -> list[str]:
    if not os.environ.get(ADDRESS):
        return []
    try:
        _mark_champion(Registry(store))
    except _ERRORS as error:
        return [rejection(SYSTEM, ADDRESS, error, "champion")]
    return []


def _register(store: Store, version: str, description: str, facts: dict[str, str]) -> None:
    try:
        release = Registry(store).get(version)
    except StoreError:  # the deployment failed before the release was published
        return
    with _model_registry() as client:
        manifest = release.manifest
        model = _find_or_create(client, "registered_model", {"name": manifest.dataset_name})
        facts = facts | {"labels": str(len(manifest.labels))}
        entry = {"name": manifest.version, "registeredModelId": model["id"], "author": "evernear"}
        entry |= {"description": description, "customProperties": _properties(facts, manifest.metrics)}
        made = _find_or_create(client, "model_version", entry, parentResourceId=model["id"])
        _find_or_create(client, "model_artifact", _artifact(store, release), parentResourceId=made["id"])


def _model_registry() -> httpx.Client:
    headers = {}
    if path := os.environ.get(TOKEN_FILE):
        headers["Authorization"] = f"Bearer {secret_file(TOKEN_FILE, Path(path))}"
    base = os.environ[ADDRESS].rstrip("/") + REGISTRY_API
    return httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S)


def _mark_champion(registry: Registry) -> None:
    """Set the `PROMOTED` property of the champion's entry, and clear it on others. Only entries for
    the datasets of the champion and its predecessor are updated. They are compared with the
    champion, not with the last promotion, so that a later call makes up for a missed one."""
    promotions = deque(registry.history(), maxlen=2)
    releases = [registry.get(promotion.version, include_pruned=True) for promotion in promotions]
    with _model_registry() as client:
        for name in {release.manifest.dataset_name for release in releases}:
            for version in _versions(client, name):
                properties = version.get("customProperties", {})
                promoted = version["name"] == promotions[-1].version
                if properties.get(PROMOTED, {}).get("bool_value", False) == promoted:
                    continue
                value = {"metadataType": "MetadataBoolValue", "bool_value": promoted}
                update = {"customProperties": {**properties, PROMOTED: value}}
                client.patch(f"/model_versions/{quote(version['id'])}", json=update).raise_for_status()


def _versions(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    response = client.get("/registered_model", params={"name": name})
    if response.status_code == HTTPStatus.NOT_FOUND.value:
        return []
    path = f"/registered_models/{quote(response.raise_for_status().json()['id'])}/versions"
    versions: list[dict[str, Any]] = []
    token = None
    while token != "":
        query = {"pageSize": PAGE_SIZE} | ({"nextPageToken": token} if token else {})
        page = client.get(path, params=query).raise_for_status().json()
        versions += page["items"]
        token = page["nextPageToken"]
    return versions


def _artifact(store: Store, release: Record) -> dict[str, Any]:
    return {
        "name": f"{release.manifest.version}.mar",
        "artifactType": "model-artifact",
        "uri": f"{store.uri}/{release.archive_key}",
        "modelFormatName": "torchserve-mar",
        "modelFormatVersion": str(release.manifest.format),
        "customProperties": _properties({"sha256": release.archive_sha256}, {}),
    }


def _properties(texts: dict[str, str], numbers: dict[str, float]) -> dict[str, dict[str, Any]]:
    """As custom properties of the model registry."""
    properties: dict[str, dict[str, Any]] = {
        key: {"metadataType": "MetadataStringValue", "string_value": value} for key, value in texts.items()
    }
    return properties | {
        key: {"metadataType": "MetadataDoubleValue", "double_value": value} for key, value in numbers.items()
    }


def _find_or_create(client: httpx.Client, kind: str, body: dict[str, Any], **parent: str) -> dict[str, Any]:
    """Find or create the resource below ``parent``, so that a retried step changes nothing."""
    response = client.get(f"/{kind}", params={"name": body["name"], **parent})
    if response.status_code != HTTPStatus.NOT_FOUND.value:
        return response.raise_for_status().json()
    collection = f"/{kind}s"
    if kind == "model_artifact":
        collection = f"/model_versions/{quote(parent['parentResourceId'])}/artifacts"
    return client.post(collection, json=body).raise_for_status().json()
