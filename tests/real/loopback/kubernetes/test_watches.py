"""Watches: events, resuming from a version, and how they end."""

import json
import threading
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client import ApiException

from tests.loopback.kubernetes import LoopbackCluster
from tests.loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map


def events(kubectl: Kubectl, **query: Any) -> list[tuple[str, str]]:
    """Return type and name of the events of a one-second watch."""
    core = client.CoreV1Api(kubectl.client)
    stream = watch.Watch().stream(core.list_namespaced_config_map, NAMESPACE, timeout_seconds=1, **query)
    return [(event["type"], event["raw_object"]["metadata"].get("name", "")) for event in stream]


def test_watch_resumes_from_a_resource_version(kubectl: Kubectl) -> None:
    created = kubectl.create(config_map(color="blue"))
    kubectl.replace(created | {"data": {"color": "red"}})
    kubectl.create(config_map("other"))
    kubectl.delete("ConfigMap", "settings")
    received = events(kubectl, resource_version=created["metadata"]["resourceVersion"])
    assert received == [("MODIFIED", "settings"), ("ADDED", "other"), ("DELETED", "settings")]


def test_expired_version_is_an_error_event(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    version = kubectl.create(config_map())["metadata"]["resourceVersion"]
    cluster.expire()
    core = client.CoreV1Api(kubectl.client)
    raw = core.list_namespaced_config_map(NAMESPACE, watch=True, resource_version=version, _preload_content=False)
    (line,) = raw.data.decode().splitlines()
    assert raw.status == 200
    status = json.loads(line)["object"]
    assert (json.loads(line)["type"], status["code"], status["reason"]) == ("ERROR", 410, "Expired")
    with pytest.raises(ApiException, match="Expired: too old resource version") as exc_info:
        events(kubectl, resource_version=version)
    assert exc_info.value.status == 410


def test_dropped_watch_breaks_the_stream(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    version = kubectl.create(config_map())["metadata"]["resourceVersion"]
    timer = threading.Timer(0.2, cluster.drop_watches)
    timer.start()
    core = client.CoreV1Api(kubectl.client)
    raw = core.list_namespaced_config_map(
        NAMESPACE, watch=True, resource_version=version, timeout_seconds=60, _preload_content=False
    )
    with pytest.raises(client.rest.urllib3.exceptions.ProtocolError):
        raw.read()
    timer.join()
