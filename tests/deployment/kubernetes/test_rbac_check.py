"""What `evernear doctor` tells of a cluster."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from conftest import BASE, MakeSettings
from kubernetes import client, config
from loopback.kubernetes import LoopbackCluster

from evernear.doctor import check

ROLE = next(
    manifest for manifest in yaml.safe_load_all((BASE / "deployer.yaml").read_text()) if manifest["kind"] == "Role"
)


def one_right_less() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each right of the deployer's Role, and the Role's rules without it."""
    for position, rule in enumerate(ROLE["rules"]):
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                rules = deepcopy(ROLE["rules"])
                rules[position]["resources"].remove(resource)
                others = [one for one in rule["verbs"] if one != verb]
                rules += [rule | {"resources": [resource], "verbs": others}] if others else []
                yield f"{verb} {resource} {' '.join(rule.get('resourceNames', []))}".strip(), rules


LESS = dict(one_right_less())


def test_a_cluster_that_would_take_a_release_and_nothing_is_left_in_it(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    (found,) = check(make_settings(), ["cluster"])
    assert found.ok, found.message
    assert "accepts the objects of a release in namespace evernear" in found.message
    assert not [call for call in loopback.calls if call.verb == "patch" and call.query.get("dryRun") != "All"]


def test_each_right_that_the_deployer_has_is_missed_where_it_lacks(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    said: dict[str, str] = {}
    with config.new_client_from_config(str(loopback.kubeconfig())) as administrator:
        roles = client.RbacAuthorizationV1Api(administrator)
        for right, rules in LESS.items():
            roles.patch_namespaced_role("evernear-deployer", "evernear", {"rules": rules})
            (found,) = check(make_settings(), ["cluster"])
            assert not found.ok, right
            said[right] = found.message
    for right, message in said.items():
        sentence = f"The credentials may not, in namespace evernear: {right}. docs/kubernetes.md has the Role"
        assert message.startswith(sentence), message


def test_from_outside_the_service_is_asked_through_the_api_server(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    with config.new_client_from_config(str(loopback.kubeconfig())) as administrator:
        client.RbacAuthorizationV1Api(administrator).delete_namespaced_role("from-outside", "evernear")
    (found,) = check(make_settings(), ["cluster"])
    assert "may not, in namespace evernear: create services/proxy evernear-serving:http." in found.message
    (found,) = check(make_settings(service_url="http://serving.example"), ["cluster"])
    assert found.ok, found.message


def test_all_that_is_missing_is_named_at_once(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    (found,) = check(make_settings(namespace="elsewhere"), ["cluster"])
    assert not found.ok
    for right in ("create, patch, delete deployments evernear-serving", "list pods", "list events", "get pods/log"):
        assert f" {right};" in found.message
    assert "in namespace elsewhere" in found.message


def test_settings_that_no_release_can_be_deployed_with(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    (found,) = check(make_settings(image=""), ["cluster"])
    assert not found.ok
    assert "kubernetes.image" in found.message


def test_a_namespace_that_is_not_there(
    loopback: LoopbackCluster, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(loopback.kubeconfig()))
    (found,) = check(make_settings(namespace="elsewhere"), ["cluster"])
    assert not found.ok
    assert 'namespaces "elsewhere" not found' in found.message
