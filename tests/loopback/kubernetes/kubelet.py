"""The node of the cluster: a scheduler and a kubelet that run nothing but report pod statuses like
real ones.

Each pod advances by one status at a time, so a watch sees all of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tests.loopback.kubernetes.api import Api, now
from tests.loopback.kubernetes.kinds import CLAIM, CONFIG_MAP, EVENT, NODE, POD, SECRET, Kind
from tests.loopback.kubernetes.pod_lifecycle import (
    NODE_IP,
    NODE_NAME,
    Address,
    CrashLoop,
    Event,
    MissingObject,
    NotReady,
    PodBehavior,
    Ready,
    StatusUpdate,
    Unschedulable,
    container_of,
    status_updates,
)
from tests.loopback.kubernetes.status import ApiError, bad_request
from tests.loopback.kubernetes.users import config_error
from tests.loopback.kubernetes.validation import amount_of

Object = dict[str, Any]
SELECTED_ELSEWHERE = "node(s) didn't match Pod's node affinity/selector"


@dataclass
class _Progress:
    behavior: PodBehavior
    missing: MissingObject | None
    updates: list[StatusUpdate]
    since_s: float


class Node:
    """The node and its scheduler; ``behavior`` returns the behavior of each pod."""

    def __init__(self, api: Api, behavior: Callable[[Object], PodBehavior]) -> None:
        self._api, self._behavior = api, behavior
        allocatable = {"cpu": "8", "memory": "32Gi", "pods": "110"}
        addresses = [{"type": "InternalIP", "address": NODE_IP}, {"type": "Hostname", "address": NODE_NAME}]
        node = api.create(NODE, {"metadata": {"name": NODE_NAME}})
        status = {"allocatable": allocatable, "capacity": allocatable, "addresses": addresses}
        api.edit(NODE, node | {"status": status})
        self._allocatable = {name: amount_of(amount) for name, amount in allocatable.items()}
        self._progress: dict[str, _Progress] = {}  # by pod UID
        self._hosts = iter(range(2, 2**16))

    def step(self) -> bool:
        """Advance every pod by one status; return whether anything was written."""
        return sum(map(self._advance, self._api.store.all(POD))) > 0

    def due_in_s(self) -> float | None:
        """Seconds until the next timed status update of a pod; None if none is pending."""
        waits = [item.since_s + item.updates[0].after_s for item in self._progress.values() if item.updates]
        return max(min(waits) - time.monotonic(), 0.0) if waits else None

    def address(self, pod: Object, port: int) -> Address | None:
        """Return the real address behind a port of a pod, or None if nothing listens there."""
        behavior = self._behavior(pod)
        running = pod.get("status", {}).get("phase") == "Running"
        return behavior.serves.get(port) if isinstance(behavior, Ready) and running else None

    def log(self, pod: Object, container: str, *, previous: bool) -> str:
        """Return the log of a container.

        Raises:
            ApiError: 400, the container has not started, or has no previous run.
        """
        subject = f'container "{container}" in pod "{pod["metadata"]["name"]}"'
        statuses = [*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ())]
        container_status = next((status for status in statuses if status["name"] == container), {})
        has_ended = "terminated" in container_status.get("lastState", {})
        if previous and not has_ended:
            raise bad_request(f"previous terminated {subject} not found")
        state = container_status.get("state", {})
        if not has_ended and not state.keys() & {"running", "terminated"}:
            reason = state.get("waiting", {}).get("reason", "ContainerCreating")
            message = "trying and failing to pull image" if "Image" in reason else reason
            raise bad_request(f"{subject} is waiting to start: {message}")
        behavior = self._behavior(pod)
        logs = isinstance(behavior, Ready | NotReady | CrashLoop) and container == container_of(behavior, pod)
        return behavior.log if logs else ""

    def _advance(self, pod: Object) -> bool:
        uid = pod["metadata"]["uid"]
        if pod["metadata"].get("deletionTimestamp"):
            self._progress.pop(uid, None)
            self._api.finish(POD, pod)
            return True
        behavior, missing = (
            self._unschedulable(pod) or self._behavior(pod),
            next(_missing_objects(self._api, pod), None),
        )
        progress = self._progress.get(uid)
        if progress is None or (progress.behavior, progress.missing) != (behavior, missing):
            host = next(self._hosts)
            pod_ip = pod.get("status", {}).get("podIP") or f"10.244.{host // 256}.{host % 256}"
            updates = status_updates(pod, behavior, pod_ip, missing)
            progress = self._progress[uid] = _Progress(behavior, missing, updates, time.monotonic())
        if not progress.updates or time.monotonic() < progress.since_s + progress.updates[0].after_s:
            return False
        self._write(pod, progress.updates.pop(0))
        progress.since_s = time.monotonic()
        return True

    def _unschedulable(self, pod: Object) -> Unschedulable | None:
        """Why a pod can never be scheduled: it requests more than the node has, or a resource that
        the node lacks."""
        requested: dict[str, Decimal] = {}
        for container in pod["spec"]["containers"]:
            for name, amount in container.get("resources", {}).get("requests", {}).items():
                requested[name] = requested.get(name, Decimal(0)) + amount_of(amount)
        short = [name for name, amount in requested.items() if amount > self._allocatable.get(name, Decimal(0))]
        reasons = [f"Insufficient {name}" for name in short]
        if pod["spec"].get("nodeSelector"):  # the node has no labels
            reasons = [SELECTED_ELSEWHERE]
        return Unschedulable(unschedulable(*reasons)) if reasons else None

    def _write(self, pod: Object, update: StatusUpdate) -> None:
        if "hostIP" in update.status and not pod["spec"].get("nodeName"):
            bound = pod | {"spec": pod["spec"] | {"nodeName": NODE_NAME}}
            pod = self._api.edit(POD, bound)
        updated = pod | {"status": pod.get("status", {}) | update.status}
        self._api.edit(POD, updated)
        for event in update.events:
            record(self._api, POD, pod, event)


def unschedulable(*reasons: str) -> str:
    """The scheduler's message about a pod that the node cannot run."""
    return (
        f"0/1 nodes are available: 1 {', 1 '.join(reasons)}. preemption: 0/1 nodes are available: "
        "1 Preemption is not helpful for scheduling."
    )


