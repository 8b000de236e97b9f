"""Follow a rollout until it is complete, or until it is known why it will not be."""

import time

from evernear.deployment.kubernetes.cluster import Away, Cluster, Tree
from evernear.deployment.kubernetes.rollout_diagnosis import Stall, find_stall
from evernear.errors import ClusterError
from evernear.settings import KubernetesSettings

LOOK_S = 2
"""The pods are looked at so often; meanwhile the Deployment is watched."""
PAUSE_S = 0.2


def await_rollout(cluster: Cluster, settings: KubernetesSettings) -> None:
    """Wait until all pods are of the newest revision and ready, and those before it are gone or on their way out.

    What seldom mends itself, such as an image that cannot be pulled, is waited for ``failure_grace_s`` and not
    ``rollout_timeout_s``. That Kubernetes gave a rollout up is not looked at: its ``ProgressDeadlineExceeded`` stays
    from the rollout before until this one makes progress, and could not come of this one before the time is out here.

    Raises:
        ClusterError: it does not come up; the sentence says why. Or the API server is away for too long.
    """
    started_s = hopeful_s = time.monotonic()
    while True:
        stall, deployment = None, None
        try:
            deployment = _deployment(cluster, settings.name)
            if is_complete(deployment):
                return
            stall = find_stall(cluster, settings, deployment)
        except Away as error:  # a control plane may be away for a minute; pods serve on
            stall = Stall(str(error).rstrip("."))
        now_s = time.monotonic()
        if stall is None or not stall.hopeless:
            hopeful_s = now_s
        why = stall.reason if stall else "nothing tells why"
        if now_s - hopeful_s > settings.failure_grace_s:
            raise ClusterError(f"it does not come up: {why}.")
        if now_s - started_s > settings.rollout_timeout_s:
            raise ClusterError(f"it is not up after {settings.rollout_timeout_s} s: {why}.")
        if deployment is not None and any(map(is_complete, cluster.changes(deployment, LOOK_S))):
            return
        time.sleep(PAUSE_S)  # a watch that breaks off at once must not be asked for in a loop


def is_complete(deployment: Tree) -> bool:
    """Whether its newest revision, and nothing else, serves; as ``kubectl rollout status`` sees it."""
    status: Tree = deployment.get("status") or {}
    wanted = deployment["spec"].get("replicas", 1)
    updated = status.get("updatedReplicas", 0)
    return (
        status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
        and updated >= wanted
        and status.get("replicas", 0) == updated
        and status.get("availableReplicas", 0) == updated
    )


def _deployment(cluster: Cluster, name: str) -> Tree:
    found = cluster.get("Deployment", name)
    if found is None:
        raise ClusterError(f"somebody deleted the Deployment {name}.")
    if found["spec"].get("replicas") == 0:
        raise ClusterError(f"somebody scaled the Deployment {name} to 0, so nothing serves; scale it to 1 or more.")
    return found
