"""Cluster check of `evernear doctor`."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from evernear.cli.doctor import check
from tests.loopback.kubernetes import LoopbackCluster
from tests.loopback.kubernetes.kinds import KINDS
from tests.real.deployment.kubernetes.deployer import BASE, MakeSettings

ROLE = next(
    manifest for manifest in yaml.safe_load_all((BASE / "deployer.yaml").read_text()) if manifest["kind"] == "Role"
)


def roles_lacking_one_right() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each right of the deployer's Role, and the Role's rules without it."""
    for position, rule in enumerate(ROLE["rules"]):
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                rules = deepcopy(ROLE["rules"])
                rules[position]["resources"].remove(resource)
                others = [item for item in rule["verbs"] if item != verb]
                rules += [rule | {"resources": [resource], "verbs": others}] if others else []
                yield f"{verb} {resource} {' '.join(rule.get('resourceNames', []))}".strip(), rules


ROLES_LACKING = dict(roles_lacking_one_right())


def test_check_accepts_a_usable_cluster_without_changing_it(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    (result,) = check(make_settings(), ["cluster"])
    assert result.ok, result.message
    assert "accepts the objects of a release in namespace evernear" in result.message
    assert not [call for call in loopback.calls if call.verb == "patch" and call.query.get("dryRun") != "All"]


@pytest.mark.slow
def test_each_missing_right_is_reported(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    messages: dict[str, str] = {}
    for right, rules in ROLES_LACKING.items():
        loopback.api.patch(KINDS["Role"], {"rules": rules}, "evernear", "evernear-deployer")
        (result,) = check(make_settings(), ["cluster"])
        assert not result.ok, right
        messages[right] = result.message
    for right, message in messages.items():
        sentence = f"The credentials lack permissions in namespace evernear: {right}. docs/kubernetes.md has the Role"
        assert message.startswith(sentence), message


def test_service_proxy_right_is_needed_only_without_a_service_url(
    loopback: LoopbackCluster, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback.api.delete(KINDS["Role"], "evernear", "from-outside")
    (result,) = check(make_settings(), ["cluster"])
    assert "lack permissions in namespace evernear: create services/proxy evernear-serving:http." in result.message
    monkeypatch.setenv("EVERNEAR_SERVICE_URL", "http://serving.example")
    (result,) = check(make_settings(), ["cluster"])
    assert result.ok, result.message


def test_all_missing_rights_are_reported_together(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    (result,) = check(make_settings(namespace="elsewhere"), ["cluster"])
    assert not result.ok
    for right in ("create, patch, delete deployments evernear-serving", "list pods", "list events", "get pods/log"):
        assert f" {right};" in result.message
    assert "in namespace elsewhere" in result.message


def test_unusable_settings_fail_the_check(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    (result,) = check(make_settings(image=""), ["cluster"])
    assert not result.ok
    assert "kubernetes.image" in result.message


def test_missing_namespace_is_reported(
    loopback: LoopbackCluster, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(loopback.kubeconfig()))
    (result,) = check(make_settings(namespace="elsewhere"), ["cluster"])
    assert not result.ok
    assert 'namespaces "elsewhere" not found' in result.message
