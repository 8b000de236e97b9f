"""Rollouts: how the controllers bring a Deployment on, and what stalls it."""

import json
import threading
from contextlib import suppress
from typing import Any

import pytest
from kubernetes.client import ApiException, CoreV1Api

from loopback.kubernetes import (
    CrashLoop,
    ImageMissing,
    LoopbackCluster,
    NotReady,
    Ready,
    Stuck,
    Unschedulable,
    carries,
)
from loopback.kubernetes.kinds import DEPLOYMENT
from loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map, deployment, is_rolled_out, refused, until
from loopback.kubernetes.pod_security import violations

SECOND = carries("version", "2")


def rolled_out(kubectl: Kubectl) -> Any:
    def look() -> Any:
        live = kubectl.get("Deployment", "serve")
        return live if is_rolled_out(live) else None

    return until(look)


def pods(kubectl: Kubectl, version: str = "") -> list[dict[str, Any]]:
    return kubectl.list("Pod", labelSelector=f"version={version}" if version else "")["items"]


def condition(subject: dict[str, Any], kind: str) -> dict[str, Any]:
    found = (one for one in subject["status"].get("conditions", ()) if one["type"] == kind)
    return next(found, {"status": "", "reason": ""})


def waiting(kubectl: Kubectl, reason: str) -> dict[str, Any]:
    """The status of a container that waits for this reason."""

    def look() -> Any:
        statuses = [
            one
            for pod in pods(kubectl, "2")
            for field in ("initContainerStatuses", "containerStatuses")
            for one in pod["status"].get(field, ())
        ]
        return next((one for one in statuses if one["state"].get("waiting", {}).get("reason") == reason), None)

    return until(look)


def messages(kubectl: Kubectl, reason: str) -> list[str]:
    return [event["message"] for event in kubectl.list("Event")["items"] if event["reason"] == reason]


