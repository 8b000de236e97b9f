import time

from evernear.deployment.kubernetes.cluster import Cluster, Tree
from evernear.deployment.kubernetes.rollout_diagnosis import Diagnosis, diagnose
from evernear.errors import ClusterError
from evernear.settings import KubernetesSettings

DIAGNOSIS_INTERVAL_S = 2
"""Interval between diagnoses of the pods. In between, the Deployment is watched."""
FAILURE_GRACE_S = 60
"""Time before an error that rarely resolves itself (image pull, crash loop) ends a rollout.
Kubernetes has then tried three times."""
PAUSE_S = 0.2


def await_rollout(cluster: Cluster, settings: KubernetesSettings) -> None:
    """Wait until all pods of the newest revision are ready, and older ones deleted or terminating.

    A persistent failure, such as an image that cannot be pulled, ends the rollout after
    `FAILURE_GRACE_S` instead of ``rollout_timeout_s``, and the error states the reason.
    ``ProgressDeadlineExceeded`` is ignored because the previous rollout may have set it.
    """
    started_s = healthy_s = time.monotonic()
    while True:
        diagnosis, deployment = None, None
        try:
            deployment = _deployment(cluster, settings.name)
            if is_complete(deployment):
                return
            diagnosis = diagnose(cluster, settings, deployment)
        except ClusterError as error:
            if error.status != 503:
                raise
            # Pods continue to serve without their control plane.
            diagnosis = Diagnosis(str(error).rstrip("."))
        now_s = time.monotonic()
        if diagnosis is None or not diagnosis.persistent:
            healthy_s = now_s
        reason = diagnosis.reason if diagnosis else "the cause is unknown"
        if now_s - healthy_s > FAILURE_GRACE_S:
            raise ClusterError(f"it does not come up: {reason}.")
        if now_s - started_s > settings.rollout_timeout_s:
            raise ClusterError(f"it is not up after {settings.rollout_timeout_s} s: {reason}.")
        if deployment is not None and any(map(is_complete, cluster.changes(deployment, DIAGNOSIS_INTERVAL_S))):
            return
        time.sleep(PAUSE_S)  # a watch that fails immediately must not become a busy loop


def is_complete(deployment: Tree) -> bool:
    """Only the newest revision is live, as in ``kubectl rollout status``."""
    status: Tree = deployment.get("status") or {}
    replicas = deployment["spec"].get("replicas", 1)
    updated = status.get("updatedReplicas", 0)
    return (
        status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
        and updated >= replicas
        and status.get("replicas", 0) == updated
        and status.get("availableReplicas", 0) == updated
    )


def _deployment(cluster: Cluster, name: str) -> Tree:
    deployment = cluster.get("Deployment", name)
    if deployment is None:
        raise ClusterError(f"the Deployment {name} was deleted.")
    if deployment["spec"].get("replicas") == 0:
        raise ClusterError(f"the Deployment {name} was scaled to 0 replicas; scale it to 1 or more.")
    return deployment
