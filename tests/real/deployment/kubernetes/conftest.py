"""A loopback cluster with the namespace and deployer of `deploy/`, and no rights beyond them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evernear.deployment import kubernetes
from evernear.deployment.kubernetes import rollout, service
from evernear.settings import Settings, parse
from tests.loopback.kubernetes import LoopbackCluster
from tests.real.deployment.kubernetes.deployer import BASE, IMAGE, MakeSettings

FROM_OUTSIDE = """
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: from-outside, namespace: evernear}
rules:
  - {apiGroups: [""], resources: [services/proxy], resourceNames: ["evernear-serving:http"], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: from-outside, namespace: evernear}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: from-outside}
subjects: [{kind: ServiceAccount, name: evernear-deployer}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: store, namespace: evernear}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}
"""


def _manifests() -> Iterator[dict[str, Any]]:
    """The namespace and its deployer, with the namespace that kustomize sets."""
    files = [(BASE / name).read_text() for name in ("namespace.yaml", "deployer.yaml")]
    for manifest in yaml.safe_load_all("\n---\n".join([*files, FROM_OUTSIDE])):
        if manifest["metadata"]["name"] == "default":  # the namespace's default account exists already
            continue
        for subject in manifest.get("subjects", ()):
            subject.setdefault("namespace", "evernear")
        yield manifest


MANIFESTS = [*_manifests()]


@pytest.fixture
def second_s() -> float:
    """Duration of a second of ``progressDeadlineSeconds``; a test may override it."""
    return 1.0


@pytest.fixture
def loopback(tmp_path: Path, second_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackCluster]:
    """The cluster; ``KUBECONFIG`` authenticates as the deployer of `deploy/base`."""
    with LoopbackCluster(tmp_path, second_s=second_s) as cluster:
        for manifest in MANIFESTS:
            cluster.create(manifest, "evernear")
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig("evernear/evernear-deployer", namespace="evernear")))
        monkeypatch.setattr(rollout, "DIAGNOSIS_INTERVAL_S", 1)
        yield cluster


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "FAILURE_GRACE_S", 1)
    monkeypatch.setattr(service, "CONVERGENCE_TIMEOUT_S", 1)
    monkeypatch.setattr(kubernetes, "LEASE_S", 2)


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Make settings whose store is a directory on the claim ``store``."""

    def make(**kubernetes: Any) -> Settings:
        chosen = {"image": IMAGE, "store_claim": "store", "replicas_min": 1} | kubernetes
        tree = {"store": (tmp_path / "store").as_uri(), "target": "kubernetes", "kubernetes": chosen}
        return parse(Settings, tree)

    return make