def record(api: Api, kind: Kind, subject: Object, event: Event) -> None:
    """Write an Event about an object, or increment the count of an existing one."""
    metadata = subject["metadata"]
    same = (metadata["uid"], event.reason, event.message)
    with api.store.changed:
        for existing in api.store.all(EVENT, metadata["namespace"]):
            if (existing["involvedObject"]["uid"], existing["reason"], existing["message"]) == same:
                api.store.put(EVENT, existing | {"count": existing["count"] + 1, "lastTimestamp": now()})
                return
        written = {
            "metadata": {"name": f"{metadata['name']}.{api.store.version:016x}"},
            "involvedObject": {
                "kind": kind.name,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "reason": event.reason,
            "message": event.message,
            "type": event.level,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        try:
            api.create(EVENT, written, metadata["namespace"], trusted=True)
        except ApiError:
            return  # the namespace is being deleted


def _missing_objects(api: Api, pod: Object) -> Iterator[MissingObject]:
    """The missing objects that the pod's volumes and environment variables reference, and users
    that the kubelet refuses."""
    spec, namespace = pod["spec"], pod["metadata"]["namespace"]

    def absent(kind: Kind, reference: Object | None, key: str = "name") -> str | None:
        if not reference or reference.get("optional"):
            return None
        name = reference[key]
        return None if api.store.get(kind, namespace, name) else f'{kind.name.lower()} "{name}" not found'

    for volume in spec.get("volumes") or ():
        if reason := absent(CLAIM, volume.get("persistentVolumeClaim"), "claimName"):
            yield MissingObject(reason)
        parts = volume.get("projected", {}).get("sources") or ()
        needs = [
            absent(CONFIG_MAP, volume.get("configMap")),
            absent(SECRET, volume.get("secret"), "secretName"),
            *(absent(CONFIG_MAP, part.get("configMap")) for part in parts),
            *(absent(SECRET, part.get("secret")) for part in parts),
        ]
        for reason in filter(None, needs):
            yield MissingObject(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {reason}')
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        sources = [variable.get("valueFrom", {}) for variable in container.get("env") or ()]
        needs = [
            *(absent(SECRET, source.get("secretKeyRef")) for source in sources),
            *(absent(CONFIG_MAP, source.get("configMapKeyRef")) for source in sources),
            *(absent(SECRET, source.get("secretRef")) for source in container.get("envFrom") or ()),
            *(absent(CONFIG_MAP, source.get("configMapRef")) for source in container.get("envFrom") or ()),
        ]
        for reason in filter(None, (*needs, config_error(spec, container))):
            yield MissingObject(reason, container["name"])
