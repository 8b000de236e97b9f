"""Create, read, list, replace, patch and delete objects, and rejected requests."""

from typing import Any

import pytest
from kubernetes.client import ApiException

from tests.loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map, deployment, error_of
from tests.waiting import until


def test_server_fills_in_metadata(kubectl: Kubectl) -> None:
    metadata = kubectl.create(config_map())["metadata"]
    assert metadata["namespace"] == NAMESPACE
    assert {"uid", "resourceVersion", "creationTimestamp", "managedFields"} <= metadata.keys()
    with pytest.raises(ApiException) as exc_info:
        kubectl.create(config_map())
    assert error_of(exc_info.value) == (409, 'configmaps "settings" already exists')


def test_deployment_gets_the_defaults_of_a_real_server(kubectl: Kubectl) -> None:
    created = kubectl.create(deployment())
    container = created["spec"]["template"]["spec"]["containers"][0]
    assert created["metadata"]["generation"] == 1
    assert created["spec"]["progressDeadlineSeconds"] == 600
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]
    assert created["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30


def test_selectors(kubectl: Kubectl) -> None:
    for number in range(5):
        subject = config_map(f"settings-{number}")
        subject["metadata"]["labels"] = {"number": str(number), "parity": "even" if number % 2 == 0 else "odd"}
        kubectl.create(subject)

    def names(**query: Any) -> list[str]:
        items = kubectl.list("ConfigMap", **query)["items"]
        return [item["metadata"]["name"][-1] for item in items if item["metadata"]["name"].startswith("settings")]

    assert names(labelSelector="parity=even") == ["0", "2", "4"]
    assert names(labelSelector="parity!=even,number!=3") == ["1"]
    assert names(fieldSelector="metadata.name=settings-3") == ["3"]
    with pytest.raises(ApiException, match=r"field label not supported: data\.color"):
        names(fieldSelector="data.color=blue")


def test_stale_replace_is_a_conflict(kubectl: Kubectl) -> None:
    read = kubectl.create(config_map(color="blue"))
    kubectl.replace(read | {"data": {"color": "red"}})
    with pytest.raises(ApiException) as exc_info:
        kubectl.replace(read | {"data": {"color": "green"}})
    assert error_of(exc_info.value) == (
        409,
        'Operation cannot be fulfilled on configmaps "settings": the object has been modified; '
        "please apply your changes to the latest version and try again",
    )


def test_replacing_a_lease_requires_its_resource_version(kubectl: Kubectl) -> None:
    spec = {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "deploy"}, "spec": spec}
    kubectl.create(lease)
    with pytest.raises(ApiException, match="must be specified for an update") as exc_info:
        kubectl.replace(lease)
    assert exc_info.value.status == 422
    lease["spec"]["renewTime"] = "2026-01-01T00:00:00Z"  # not a valid MicroTime
    with pytest.raises(ApiException) as exc_info:
        kubectl.create(lease | {"metadata": {"name": "other"}})
    assert exc_info.value.status == 400


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"replicaz": 1}, 400, 'strict decoding error: unknown field "spec.replicaz"'),
        ({"replicas": "two"}, 400, "json: cannot unmarshal string into Go struct field Deployment.spec.replicas"),
        ({"replicas": -1}, 422, "spec.replicas: Invalid value: -1: must be greater than or equal to 0"),
        ({"selector": {"matchLabels": {"app": "x"}}}, 422, "`selector` does not match template `labels`"),
        ({"strategy": {"type": "Rolling"}}, 422, 'Unsupported value: "Rolling": supported values: "Recreate"'),
    ],
)
def test_invalid_deployment_is_rejected(kubectl: Kubectl, change: Any, code: int, message: str) -> None:
    with pytest.raises(ApiException) as exc_info:
        kubectl.create(deployment(**change))
    assert exc_info.value.status == code
    assert message in error_of(exc_info.value)[1]


def test_deleting_a_deployment_deletes_its_pods(kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    until(lambda: len(kubectl.list("Pod")["items"]) == 2)
    assert kubectl.delete("Deployment", "serve", propagationPolicy="Background")["status"] == "Success"
    until(lambda: not kubectl.list("Pod")["items"] and not kubectl.list("ReplicaSet")["items"])
