"""The fake cluster with a component of `deploy/` for several machines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evernear.kubeflow import connection, indexed_job, train_job
from evernear.settings.sources import IMAGE_VARIABLE
from tests import ROOT
from tests.loopback.kubernetes import LoopbackCluster

IMAGE = "registry.example/evernear-train@sha256:" + "a" * 64
Objects = dict[str, dict[str, Any]]


@pytest.fixture
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of Kubeflow Pipelines repeat a failed call at once."""
    monkeypatch.setattr(connection, "BACKOFF_S", 0.01)


@pytest.fixture
def component(request: pytest.FixtureRequest) -> Objects:
    """The objects of the component that the test file names as COMPONENT, by kind."""
    files = (ROOT / "deploy" / "components" / request.module.COMPONENT).glob("*.yaml")
    items = yaml.safe_load_all("\n---\n".join(file.read_text() for file in files if file.stem != "kustomization"))
    return {item["kind"]: item for item in items}


@pytest.fixture
def pipeline_cluster(tmp_path: Path, component: Objects, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackCluster]:
    """A cluster with the component; ``KUBECONFIG`` authenticates as the account of the pipeline's
    steps."""
    with LoopbackCluster(tmp_path) as cluster:
        cluster.create({"kind": "Namespace", "metadata": {"name": "kubeflow"}})
        for manifest in component.values():
            cluster.create(manifest, "kubeflow")
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig("kubeflow/pipeline-runner", namespace="kubeflow")))
        for module in (indexed_job, train_job):
            monkeypatch.setattr(module, "POLL_S", 0.1)
        cluster.calls.clear()
        yield cluster


@pytest.fixture
def step_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of the pipeline of which this process is a step."""
    monkeypatch.setenv(IMAGE_VARIABLE, IMAGE)
