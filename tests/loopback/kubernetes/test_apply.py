"""Server-side apply, against what the Kubernetes documentation and structured-merge-diff say of it."""

import json
from typing import Any

import pytest
from kubernetes.client import ApiException

from loopback.kubernetes.fields import decode, encode, text
from loopback.kubernetes.kubectl import Kubectl, config_map, deployment, refused

APPLY = "application/apply-patch+yaml"


def owners(subject: dict[str, Any]) -> dict[str, Any]:
    return {entry["manager"]: entry["fieldsV1"] for entry in subject["metadata"]["managedFields"]}


def test_an_object_that_is_not_there_is_created_with_its_fields_owned(kubectl: Kubectl) -> None:
    applied = kubectl.apply(config_map(colour="blue") | {"metadata": {"name": "settings", "labels": {"a": "b"}}})
    (entry,) = applied["metadata"]["managedFields"]
    assert {name: entry[name] for name in ("manager", "operation", "apiVersion", "fieldsType")} == {
        "manager": "me",
        "operation": "Apply",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
    }
    assert entry["fieldsV1"] == {"f:data": {"f:colour": {}}, "f:metadata": {"f:labels": {"f:a": {}}}}


def test_the_same_again_writes_nothing(kubectl: Kubectl) -> None:
    first = kubectl.apply(config_map(colour="blue"))
    assert kubectl.apply(config_map(colour="blue")) == first


def test_a_field_of_another_manager_is_a_conflict_that_names_both(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(colour="blue", size="8"), "one")
    with pytest.raises(ApiException) as caught:
        kubectl.apply(config_map(colour="red"), "two")
    status = json.loads(caught.value.body)
    assert (status["code"], status["reason"]) == (409, "Conflict")
    assert status["message"] == 'Apply failed with 1 conflict: conflict with "one": .data.colour'
    assert status["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.colour"}
    ]


def test_conflicts_are_listed_by_manager(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(colour="blue", size="8"), "one")
    kubectl.apply(config_map(shape="round"), "two")
    with pytest.raises(ApiException) as caught:
        kubectl.apply(config_map(colour="red", size="9", shape="flat"), "three")
    assert refused(caught.value)[1] == (
        'Apply failed with 3 conflicts: conflicts with "one":\n- .data.colour\n- .data.size\n'
        'conflicts with "two":\n- .data.shape'
    )


def test_a_field_that_was_updated_names_its_version(kubectl: Kubectl) -> None:
    kubectl.apply(deployment())
    kubectl.patch(
        {"kind": "Deployment", "metadata": {"name": "serve"}, "spec": {"replicas": 3}},
        "application/merge-patch+json",
        fieldManager="kubectl-edit",
    )
    with pytest.raises(ApiException) as caught:
        kubectl.apply(deployment())
    assert refused(caught.value) == (
        409,
        'Apply failed with 1 conflict: conflict with "kubectl-edit" using apps/v1: .spec.replicas',
    )


def test_force_takes_the_field_over(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(colour="blue", size="8"), "one")
    taken = kubectl.apply(config_map(colour="red"), "two", force="true")
    assert taken["data"] == {"colour": "red", "size": "8"}
    assert owners(taken) == {"one": {"f:data": {"f:size": {}}}, "two": {"f:data": {"f:colour": {}}}}


def test_the_same_value_is_shared_and_stays_until_nobody_applies_it(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(colour="blue"), "one")
    shared = kubectl.apply(config_map(colour="blue"), "two")
    assert owners(shared) == {name: {"f:data": {"f:colour": {}}} for name in ("one", "two")}
    assert kubectl.apply(config_map(), "one")["data"] == {"colour": "blue"}
    assert "colour" not in (kubectl.apply(config_map(), "two").get("data") or {})


def test_a_field_no_longer_applied_is_removed_and_one_of_others_stays(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(colour="blue", size="8"), "one")
    kubectl.apply(config_map(shape="round"), "two")
    assert kubectl.apply(config_map(colour="blue"), "one")["data"] == {"colour": "blue", "shape": "round"}


def test_a_replaced_field_is_the_replacers(kubectl: Kubectl) -> None:
    live = kubectl.apply(config_map(colour="blue", size="8"), "one")
    live["data"]["colour"] = "red"
    replaced = kubectl.replace(live, fieldManager="hand")
    assert owners(replaced) == {"one": {"f:data": {"f:size": {}}}, "hand": {"f:data": {"f:colour": {}}}}


