"""Rollouts of Deployments, and conditions that stall them."""

import json
from typing import Any

import pytest
from kubernetes.client import ApiException, CoreV1Api

from tests.loopback.kubernetes import (
    CrashLoop,
    ImageMissing,
    LoopbackCluster,
    NotReady,
    Ready,
    labeled,
)
from tests.loopback.kubernetes.kinds import DEPLOYMENT
from tests.loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map, deployment, error_of, is_rolled_out
from tests.waiting import until

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
