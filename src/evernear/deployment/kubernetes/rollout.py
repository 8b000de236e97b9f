"""Wait for a rollout, and diagnose it from its pods' status, events and logs, in a sentence that
quotes them."""

import time
from dataclasses import dataclass

from evernear.deployment.kubernetes.cluster import REVISION, Cluster, Tree, selector
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


LOG_LINES = 3
PULL_ERRORS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ImageInspectError", "ErrImageNeverPull"}
)
CREATE_ERRORS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


@dataclass(frozen=True)
class Diagnosis:
    """Why pods are missing or not ready. ``persistent`` is set if this rarely resolves itself."""

    reason: str
    persistent: bool = False


def diagnose(cluster: Cluster, settings: KubernetesSettings, deployment: Tree) -> Diagnosis | None:
    """The fault that prevents the newest revision from starting, or None if none is visible."""
    refused = _condition(deployment, "ReplicaFailure", "True")
    if refused is not None:
        return Diagnosis(f"no pod can be created: {_reason(refused)}")
    revision = deployment["spec"]["template"]["metadata"]["labels"][REVISION]
    labels = {**selector(settings), REVISION: revision}
    pods = cluster.list("Pod", labelSelector=",".join(f"{key}={value}" for key, value in labels.items()))
    pods.sort(key=_has_failed)  # a failed pod is the least informative because a new pod has replaced it
    diagnoses = [_of_pod(cluster, pod) for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    faults = [diagnosis for diagnosis in diagnoses if diagnosis is not None]
    return next((fault for fault in faults if fault.persistent), faults[0] if faults else None)


def _of_pod(cluster: Cluster, pod: Tree) -> Diagnosis | None:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    unscheduled = _condition(pod, "PodScheduled", "False")
    if unscheduled is not None:
        return Diagnosis(f"pod {name} cannot be scheduled: {_reason(unscheduled)}")
    if _has_failed(pod):
        return Diagnosis(f"pod {name} failed: {_reason(status)}")
    for container in status.get("initContainerStatuses") or []:
        if fault := _of_container(cluster, name, container, "init container"):
            return fault
    for container in status.get("containerStatuses") or []:
        if fault := _of_container(cluster, name, container, "container") or _of_probe(cluster, name, container):
            return fault
    warning = _newest_warning(cluster, name)
    return Diagnosis(f"pod {name} does not start: {warning}") if warning else None


def _has_failed(pod: Tree) -> bool:
    """Evicted or rejected by its node. Such pods stay listed, perhaps since before this rollout."""
    return (pod.get("status") or {}).get("phase") == "Failed"


def _of_container(cluster: Cluster, pod: str, container: Tree, role: str) -> Diagnosis | None:
    """A container whose image, configuration or command is faulty."""
    state: Tree = container.get("state") or {}
    waiting: Tree = state.get("waiting") or {}
    reason, name = waiting.get("reason", ""), f"{role} {container['name']} of pod {pod}"
    if reason in PULL_ERRORS:
        return Diagnosis(f"the image {container['image']} cannot be pulled: {_reason(waiting)}", persistent=True)
    if reason in CREATE_ERRORS:
        return Diagnosis(f"{name} cannot be created: {_reason(waiting)}", persistent=True)
    ended: Tree = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    # After its second restart, a running container counts as crashed until it is ready.
    restarts = container.get("restartCount", 0)
    down = "running" not in state or (restarts > 1 and not container.get("ready"))
    if reason != "CrashLoopBackOff" and not (ended.get("exitCode") and down):
        return None
    cause = f"exit code {ended.get('exitCode', 'unknown')}"
    if ended.get("reason") == "OOMKilled":
        cause = "it needs more memory than its limit; raise kubernetes.memory"
    outcome = "keeps crashing" if restarts else "failed"
    log_end = _log_end(cluster, pod, container["name"], ended, previous="terminated" not in state)
    return Diagnosis(f"{name} {outcome} ({cause}){log_end}", persistent=True)


def _of_probe(cluster: Cluster, pod: str, container: Tree) -> Diagnosis | None:
    """A running container whose startup or readiness probe fails."""
    if container.get("ready") or "running" not in (container.get("state") or {}):
        return None
    probe = "readiness" if container.get("started") else "startup"
    warning = _newest_warning(cluster, pod, "Unhealthy")
    return Diagnosis(f"the {probe} probe of pod {pod} fails" + (f": {warning}" if warning else ""))


def _log_end(cluster: Cluster, pod: str, container: str, ended: Tree, *, previous: bool) -> str:
    """The last lines of the container's log, or of its termination message."""
    lines = cluster.log(pod, container, previous=previous, lines=LOG_LINES)
    lines = lines or [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    return f"; its log ends with {' / '.join(lines[-LOG_LINES:])!r}" if lines else ""


def _newest_warning(cluster: Cluster, pod: str, reason: str | None = None) -> str | None:
    events = cluster.list("Event", fieldSelector=f"involvedObject.name={pod}")
    warnings = [e for e in events if e.get("type") == "Warning" and reason in (None, e.get("reason"))]
    return _one_line(max(warnings, key=event_time).get("message")) if warnings else None


def event_time(event: Tree) -> str:
    """When an event last occurred, as sortable text."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp"))


def _condition(resource: Tree, kind: str, status: str) -> Tree | None:
    conditions: list[Tree] = (resource.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == status), None)


def _reason(status: Tree) -> str:
    return _one_line(status.get("message")) or str(status.get("reason") or "no reason is given")


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split()).rstrip(".")
