"""Rollouts of Deployments, and conditions that stall them."""

import json
import threading
from contextlib import suppress
from typing import Any

import pytest
from kubernetes.client import ApiException, CoreV1Api

from tests.loopback.kubernetes import (
    CrashLoop,
    ImageMissing,
    LoopbackCluster,
    NotReady,
    Ready,
    Stuck,
    Unschedulable,
    labeled,
)
from tests.loopback.kubernetes.kinds import DEPLOYMENT
from tests.loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map, deployment, error_of, is_rolled_out, until
from tests.loopback.kubernetes.pod_security import violations

SECOND = labeled("version", "2")


def rolled_out(kubectl: Kubectl) -> Any:
    def find() -> Any:
        live = kubectl.get("Deployment", "serve")
        return live if is_rolled_out(live) else None

    return until(find)


def pods(kubectl: Kubectl, version: str = "") -> list[dict[str, Any]]:
    return kubectl.list("Pod", labelSelector=f"version={version}" if version else "")["items"]


def condition(subject: dict[str, Any], kind: str) -> dict[str, Any]:
    conditions = (item for item in subject["status"].get("conditions", ()) if item["type"] == kind)
    return next(conditions, {"status": "", "reason": ""})


def waiting(kubectl: Kubectl, reason: str) -> dict[str, Any]:
    """Return the status of a container that is waiting for this reason."""

    def find() -> Any:
        statuses = [
            item
            for pod in pods(kubectl, "2")
            for field in ("initContainerStatuses", "containerStatuses")
            for item in pod["status"].get(field, ())
        ]
        return next((item for item in statuses if item["state"].get("waiting", {}).get("reason") == reason), None)

    return until(find)


def messages(kubectl: Kubectl, reason: str) -> list[str]:
    return [event["message"] for event in kubectl.list("Event")["items"] if event["reason"] == reason]


def test_deployment_becomes_available(kubectl: Kubectl) -> None:
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


def test_rolling_update_respects_max_surge_and_max_unavailable(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment(replicas=3))
    version = rolled_out(kubectl)["metadata"]["resourceVersion"]
    kubectl.apply(deployment("2", replicas=3), force="true")
    rolled_out(kubectl)
    changes = [change for change in cluster.api.store.changes(DEPLOYMENT, int(version)) if change.after]
    counts = [json.loads(change.after)["status"] for change in changes]
    assert min(status.get("availableReplicas", 0) for status in counts) == 3
    assert max(status.get("replicas", 0) for status in counts) == 4
    scaled = messages(kubectl, "ScalingReplicaSet")
    assert [line.split()[-3:] for line in scaled if " from 0 to 3" not in line] == [
        ["0", "to", "1"], ["3", "to", "2"], ["1", "to", "2"], ["2", "to", "1"], ["2", "to", "3"], ["1", "to", "0"],
    ]  # fmt: skip


def test_rollback_makes_the_old_replica_set_the_newest_revision(kubectl: Kubectl) -> None:
    for version in ("1", "2", "1"):
        kubectl.apply(deployment(version, replicas=1))
        rolled_out(kubectl)
    revisions = {
        item["spec"]["template"]["metadata"]["labels"]["version"]: item["metadata"]["annotations"][
            "deployment.kubernetes.io/revision"
        ]
        for item in kubectl.list("ReplicaSet")["items"]
    }
    assert revisions == {"1": "3", "2": "2"}


@pytest.mark.slow
def test_revision_history_is_limited(kubectl: Kubectl) -> None:
    for version in ("1", "2", "3"):
        kubectl.apply(deployment(version, replicas=1, revisionHistoryLimit=1))
        rolled_out(kubectl)
    until(lambda: len(kubectl.list("ReplicaSet")["items"]) == 2)


@pytest.mark.slow
def test_recreate_deletes_old_pods_before_creating_new_ones(kubectl: Kubectl) -> None:
    kubectl.create(deployment(strategy={"type": "Recreate"}))
    rolled_out(kubectl)
    kubectl.apply(deployment("2", strategy={"type": "Recreate"}), force="true")
    rolled_out(kubectl)
    assert len(pods(kubectl, "2")) == 2


