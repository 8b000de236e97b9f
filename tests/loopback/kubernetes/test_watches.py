"""Watches: what they tell, where they go on from, and how they end."""

import json
import threading
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client import ApiException

from loopback.kubernetes import LoopbackCluster
from loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map, until

NAMES = "metadata.name=settings"


def events(kubectl: Kubectl, **query: Any) -> list[tuple[str, str]]:
    """Type and name of what a watch of half a second says."""
    core = client.CoreV1Api(kubectl.client)
    stream = watch.Watch().stream(core.list_namespaced_config_map, NAMESPACE, timeout_seconds=1, **query)
    return [(event["type"], event["raw_object"]["metadata"].get("name", "")) for event in stream]


def test_a_watch_goes_on_from_a_version(kubectl: Kubectl) -> None:
    made = kubectl.create(config_map(colour="blue"))
    kubectl.replace(made | {"data": {"colour": "red"}})
    kubectl.create(config_map("other"))
    kubectl.delete("ConfigMap", "settings")
    seen = events(kubectl, resource_version=made["metadata"]["resourceVersion"])
    assert seen == [("MODIFIED", "settings"), ("ADDED", "other"), ("DELETED", "settings")]


def test_a_watch_without_a_version_begins_with_what_is_there(kubectl: Kubectl) -> None:
    kubectl.create(config_map())
    until(lambda: len(kubectl.list("ConfigMap")["items"]) == 2)
    assert events(kubectl) == [("ADDED", "kube-root-ca.crt"), ("ADDED", "settings")]


def test_an_object_comes_into_sight_of_a_selector_and_leaves_it(kubectl: Kubectl) -> None:
    made = kubectl.create(config_map())
    for labels in ({"seen": "yes"}, {"seen": "still", "more": "yes"}, {}):
        live = kubectl.get("ConfigMap", "settings")
        live["metadata"]["labels"] = labels
        kubectl.replace(live)
    seen = events(kubectl, label_selector="seen", resource_version=made["metadata"]["resourceVersion"])
    assert [kind for kind, _ in seen] == ["ADDED", "MODIFIED", "DELETED"]


def test_a_watch_tells_while_it_happens(kubectl: Kubectl) -> None:
    made = kubectl.create(config_map())
    timer = threading.Timer(0.2, lambda: kubectl.delete("ConfigMap", "settings"))
    timer.start()
    core = client.CoreV1Api(kubectl.client)
    watcher = watch.Watch()
    version = made["metadata"]["resourceVersion"]
    for event in watcher.stream(core.list_namespaced_config_map, NAMESPACE, resource_version=version):
        assert event["type"] == "DELETED"
        assert int(event["raw_object"]["metadata"]["resourceVersion"]) > int(version)
        watcher.stop()
    timer.join()


def test_a_bookmark_ends_a_watch_that_asks_for_it(kubectl: Kubectl) -> None:
    version = kubectl.create(config_map())["metadata"]["resourceVersion"]
    seen = events(kubectl, resource_version=version, allow_watch_bookmarks=True)
    assert seen == [("BOOKMARK", "")]


def test_a_forgotten_version_is_an_error_event(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    version = kubectl.create(config_map())["metadata"]["resourceVersion"]
    cluster.expire()
    core = client.CoreV1Api(kubectl.client)
    raw = core.list_namespaced_config_map(NAMESPACE, watch=True, resource_version=version, _preload_content=False)
    (line,) = raw.data.decode().splitlines()
    assert raw.status == 200
    status = json.loads(line)["object"]
    assert (json.loads(line)["type"], status["code"], status["reason"]) == ("ERROR", 410, "Expired")
    with pytest.raises(ApiException, match="Expired: too old resource version") as caught:
        events(kubectl, resource_version=version)
    assert caught.value.status == 410


def test_a_page_token_expires_too(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    for number in range(3):
        kubectl.create(config_map(f"settings-{number}"))
    token = kubectl.list("ConfigMap", limit=1)["metadata"]["continue"]
    cluster.expire()
    with pytest.raises(ApiException, match="continue parameter is too old") as caught:
        kubectl.list("ConfigMap", **{"continue": token})
    assert caught.value.status == 410


def test_a_watch_may_break_off_in_the_middle(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
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