def test_containers_merge_by_name_and_ports_by_number_and_protocol(kubectl: Kubectl) -> None:
    kubectl.apply(deployment())
    sidecar = deployment()
    sidecar["spec"] = {"template": {"spec": {"containers": [{"name": "proxy", "image": "example.com/proxy:1"}]}}}
    both = kubectl.apply(sidecar, "mesh")
    assert [one["name"] for one in both["spec"]["template"]["spec"]["containers"]] == ["serve", "proxy"]
    assert owners(both)["mesh"]["f:spec"]["f:template"]["f:spec"]["f:containers"] == {
        'k:{"name":"proxy"}': {".": {}, "f:image": {}, "f:name": {}}
    }
    ports = owners(both)["me"]["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"serve"}']["f:ports"]
    assert list(ports) == ['k:{"containerPort":8080,"protocol":"TCP"}']
    changed = deployment()
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "example.com/serve:2"
    with pytest.raises(ApiException) as caught:
        kubectl.apply(changed, "mesh")
    assert refused(caught.value)[1].endswith('.spec.template.spec.containers[name="serve"].image')


def test_a_container_no_longer_applied_goes_with_its_defaults(kubectl: Kubectl) -> None:
    two = deployment()
    two["spec"]["template"]["spec"]["containers"].append({"name": "extra", "image": "example.com/extra:1"})
    kubectl.apply(two)
    one = kubectl.apply(deployment())
    assert [container["name"] for container in one["spec"]["template"]["spec"]["containers"]] == ["serve"]


def test_without_replicas_the_autoscalers_number_stays(kubectl: Kubectl) -> None:
    without = deployment()
    del without["spec"]["replicas"]
    kubectl.apply(without)
    kubectl.call(
        "PATCH",
        "/apis/apps/v1/namespaces/recognisers/deployments/serve/scale",
        {"spec": {"replicas": 4}},
        "application/merge-patch+json",
        fieldManager="kube-controller-manager",
    )
    without["spec"]["template"]["metadata"]["labels"]["version"] = "2"
    assert kubectl.apply(without)["spec"]["replicas"] == 4
    with pytest.raises(ApiException) as caught:
        kubectl.apply(deployment("2"))
    message = 'conflict with "kube-controller-manager" with subresource "scale" using apps/v1: .spec.replicas'
    assert refused(caught.value)[1].endswith(message)


def test_a_misspelt_field_is_refused_as_a_real_server_words_it(kubectl: Kubectl) -> None:
    wrong = deployment()
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(ApiException) as caught:
        kubectl.apply(wrong)
    assert refused(caught.value) == (
        500,
        "failed to create typed patch object (recognisers/serve; apps/v1, Kind=Deployment): "
        '.spec.template.spec.containers[name="serve"].imagePulPolicy: field not declared in schema',
    )


def test_the_same_container_twice_is_refused(kubectl: Kubectl) -> None:
    wrong = deployment()
    wrong["spec"]["template"]["spec"]["containers"] *= 2
    with pytest.raises(ApiException, match=r"duplicate entries for key \[name=") as caught:
        kubectl.apply(wrong)
    assert caught.value.status == 500


def test_apply_wants_a_field_manager_and_leaves_managed_fields_to_the_server(kubectl: Kubectl) -> None:
    with pytest.raises(ApiException, match="fieldManager: Required value") as caught:
        kubectl.patch(config_map(), APPLY)
    assert caught.value.status == 422
    with pytest.raises(ApiException, match="managedFields must be nil") as caught:
        kubectl.apply(config_map() | {"metadata": {"name": "settings", "managedFields": []}})
    assert caught.value.status == 400


def test_a_dry_run_answers_and_keeps_nothing(kubectl: Kubectl) -> None:
    assert kubectl.apply(config_map(colour="blue"), dryRun="All")["data"] == {"colour": "blue"}
    with pytest.raises(ApiException) as caught:
        kubectl.get("ConfigMap", "settings")
    assert caught.value.status == 404


def test_a_dry_run_finds_conflicts(kubectl: Kubectl) -> None:
    kubectl.apply(config_map(colour="blue"), "one")
    with pytest.raises(ApiException) as caught:
        kubectl.apply(config_map(colour="red"), "two", dryRun="All")
    assert caught.value.status == 409


def test_applied_secrets_in_clear_text_are_kept_encoded(kubectl: Kubectl) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "abc"}}
    kept = kubectl.apply(secret)
    assert (kept["type"], kept["data"]) == ("Opaque", {"token": "YWJj"})


def test_fields_survive_the_way_into_managed_fields_and_back() -> None:
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
