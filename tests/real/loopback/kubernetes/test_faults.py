"""Faults that a test injects into the API server."""

import json

import pytest
import urllib3
from kubernetes.client import ApiException

from tests.loopback.kubernetes import LoopbackCluster, too_many_requests
from tests.loopback.kubernetes.kubectl import Kubectl, config_map


def test_too_many_requests_carries_retry_after(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.fail(too_many_requests(retry_after_s=7), lambda call: call.verb == "create")
    with pytest.raises(ApiException) as exc_info:
        kubectl.create(config_map())
    assert exc_info.value.status == 429
    assert exc_info.value.headers["Retry-After"] == "7"
    status = json.loads(exc_info.value.body)
    assert (status["reason"], status["details"]["retryAfterSeconds"]) == ("TooManyRequests", 7)
    kubectl.create(config_map())


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
