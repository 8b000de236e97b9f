"""Faults that a test injects into the API server."""

import json

import pytest
import urllib3
from kubernetes.client import ApiException

from tests.loopback.kubernetes import LoopbackCluster, internal_error, modified, too_many_requests
from tests.loopback.kubernetes.kinds import CONFIG_MAP
from tests.loopback.kubernetes.kubectl import Kubectl, config_map, error_of


def test_too_many_requests_carries_retry_after(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.fail(too_many_requests(retry_after_s=7), lambda call: call.verb == "create")
    with pytest.raises(ApiException) as exc_info:
        kubectl.create(config_map())
    assert exc_info.value.status == 429
    assert exc_info.value.headers["Retry-After"] == "7"
    status = json.loads(exc_info.value.body)
    assert (status["reason"], status["details"]["retryAfterSeconds"]) == ("TooManyRequests", 7)
    kubectl.create(config_map())


def test_fault_applies_to_the_given_number_of_requests(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.fail(internal_error(), lambda call: call.kind is CONFIG_MAP, times=2)
    for _ in range(2):
        with pytest.raises(ApiException) as exc_info:
            kubectl.list("ConfigMap")
        assert error_of(exc_info.value) == (500, "Internal error occurred: etcdserver: request timed out")
    kubectl.list("Pod")
    kubectl.list("ConfigMap")


def test_injected_conflict_fails_a_replace(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    created = kubectl.create(config_map())
    cluster.fail(modified(CONFIG_MAP, "settings"), lambda call: call.verb == "update")
    with pytest.raises(ApiException, match="the object has been modified") as exc_info:
        kubectl.replace(created | {"data": {"a": "b"}})
    assert exc_info.value.status == 409
    kubectl.replace(created | {"data": {"a": "b"}})


def test_connection_drops_before_or_after_the_write(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.drop(lambda call: call.verb == "create")
    with pytest.raises(urllib3.exceptions.HTTPError):
        kubectl.create(config_map("lost"))
    cluster.drop(lambda call: call.verb == "create", after=True)
    with pytest.raises(urllib3.exceptions.HTTPError):
        kubectl.create(config_map("kept"))
    names = [item["metadata"]["name"] for item in kubectl.list("ConfigMap")["items"]]
    assert "kept" in names
    assert "lost" not in names


def test_every_request_is_recorded(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.apply(config_map(), "me", dryRun="All")
    call = cluster.calls[-1]
    assert (call.verb, call.kind, call.name, call.query) == (
        "patch",
        CONFIG_MAP,
        "settings",
        {"fieldManager": "me", "dryRun": "All"},
    )