def test_an_image_that_cannot_be_pulled(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    rolled_out(kubectl)
    cluster.set_pod_behavior(ImageMissing("not found"), SECOND)
    kubectl.apply(deployment("2"), force="true")
    status = waiting(kubectl, "ImagePullBackOff")
    assert status["state"]["waiting"]["message"].startswith('Back-off pulling image "example.com/serve:2"')
    assert "Error: ErrImagePull" in messages(kubectl, "Failed")
    assert len(pods(kubectl, "1")) == 2  # the old pods remain
    with pytest.raises(ApiException) as exc_info:
        CoreV1Api(kubectl.client).read_namespaced_pod_log(pods(kubectl, "2")[0]["metadata"]["name"], NAMESPACE)
    assert error_of(exc_info.value)[1].endswith("is waiting to start: trying and failing to pull image")


def test_stalled_rollout_exceeds_its_deadline_and_can_complete(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    rolled_out(kubectl)
    cluster.set_pod_behavior(NotReady(), SECOND)
    kubectl.apply(deployment("2", progressDeadlineSeconds=100), force="true")

    def is_given_up() -> bool:
        return condition(kubectl.get("Deployment", "serve"), "Progressing")["reason"] == "ProgressDeadlineExceeded"

    until(is_given_up)
    assert messages(kubectl, "Unhealthy") == ["Readiness probe failed: HTTP probe failed with statuscode: 503"]
    assert len(pods(kubectl, "1")) == 2
    cluster.set_pod_behavior(Ready(), SECOND)
    assert condition(rolled_out(kubectl), "Progressing")["status"] == "True"


def test_unschedulable_pod(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.set_pod_behavior(Unschedulable())
    kubectl.create(deployment())
    until(lambda: messages(kubectl, "FailedScheduling"))
    first = pods(kubectl)[0]
    assert first["status"]["phase"] == "Pending"
    assert condition(first, "PodScheduled")["reason"] == "Unschedulable"
    assert "nodeName" not in first["spec"]
    cluster.set_pod_behavior(Ready())
    rolled_out(kubectl)


def test_crashed_container_keeps_its_last_state_and_log(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    cluster.set_pod_behavior(CrashLoop(log="loading\nno such file\n", exit_code=3), SECOND)
    kubectl.apply(deployment("2"), force="true")
    until(lambda: waiting(kubectl, "CrashLoopBackOff")["restartCount"] == 2)
    status = waiting(kubectl, "CrashLoopBackOff")
    assert status["lastState"]["terminated"]["exitCode"] == 3
    name = pods(kubectl, "2")[0]["metadata"]["name"]
    core = CoreV1Api(kubectl.client)
    assert core.read_namespaced_pod_log(name, NAMESPACE, previous=True, tail_lines=1) == "no such file\n"


def test_failing_init_container_blocks_main_containers(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.set_pod_behavior(CrashLoop(log="sha256 differs", container="fetch"), SECOND)
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
    ) as exc_info:
        core.read_namespaced_pod_log(name, NAMESPACE)
    assert exc_info.value.status == 400


def test_pod_waits_for_mounted_and_referenced_objects(kubectl: Kubectl) -> None:
    subject = deployment("2")
    spec = subject["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "settings", "configMap": {"name": "settings"}}]
    spec["containers"][0]["env"] = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}}]
    kubectl.create(subject)
    until(lambda: messages(kubectl, "FailedMount"))
    reason = 'MountVolume.SetUp failed for volume "settings" : configmap "settings" not found'
    assert set(messages(kubectl, "FailedMount")) == {reason}
    kubectl.create(config_map())
    waiting(kubectl, "CreateContainerConfigError")
    assert 'Error: secret "token" not found' in messages(kubectl, "Failed")
    secret = {"kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "x"}}
    kubectl.create(secret)
    rolled_out(kubectl)


def test_stuck_pod_remains_in_container_creating(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.set_pod_behavior(Stuck(), SECOND)
    kubectl.create(deployment("2"))
    assert waiting(kubectl, "ContainerCreating")["ready"] is False


def test_slow_pod_delays_the_rollout(cluster: LoopbackCluster, kubectl: Kubectl) -> None:
    cluster.set_pod_behavior(Ready(after_s=0.3))
    kubectl.create(deployment())
    until(lambda: all(pod["status"].get("phase") == "Running" for pod in pods(kubectl)) and len(pods(kubectl)) == 2)
    assert not is_rolled_out(kubectl.get("Deployment", "serve"))
    rolled_out(kubectl)


def test_restricted_namespace_rejects_unrestricted_pods(kubectl: Kubectl) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = f"/api/v1/namespaces/{NAMESPACE}"
    kubectl.call("PATCH", namespace, {"metadata": {"labels": labels}}, "application/strategic-merge-patch+json")
    kubectl.create(deployment())

    def failure() -> Any:
        return condition(kubectl.get("Deployment", "serve"), "ReplicaFailure").get("message")

    message = until(failure)
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "serve"' in message
    assert "seccompProfile" in message
    restricted = deployment()
    restricted["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    kubectl.apply(restricted, force="true")
    rolled_out(kubectl)


def test_pod_with_a_missing_service_account_is_rejected(kubectl: Kubectl) -> None:
    subject = deployment()
    subject["spec"]["template"]["spec"]["serviceAccountName"] = "serving"
    kubectl.create(subject)
    until(lambda: any('serviceaccount "serving" not found' in reason for reason in messages(kubectl, "FailedCreate")))
    kubectl.create({"kind": "ServiceAccount", "metadata": {"name": "serving"}})
    # A real controller retries with a back-off; this one reconciles after every write.
    rolled_out(kubectl)


def test_autoscaler_keeps_replicas_within_its_bounds(kubectl: Kubectl) -> None:
    subject = deployment()
    del subject["spec"]["replicas"]
    kubectl.apply(subject)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "serve"}
    spec = {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 5}
    kubectl.create({"kind": "HorizontalPodAutoscaler", "metadata": {"name": "serve"}, "spec": spec})
    until(lambda: kubectl.get("Deployment", "serve")["spec"]["replicas"] == 3)
    assert kubectl.apply(subject)["spec"]["replicas"] == 3
    rolled_out(kubectl)


def test_disruption_budget_counts_its_pods(kubectl: Kubectl) -> None:
    kubectl.create(deployment())
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "serve"}}}
    kubectl.create({"kind": "PodDisruptionBudget", "metadata": {"name": "serve"}, "spec": spec})
    until(lambda: kubectl.get("PodDisruptionBudget", "serve")["status"].get("disruptionsAllowed") == 1)


@pytest.mark.slow
def test_concurrent_clients_lose_no_writes(kubectl: Kubectl) -> None:
    kubectl.create(config_map(count="0"))

    def count() -> None:
        completed = 0
        while completed < 10:
            live = kubectl.get("ConfigMap", "settings")
            with suppress(ApiException):  # another client wrote first
                kubectl.replace(live | {"data": {"count": str(int(live["data"]["count"]) + 1)}})
                completed += 1

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
def test_pod_with_excessive_requests_is_unschedulable(kubectl: Kubectl, spec: dict[str, Any], message: str) -> None:
    subject = deployment()
    subject["spec"]["template"]["spec"]["containers"][0] |= spec
    kubectl.create(subject)
    until(lambda: any(message in text for text in messages(kubectl, "FailedScheduling")))


@pytest.mark.parametrize(
    ("pod", "own", "image", "error"),
    [
        ({}, {}, "mesh/proxy", None),
        ({"runAsNonRoot": True}, {}, "mesh/proxy", "image will run as root"),
        ({"runAsNonRoot": True}, {}, "registry.example/evernear-serve@sha256:0", None),
        ({"runAsNonRoot": True, "runAsUser": 65532}, {}, "mesh/proxy", None),
        ({"runAsNonRoot": True}, {"runAsUser": 1000}, "mesh/proxy", None),
        ({"runAsNonRoot": True}, {"runAsNonRoot": False}, "mesh/proxy", None),
        ({"runAsNonRoot": True, "runAsUser": 65532}, {"runAsUser": 0}, "mesh/proxy", "breaks non-root policy"),
    ],
)
def test_kubelet_verifies_the_user_of_a_container(
    kubectl: Kubectl, pod: dict[str, Any], own: dict[str, Any], image: str, error: str | None
) -> None:
    subject = deployment()
    spec = subject["spec"]["template"]["spec"]
    spec["securityContext"] = pod
    spec["containers"].append({"name": "injected", "image": image, "securityContext": own})
    spec["containers"][0]["image"] = "evernear-serve"
    kubectl.create(subject)
    if error is None:
        rolled_out(kubectl)
    else:
        until(lambda: any(error in text for text in messages(kubectl, "Failed")))


@pytest.mark.parametrize(
    ("spec", "violation"),
    [
        ({}, None),
        ({"hostNetwork": True}, "host namespaces"),
        ({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "restricted volume types"),
        ({"securityContext": {"runAsNonRoot": True}}, "seccompProfile"),
    ],
)
def test_pod_security_violations(spec: dict[str, Any], violation: str | None) -> None:
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}
    restricted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"securityContext": restricted, "containers": [{"name": "serve", "securityContext": own}]} | spec
    result = violations("restricted", pod)
    assert result == [] if violation is None else len(result) == 1 and result[0].startswith(violation)
    assert violations(None, pod) == []
    own["capabilities"]["add"].append("SYS_ADMIN")
    assert any('must not include "SYS_ADMIN"' in item for item in violations("restricted", pod))
