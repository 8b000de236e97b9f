"""Fixtures for the tests of the loopback API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import config

from tests.loopback.kubernetes import LoopbackCluster
from tests.loopback.kubernetes.kubectl import NAMESPACE, Kubectl
from tests.waiting import until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LoopbackCluster]:
    """An empty cluster on loopback."""
    with LoopbackCluster(tmp_path) as running:
        yield running


@pytest.fixture
def kubectl(cluster: LoopbackCluster) -> Iterator[Kubectl]:
    """A client with administrator rights, in a new namespace."""
    with config.new_client_from_config(str(cluster.kubeconfig())) as client:
        admin = Kubectl(client)
        admin.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        until(lambda: len(admin.list("ConfigMap")["items"]) == 1)  # kube-root-ca.crt, in every namespace
        yield admin