def test_a_deployment_comes_up_and_says_so(kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    live = rolled_out(kubectl)
    assert condition(live, "Available")["status"] == "True"
    assert condition(live, "Progressing")["reason"] == "NewReplicaSetAvailable"
    (replica_set,) = kubectl.list("ReplicaSet")["items"]
    mark = replica_set["metadata"]["labels"]["pod-template-hash"]
    assert replica_set["metadata"]["name"] == f"serve-{mark}"
    assert replica_set["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "1"
    assert {pod["metadata"]["labels"]["pod-template-hash"] for pod in pods(kubectl)} == {mark}
    assert all(condition(pod, "Ready")["status"] == "True" for pod in pods(kubectl))


def test_a_rolling_update_never_has_fewer_pods_than_wanted_nor_more_than_one_extra(
    cluster: LoopbackCluster, kubectl: Kubectl
) -> None:
    kubectl.create(deployment(replicas=3))
    version = rolled_out(kubectl)["metadata"]["resourceVersion"]
    kubectl.patch(deployment("2", replicas=3), "application/merge-patch+json")
    rolled_out(kubectl)
    changes = [change for change in cluster.api.store.changes(DEPLOYMENT, int(version)) if change.after]
    counts = [json.loads(change.after)["status"] for change in changes]
    assert min(status.get("availableReplicas", 0) for status in counts) == 3
    assert max(status.get("replicas", 0) for status in counts) == 4
    scaled = messages(kubectl, "ScalingReplicaSet")
    assert [line.split()[-3:] for line in scaled if " from 0 to 3" not in line] == [
        ["0", "to", "1"], ["3", "to", "2"], ["1", "to", "2"], ["2", "to", "1"], ["2", "to", "3"], ["1", "to", "0"],
    ]  # fmt: skip


def test_going_back_makes_the_old_replica_set_the_newest_revision(kubectl: Kubectl) -> None:
    for version in ("1", "2", "1"):
        kubectl.apply(deployment(version, replicas=1))
        rolled_out(kubectl)
    revisions = {
        one["spec"]["template"]["metadata"]["labels"]["version"]: one["metadata"]["annotations"][
            "deployment.kubernetes.io/revision"
        ]
        for one in kubectl.list("ReplicaSet")["items"]
    }
    assert revisions == {"1": "3", "2": "2"}


@pytest.mark.slow
def test_old_revisions_are_dropped_beyond_the_limit(kubectl: Kubectl) -> None:
    for version in ("1", "2", "3"):
        kubectl.apply(deployment(version, replicas=1, revisionHistoryLimit=1))
        rolled_out(kubectl)
    until(lambda: len(kubectl.list("ReplicaSet")["items"]) == 2)


@pytest.mark.slow
def test_recreate_ends_the_old_before_it_starts_the_new(kubectl: Kubectl) -> None:
    kubectl.create(deployment(strategy={"type": "Recreate"}))
    rolled_out(kubectl)
    kubectl.apply(deployment("2", strategy={"type": "Recreate"}), force="true")
    rolled_out(kubectl)
    assert len(pods(kubectl, "2")) == 2


def test_an_image_that_cannot_be_pulled(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    rolled_out(kubectl)
    cluster.pods_do(ImageMissing("not found"), SECOND)
    kubectl.apply(deployment("2"), force="true")
    status = waiting(kubectl, "ImagePullBackOff")
    assert status["state"]["waiting"]["message"].startswith('Back-off pulling image "example.com/serve:2"')
    assert "Error: ErrImagePull" in messages(kubectl, "Failed")
    assert len(pods(kubectl, "1")) == 2  # the old ones stay
    with pytest.raises(ApiException) as caught:
        CoreV1Api(kubectl.client).read_namespaced_pod_log(pods(kubectl, "2")[0]["metadata"]["name"], NAMESPACE)
    assert refused(caught.value)[1].endswith("is waiting to start: trying and failing to pull image")


def test_a_rollout_that_stalls_exceeds_its_deadline_and_may_go_on(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    rolled_out(kubectl)
    cluster.pods_do(NotReady(), SECOND)
    kubectl.apply(deployment("2", progressDeadlineSeconds=100), force="true")

    def is_given_up() -> bool:
        return condition(kubectl.get("Deployment", "serve"), "Progressing")["reason"] == "ProgressDeadlineExceeded"

    until(is_given_up)
    assert messages(kubectl, "Unhealthy") == ["Readiness probe failed: HTTP probe failed with statuscode: 503"]
    assert len(pods(kubectl, "1")) == 2
    cluster.pods_do(Ready(), SECOND)
    assert condition(rolled_out(kubectl), "Progressing")["status"] == "True"


def test_a_pod_that_fits_nowhere(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.pods_do(Unschedulable())
    kubectl.create(deployment())
    until(lambda: messages(kubectl, "FailedScheduling"))
    first = pods(kubectl)[0]
    assert first["status"]["phase"] == "Pending"
    assert condition(first, "PodScheduled")["reason"] == "Unschedulable"
    assert "nodeName" not in first["spec"]
    cluster.pods_do(Ready())
    rolled_out(kubectl)


def test_a_container_that_crashes_leaves_its_last_words(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    cluster.pods_do(CrashLoop(log="loading\nno such file\n", exit_code=3), SECOND)
    kubectl.apply(deployment("2"), force="true")
    until(lambda: waiting(kubectl, "CrashLoopBackOff")["restartCount"] == 2)
    status = waiting(kubectl, "CrashLoopBackOff")
    assert status["lastState"]["terminated"]["exitCode"] == 3
    name = pods(kubectl, "2")[0]["metadata"]["name"]
    core = CoreV1Api(kubectl.client)
    assert core.read_namespaced_pod_log(name, NAMESPACE, previous=True, tail_lines=1) == "no such file\n"


def test_an_init_container_that_fails_keeps_the_others_waiting(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.pods_do(CrashLoop(log="sha256 differs", container="fetch"), SECOND)
    subject = deployment("2")
    spec = subject["spec"]["template"]["spec"]
    spec["initContainers"] = [{"name": "fetch", "image": "example.com/serve:2"}]
    spec["containers"].append({"name": "proxy", "image": "example.com/proxy:1"})
    kubectl.create(subject)
    until(lambda: waiting(kubectl, "CrashLoopBackOff")["name"] == "fetch")
    pod = pods(kubectl, "2")[0]
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    assert condition(pod, "Initialized")["status"] == "False"
    core = CoreV1Api(kubectl.client)
    name = pod["metadata"]["name"]
    assert core.read_namespaced_pod_log(name, NAMESPACE, container="fetch") == "sha256 differs"
    with pytest.raises(
        ApiException, match=r"choose one of: \[serve proxy\] or one of the init containers: \[fetch\]"
    ) as caught:
        core.read_namespaced_pod_log(name, NAMESPACE)
    assert caught.value.status == 400


def test_a_pod_waits_for_what_it_mounts_and_for_its_environment(kubectl: Kubectl) -> None:
    subject = deployment("2")
    spec = subject["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "settings", "configMap": {"name": "settings"}}]
    spec["containers"][0]["env"] = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}}]
    kubectl.create(subject)
    until(lambda: messages(kubectl, "FailedMount"))
    why = 'MountVolume.SetUp failed for volume "settings" : configmap "settings" not found'
    assert set(messages(kubectl, "FailedMount")) == {why}
    kubectl.create(config_map())
    waiting(kubectl, "CreateContainerConfigError")
    assert 'Error: secret "token" not found' in messages(kubectl, "Failed")
    secret = {"kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "x"}}
    kubectl.create(secret)
    rolled_out(kubectl)


def test_a_rollout_that_never_finishes(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.pods_do(Stuck(), SECOND)
    kubectl.create(deployment("2"))
    assert waiting(kubectl, "ContainerCreating")["ready"] is False


def test_a_slow_pod_is_ready_later(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.pods_do(Ready(after_s=0.3))
    kubectl.create(deployment())
    until(lambda: all(pod["status"].get("phase") == "Running" for pod in pods(kubectl)) and len(pods(kubectl)) == 2)
    assert not is_rolled_out(kubectl.get("Deployment", "serve"))
    rolled_out(kubectl)


def test_a_namespace_that_is_restricted_admits_no_careless_pods(kubectl: Kubectl) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = f"/api/v1/namespaces/{NAMESPACE}"
    kubectl.call("PATCH", namespace, {"metadata": {"labels": labels}}, "application/merge-patch+json")
    kubectl.create(deployment())

    def failure() -> Any:
        return condition(kubectl.get("Deployment", "serve"), "ReplicaFailure").get("message")

    message = until(failure)
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "serve"' in message
    assert "seccompProfile" in message
    careful = deployment()
    careful["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    kubectl.apply(careful, force="true")
    rolled_out(kubectl)


def test_a_pod_without_its_service_account_is_refused(kubectl: Kubectl) -> None:
    subject = deployment()
    subject["spec"]["template"]["spec"]["serviceAccountName"] = "serving"
    kubectl.create(subject)
    until(lambda: any('serviceaccount "serving" not found' in why for why in messages(kubectl, "FailedCreate")))
    kubectl.create({"kind": "ServiceAccount", "metadata": {"name": "serving"}})
    # The controller of a real cluster tries again by and by; here it looks whenever anything is written.
    rolled_out(kubectl)


def test_an_autoscaler_keeps_the_replicas_within_its_bounds(kubectl: Kubectl) -> None:
    subject = deployment()
    del subject["spec"]["replicas"]
    kubectl.apply(subject)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "serve"}
    spec = {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 5}
    kubectl.create({"kind": "HorizontalPodAutoscaler", "metadata": {"name": "serve"}, "spec": spec})
    until(lambda: kubectl.get("Deployment", "serve")["spec"]["replicas"] == 3)
    assert kubectl.apply(subject)["spec"]["replicas"] == 3
    rolled_out(kubectl)


def test_a_budget_counts_its_pods(kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "serve"}}}
    kubectl.create({"kind": "PodDisruptionBudget", "metadata": {"name": "serve"}, "spec": spec})
    until(lambda: kubectl.get("PodDisruptionBudget", "serve")["status"].get("disruptionsAllowed") == 1)


@pytest.mark.slow
def test_many_clients_at_once_do_not_lose_a_write(kubectl: Kubectl) -> None:
    kubectl.create(config_map(count="0"))

    def count() -> None:
        done = 0
        while done < 10:
            live = kubectl.get("ConfigMap", "settings")
            with suppress(ApiException):  # somebody wrote in between
                kubectl.replace(live | {"data": {"count": str(int(live["data"]["count"]) + 1)}})
                done += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kubectl.get("ConfigMap", "settings")["data"] == {"count": "40"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"resources": {"requests": {"cpu": "9"}}}, "0/1 nodes are available: 1 Insufficient cpu."),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "1 Insufficient nvidia.com/gpu."),
    ],
)
def test_a_pod_that_asks_for_more_than_the_node_has(kubectl: Kubectl, spec: dict[str, Any], message: str) -> None:
    subject = deployment()
    subject["spec"]["template"]["spec"]["containers"][0] |= spec
    kubectl.create(subject)
    until(lambda: any(message in told for told in messages(kubectl, "FailedScheduling")))


@pytest.mark.parametrize(
    ("spec", "violation"),
    [
        ({}, None),
        ({"hostNetwork": True}, "host namespaces"),
        ({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "restricted volume types"),
        ({"securityContext": {"runAsNonRoot": True}}, "seccompProfile"),
    ],
)
def test_pod_security_finds_what_is_not_restricted(spec: dict[str, Any], violation: str | None) -> None:
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}
    careful = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"securityContext": careful, "containers": [{"name": "serve", "securityContext": own}]} | spec
    found = violations("restricted", pod)
    assert found == [] if violation is None else len(found) == 1 and found[0].startswith(violation)
    assert violations(None, pod) == []
    own["capabilities"]["add"].append("SYS_ADMIN")
    assert any('must not include "SYS_ADMIN"' in one for one in violations("restricted", pod))
