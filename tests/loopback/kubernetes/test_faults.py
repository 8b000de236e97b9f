"""Faults on order: what a client of an unlucky server meets."""

import json

import pytest
import urllib3
from kubernetes.client import ApiException

from loopback.kubernetes import LoopbackCluster, internal_error, modified, too_many_requests
from loopback.kubernetes.kinds import CONFIG_MAP
from loopback.kubernetes.kubectl import Kubectl, config_map, refused


def test_too_many_requests_say_when_to_come_again(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.fail(too_many_requests(retry_after_s=7), lambda call: call.verb == "create")
    with pytest.raises(ApiException) as caught:
        kubectl.create(config_map())
    assert caught.value.status == 429
    assert caught.value.headers["Retry-After"] == "7"
    status = json.loads(caught.value.body)
    assert (status["reason"], status["details"]["retryAfterSeconds"]) == ("TooManyRequests", 7)
    kubectl.create(config_map())


def test_a_fault_meets_as_many_requests_as_it_was_ordered_for(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.fail(internal_error(), lambda call: call.kind is CONFIG_MAP, times=2)
    for _ in range(2):
        with pytest.raises(ApiException) as caught:
            kubectl.list("ConfigMap")
        assert refused(caught.value) == (500, "Internal error occurred: etcdserver: request timed out")
    kubectl.list("Pod")
    kubectl.list("ConfigMap")


def test_somebody_else_may_always_be_quicker(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    made = kubectl.create(config_map())
    cluster.fail(modified(CONFIG_MAP, "settings"), lambda call: call.verb == "update")
    with pytest.raises(ApiException, match="the object has been modified") as caught:
        kubectl.replace(made | {"data": {"a": "b"}})
    assert caught.value.status == 409
    kubectl.replace(made | {"data": {"a": "b"}})


def test_a_dropped_connection_before_and_after_the_deed(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.drop(lambda call: call.verb == "create")
    with pytest.raises(urllib3.exceptions.HTTPError):
        kubectl.create(config_map("lost"))
    cluster.drop(lambda call: call.verb == "create", after=True)
    with pytest.raises(urllib3.exceptions.HTTPError):
        kubectl.create(config_map("kept"))
    names = [one["metadata"]["name"] for one in kubectl.list("ConfigMap")["items"]]
    assert "kept" in names
    assert "lost" not in names


def test_every_request_can_be_looked_at(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.apply(config_map(), "me", dryRun="All")
    call = cluster.calls[-1]
    assert (call.verb, call.kind, call.name, call.query) == (
        "patch",
        CONFIG_MAP,
        "settings",
        {"fieldManager": "me", "dryRun": "All"},
    )
