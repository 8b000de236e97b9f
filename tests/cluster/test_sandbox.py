"""The sandbox's namespace and object store on loopback: restricted, complete, and deleted at
exit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.client import ApiClient, AppsV1Api, CoreV1Api

from tests.cluster.sandbox import administrator, install_store, temporary_namespace
from tests.loopback.kubernetes import LoopbackCluster


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[ApiClient]:
    with LoopbackCluster(tmp_path) as running, administrator(running.kubeconfig()) as client:
        yield client


def names(admin: ApiClient) -> list[str]:
    return [item.metadata.name for item in CoreV1Api(admin).list_namespace().items]


def test_namespace_is_restricted_and_deleted_after_a_failure(admin: ApiClient) -> None:
    before = names(admin)

    def fail() -> None:
        with temporary_namespace(admin) as name:
            labels = CoreV1Api(admin).read_namespace(name).metadata.labels
            assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
            assert name in names(admin)
            raise RuntimeError("a scenario fails")

    with pytest.raises(RuntimeError):
        fail()
    assert names(admin) == before


def test_object_store_is_admitted_and_has_a_node_port(admin: ApiClient) -> None:
    with temporary_namespace(admin) as name:
        environment = install_store(admin, name)
        assert environment["AWS_ENDPOINT_URL"].startswith("http://192.0.2.10:3")
        store = AppsV1Api(admin).read_namespaced_deployment("evernear-seaweedfs", name)
        assert "@sha256:" in store.spec.template.spec.containers[0].image
