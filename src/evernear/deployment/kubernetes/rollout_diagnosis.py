"""Why a rollout does not come up, in one sentence, from what Kubernetes tells of its pods."""

from collections.abc import Iterable
from dataclasses import dataclass

from evernear.deployment.kubernetes.cluster import Cluster, Tree
from evernear.deployment.kubernetes.objects import REVISION, selector
from evernear.settings import KubernetesSettings

LOG_LINES = 3
PULL = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ImageInspectError", "ErrImageNeverPull"})
CONFIGURATION = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


@dataclass(frozen=True)
class Stall:
    """Why pods are not there or not ready; ``hopeless``: waiting seldom mends it."""

    reason: str
    hopeless: bool = False


def find_stall(cluster: Cluster, settings: KubernetesSettings, deployment: Tree) -> Stall | None:
    """What keeps the newest revision of ``deployment`` from coming up; None: nothing that can be seen."""
    refused = _condition(deployment, "ReplicaFailure", "True")
    if refused is not None:
        return Stall(f"no pod can be made: {_told(refused)}")
    revision = deployment["spec"]["template"]["metadata"]["labels"][REVISION]
    labels = {**selector(settings), REVISION: revision}
    pods = cluster.list("Pod", labelSelector=",".join(f"{key}={value}" for key, value in labels.items()))
    pods.sort(key=_has_failed)  # it tells least: another has been made in its place
    found = (_of_pod(cluster, pod) for pod in pods if "deletionTimestamp" not in pod["metadata"])
    stalls = [stall for stall in found if stall is not None]
    # Of several pods, the one that says most.
    return next((stall for stall in stalls if stall.hopeless), stalls[0] if stalls else None)


def _of_pod(cluster: Cluster, pod: Tree) -> Stall | None:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    unscheduled = _condition(pod, "PodScheduled", "False")
    if unscheduled is not None:
        return Stall(f"no node takes pod {name}: {_told(unscheduled)}")
    if _has_failed(pod):
        return Stall(f"pod {name} failed: {_told(status)}")
    for container in _containers(status, "initContainerStatuses"):
        stall = _of_container(cluster, name, container, "init container ")
        if stall is not None:
            return stall
    for container in _containers(status, "containerStatuses"):
        stall = _of_container(cluster, name, container, "container ") or _of_probe(cluster, name, container)
        if stall is not None:
            return stall
    warning = _warning(cluster, name)
    return Stall(f"pod {name} does not start: {warning}") if warning else None


def _has_failed(pod: Tree) -> bool:
    """Whether a pod was evicted, or refused by its node: it stays so, and may be older than this rollout."""
    return (pod.get("status") or {}).get("phase") == "Failed"


def _containers(status: Tree, key: str) -> Iterable[Tree]:
    return status.get(key) or []


def _of_container(cluster: Cluster, pod: str, container: Tree, what: str) -> Stall | None:
    """A container whose image, configuration or command is at fault."""
    state: Tree = container.get("state") or {}
    waiting: Tree = state.get("waiting") or {}
    reason, name = waiting.get("reason", ""), f"{what}{container['name']} of pod {pod}"
    if reason in PULL:
        return Stall(f"the image {container['image']} cannot be pulled: {_told(waiting)}", hopeless=True)
    if reason in CONFIGURATION:
        return Stall(f"{name} cannot be made: {_told(waiting)}", hopeless=True)
    ended: Tree = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    # One that was started for the third time is not trusted while it runs: else its crashes would seem far apart.
    restarts = container.get("restartCount", 0)
    down = "running" not in state or (restarts > 1 and not container.get("ready"))
    if reason != "CrashLoopBackOff" and not (ended.get("exitCode") and down):
        return None
    how = f"exit code {ended.get('exitCode', 'unknown')}"
    if ended.get("reason") == "OOMKilled":
        how = "it needs more memory than kubernetes.memory"
    fate = "crashes again and again" if restarts else "failed"
    said = _last_words(cluster, pod, container["name"], ended, previous="terminated" not in state)
    return Stall(f"{name} {fate} ({how}){said}", hopeless=True)


def _of_probe(cluster: Cluster, pod: str, container: Tree) -> Stall | None:
    """A container that runs, and is not started or not ready by its probes."""
    if container.get("ready") or "running" not in (container.get("state") or {}):
        return None
    which = "readiness" if container.get("started") else "startup"
    warning = _warning(cluster, pod, "Unhealthy")
    return Stall(f"the {which} probe of pod {pod} fails" + (f": {warning}" if warning else ""))


def _last_words(cluster: Cluster, pod: str, container: str, ended: Tree, *, previous: bool) -> str:
    """What the container said last: its log, or what the kubelet kept of that."""
    lines = cluster.log(pod, container, previous=previous, lines=LOG_LINES)
    lines = lines or [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    return f"; its last words were {' / '.join(lines[-LOG_LINES:])!r}" if lines else ""


def _warning(cluster: Cluster, pod: str, reason: str | None = None) -> str | None:
    """The message of the newest warning about a pod."""
    events = cluster.list("Event", fieldSelector=f"involvedObject.name={pod}")
    warnings = [e for e in events if e.get("type") == "Warning" and reason in (None, e.get("reason"))]
    if not warnings:
        return None
    return _line(max(warnings, key=_when).get("message"))


def _when(event: Tree) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp"))


def _condition(thing: Tree, kind: str, status: str) -> Tree | None:
    conditions: list[Tree] = (thing.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == status), None)


def _told(thing: Tree) -> str:
    """The reason and the message that Kubernetes gives."""
    return _line(thing.get("message")) or str(thing.get("reason") or "no reason is given")


def _line(text: object) -> str:
    return " ".join(str(text or "").split()).rstrip(".")
