"""Server-side apply, compared with the Kubernetes documentation and structured-merge-diff."""

import json
from typing import Any

import pytest
from kubernetes.client import ApiException

from tests.loopback.kubernetes.fields import decode, encode, text
from tests.loopback.kubernetes.kubectl import Kubectl, config_map, deployment, error_of, until

APPLY = "application/apply-patch+yaml"


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


def test_identical_apply_writes_nothing(kubectl: Kubectl) -> None:
    first = kubectl.apply(config_map(color="blue"))
    assert kubectl.apply(config_map(color="blue")) == first


def test_conflict_names_the_manager_and_the_field(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(config_map(color="red"), "two")
    status = json.loads(exc_info.value.body)
    assert (status["code"], status["reason"]) == (409, "Conflict")
    assert status["message"] == 'Apply failed with 1 conflict: conflict with "one": .data.color'
    assert status["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.color"}
    ]


def test_conflicts_are_grouped_by_manager(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    kubectl.apply(config_map(shape="round"), "two")
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(config_map(color="red", size="9", shape="flat"), "three")
    assert error_of(exc_info.value)[1] == (
        'Apply failed with 3 conflicts: conflicts with "one":\n- .data.color\n- .data.size\n'
        'conflicts with "two":\n- .data.shape'
    )


def test_conflict_with_an_updater_names_the_api_version(kubectl: Kubectl) -> None:
    kubectl.apply(deployment())
    kubectl.patch(
        {"kind": "Deployment", "metadata": {"name": "serve"}, "spec": {"replicas": 3}},
        "application/strategic-merge-patch+json",
        fieldManager="kubectl-edit",
    )
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(deployment())
    assert error_of(exc_info.value) == (
        409,
        'Apply failed with 1 conflict: conflict with "kubectl-edit" using apps/v1: .spec.replicas',
    )


def test_force_transfers_ownership(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    forced = kubectl.apply(config_map(color="red"), "two", force="true")
    assert forced["data"] == {"color": "red", "size": "8"}
    assert owners(forced) == {"one": {"f:data": {"f:size": {}}}, "two": {"f:data": {"f:color": {}}}}


def test_shared_field_remains_until_its_last_owner_drops_it(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue"), "one")
    shared = kubectl.apply(config_map(color="blue"), "two")
    assert owners(shared) == {name: {"f:data": {"f:color": {}}} for name in ("one", "two")}
    assert kubectl.apply(config_map(), "one")["data"] == {"color": "blue"}
    assert "color" not in (kubectl.apply(config_map(), "two").get("data") or {})


def test_dropped_field_is_removed_and_fields_of_other_managers_remain(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue", size="8"), "one")
    kubectl.apply(config_map(shape="round"), "two")
    assert kubectl.apply(config_map(color="blue"), "one")["data"] == {"color": "blue", "shape": "round"}


def test_replace_transfers_ownership_of_changed_fields(kubectl: Kubectl) -> None:
    live = kubectl.apply(config_map(color="blue", size="8"), "one")
    live["data"]["color"] = "red"
    replaced = kubectl.replace(live, fieldManager="hand")
    assert owners(replaced) == {"one": {"f:data": {"f:size": {}}}, "hand": {"f:data": {"f:color": {}}}}


def test_containers_merge_by_name_and_ports_by_number_and_protocol(kubectl: Kubectl) -> None:
    kubectl.apply(deployment())
    sidecar = deployment()
    sidecar["spec"] = {"template": {"spec": {"containers": [{"name": "proxy", "image": "example.com/proxy:1"}]}}}
    both = kubectl.apply(sidecar, "mesh")
    assert [applied["name"] for applied in both["spec"]["template"]["spec"]["containers"]] == ["serve", "proxy"]
    assert owners(both)["mesh"]["f:spec"]["f:template"]["f:spec"]["f:containers"] == {
        'k:{"name":"proxy"}': {".": {}, "f:image": {}, "f:name": {}}
    }
    ports = owners(both)["me"]["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"serve"}']["f:ports"]
    assert list(ports) == ['k:{"containerPort":8080,"protocol":"TCP"}']
    changed = deployment()
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "example.com/serve:2"
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(changed, "mesh")
    assert error_of(exc_info.value)[1].endswith('.spec.template.spec.containers[name="serve"].image')


def test_dropped_container_is_removed_with_its_defaults(kubectl: Kubectl) -> None:
    two = deployment()
    two["spec"]["template"]["spec"]["containers"].append({"name": "extra", "image": "example.com/extra:1"})
    kubectl.apply(two)
    applied = kubectl.apply(deployment())
    assert [container["name"] for container in applied["spec"]["template"]["spec"]["containers"]] == ["serve"]


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


def test_duplicate_container_is_rejected(kubectl: Kubectl) -> None:
    invalid = deployment()
    invalid["spec"]["template"]["spec"]["containers"] *= 2
    with pytest.raises(ApiException, match=r"duplicate entries for key \[name=") as exc_info:
        kubectl.apply(invalid)
    assert exc_info.value.status == 500


def test_apply_requires_a_field_manager_and_rejects_managed_fields(kubectl: Kubectl) -> None:
    with pytest.raises(ApiException, match="fieldManager: Required value") as exc_info:
        kubectl.patch(config_map(), APPLY)
    assert exc_info.value.status == 422
    with pytest.raises(ApiException, match="managedFields must be nil") as exc_info:
        kubectl.apply(config_map() | {"metadata": {"name": "settings", "managedFields": []}})
    assert exc_info.value.status == 400


def test_dry_run_returns_the_result_and_stores_nothing(kubectl: Kubectl) -> None:
    assert kubectl.apply(config_map(color="blue"), dryRun="All")["data"] == {"color": "blue"}
    with pytest.raises(ApiException) as exc_info:
        kubectl.get("ConfigMap", "settings")
    assert exc_info.value.status == 404


def test_dry_run_reports_conflicts(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(color="blue"), "one")
    with pytest.raises(ApiException) as exc_info:
        kubectl.apply(config_map(color="red"), "two", dryRun="All")
    assert exc_info.value.status == 409


def test_string_data_of_applied_secrets_is_stored_encoded(kubectl: Kubectl) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "abc"}}
    stored = kubectl.apply(secret)
    assert (stored["type"], stored["data"]) == ("Opaque", {"token": "YWJj"})


def test_fields_survive_an_encoding_round_trip() -> None:
    tree = {
        "f:metadata": {"f:finalizers": {".": {}, 'v:"kept"': {}}, "f:labels": {"f:app.kubernetes.io/name": {}}},
        "f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:port": {}}}},
    }
    fields = decode(tree)
    assert encode(fields) == tree
    assert sorted(map(text, fields)) == [
        ".metadata.finalizers",
        '.metadata.finalizers[="kept"]',
        ".metadata.labels.app.kubernetes.io/name",
        '.spec.ports[port=80,protocol="TCP"]',
        '.spec.ports[port=80,protocol="TCP"].port',
    ]
