"""Server-side apply, compared with the Kubernetes documentation and structured-merge-diff."""

from typing import Any

import pytest
from kubernetes.client import ApiException

from tests.loopback.kubernetes.kubectl import Kubectl, config_map, deployment, error_of
from tests.waiting import until


def owners(subject: dict[str, Any]) -> dict[str, Any]:
    return {entry["manager"]: entry["fieldsV1"] for entry in subject["metadata"]["managedFields"]}


def test_applying_a_new_object_creates_it_and_records_ownership(kubectl: Kubectl) -> None:
    applied = kubectl.apply(config_map(color="blue") | {"metadata": {"name": "settings", "labels": {"a": "b"}}})
    (entry,) = applied["metadata"]["managedFields"]
    assert {name: entry[name] for name in ("manager", "operation", "apiVersion", "fieldsType")} == {
        "manager": "me",
        "operation": "Apply",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
    }
    assert entry["fieldsV1"] == {"f:data": {"f:color": {}}, "f:metadata": {"f:labels": {"f:a": {}}}}


def test_conflicts_are_grouped_by_manager(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    kubectl.apply(config_map(shape="round"), "two")
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(config_map(color="red", size="9", shape="flat"), "three")
    assert error_of(exc_info.value)[1] == (
        'Apply failed with 3 conflicts: conflicts with "one":\n- .data.color\n- .data.size\n'
        'conflicts with "two":\n- .data.shape'
    )


def test_force_transfers_ownership(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    forced = kubectl.apply(config_map(color="red"), "two", force="true")
    assert forced["data"] == {"color": "red", "size": "8"}
    assert owners(forced) == {"one": {"f:data": {"f:size": {}}}, "two": {"f:data": {"f:color": {}}}}


def test_dropped_field_is_removed_and_fields_of_other_managers_remain(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    kubectl.apply(config_map(shape="round"), "two")
    assert kubectl.apply(config_map(color="blue"), "one")["data"] == {"color": "blue", "shape": "round"}


def test_apply_without_replicas_preserves_the_autoscaler_value(kubectl: Kubectl) -> None:
    without = deployment()
    del without["spec"]["replicas"]
    kubectl.apply(without)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "serve"}
    spec = {"scaleTargetRef": target, "minReplicas": 4, "maxReplicas": 5}
    kubectl.create({"kind": "HorizontalPodAutoscaler", "metadata": {"name": "serve"}, "spec": spec})
    until(lambda: kubectl.get("Deployment", "serve")["spec"]["replicas"] == 4)
    without["spec"]["template"]["metadata"]["labels"]["version"] = "2"
    assert kubectl.apply(without)["spec"]["replicas"] == 4
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(deployment("2"))
    message = 'conflict with "kube-controller-manager" with subresource "scale" using apps/v1: .spec.replicas'
    assert error_of(exc_info.value)[1].endswith(message)


def test_misspelled_field_is_rejected_with_the_message_of_a_real_server(kubectl: Kubectl) -> None:
    invalid = deployment()
    invalid["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(invalid)
    assert error_of(exc_info.value) == (
        500,
        "failed to create typed patch object (recognizers/serve; apps/v1, Kind=Deployment): "
        '.spec.template.spec.containers[name="serve"].imagePulPolicy: field not declared in schema',
    )


def test_dry_run_returns_the_result_and_stores_nothing(kubectl: Kubectl) -> None:
    assert kubectl.apply(config_map(color="blue"), dryRun="All")["data"] == {"color": "blue"}
    with pytest.raises(ApiException) as exc_info:
        kubectl.get("ConfigMap", "settings")
    assert exc_info.value.status == 404
