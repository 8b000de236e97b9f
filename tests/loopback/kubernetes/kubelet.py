"""The node of the cluster: a scheduler and a kubelet that run nothing, but tell the stories of pods as real ones do.

Each pod advances by one status at a time, so whoever watches sees every one of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from loopback.kubernetes import quantities
from loopback.kubernetes.api import Api, now
from loopback.kubernetes.kinds import CLAIM, CONFIG_MAP, EVENT, NODE, POD, SECRET, Kind
from loopback.kubernetes.status import ApiError, bad_request
from loopback.kubernetes.stories import (
    NODE_IP,
    NODE_NAME,
    Address,
    Behaviour,
    Chapter,
    CrashLoop,
    Event,
    Lack,
    NotReady,
    Ready,
    Unschedulable,
    container_of,
    tell,
)

Object = dict[str, Any]


@dataclass
class _Progress:
    behaviour: Behaviour
    lack: Lack | None
    story: list[Chapter]
    since_s: float


class Node:
    """The one node, with its scheduler; ``behaviour`` says what each pod does."""

    def __init__(self, api: Api, behaviour: Callable[[Object], Behaviour]) -> None:
        self._api, self._behaviour = api, behaviour
        allocatable = {"cpu": "8", "memory": "32Gi", "pods": "110"}
        addresses = [{"type": "InternalIP", "address": NODE_IP}, {"type": "Hostname", "address": NODE_NAME}]
        node = api.create(NODE, {"metadata": {"name": NODE_NAME}})
        told = {"allocatable": allocatable, "capacity": allocatable, "addresses": addresses}
        api.edit(NODE, node | {"status": told}, manager="kubelet", subresource="status")
        self._allocatable = {name: quantities.value(amount) for name, amount in allocatable.items()}
        self._progress: dict[str, _Progress] = {}  # by the pods' uid
        self._hosts = iter(range(2, 2**16))

    def step(self) -> bool:
        """Advance every pod by one status; whether anything was written."""
        return sum(map(self._advance, self._api.store.all(POD))) > 0

    def due_in_s(self) -> float | None:
        """How long until a pod advances by the mere passing of time; None: never."""
        waits = [one.since_s + one.story[0].after_s for one in self._progress.values() if one.story]
        return max(min(waits) - time.monotonic(), 0.0) if waits else None

    def address(self, pod: Object, port: int) -> Address | None:
        """Where a port of a pod is in truth; None: nothing listens there."""
        behaviour = self._behaviour(pod)
        running = pod.get("status", {}).get("phase") == "Running"
        return behaviour.serves.get(port) if isinstance(behaviour, Ready) and running else None

    def log(self, pod: Object, container: str, *, previous: bool) -> str:
        """What a container wrote.

        Raises:
            ApiError: 400, it has not started, or there is no run before this one.
        """
        subject = f'container "{container}" in pod "{pod["metadata"]["name"]}"'
        statuses = [*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ())]
        found = next((status for status in statuses if status["name"] == container), {})
        has_ended = "terminated" in found.get("lastState", {})
        if previous and not has_ended:
            raise bad_request(f"previous terminated {subject} not found")
        state = found.get("state", {})
        if not has_ended and not state.keys() & {"running", "terminated"}:
            reason = state.get("waiting", {}).get("reason", "ContainerCreating")
            why = "trying and failing to pull image" if "Image" in reason else reason
            raise bad_request(f"{subject} is waiting to start: {why}")
        behaviour = self._behaviour(pod)
        speaks = isinstance(behaviour, Ready | NotReady | CrashLoop) and container == container_of(behaviour, pod)
        return behaviour.log if speaks else ""

    def _advance(self, pod: Object) -> bool:
        uid = pod["metadata"]["uid"]
        if pod["metadata"].get("deletionTimestamp"):
            self._progress.pop(uid, None)
            self._api.finish(POD, pod)
            return True
        behaviour, lack = self._refusal(pod) or self._behaviour(pod), next(_lacks(self._api, pod), None)
        progress = self._progress.get(uid)
        if progress is None or (progress.behaviour, progress.lack) != (behaviour, lack):
            host = next(self._hosts)
            pod_ip = pod.get("status", {}).get("podIP") or f"10.244.{host // 256}.{host % 256}"
            story = tell(pod, behaviour, pod_ip, lack)
            progress = self._progress[uid] = _Progress(behaviour, lack, story, time.monotonic())
        if not progress.story or time.monotonic() < progress.since_s + progress.story[0].after_s:
            return False
        self._write(pod, progress.story.pop(0))
        progress.since_s = time.monotonic()
        return True

    def _refusal(self, pod: Object) -> Unschedulable | None:
        """Why a pod can never fit: it asks for more than the whole node has, or for what it has not."""
        asked: dict[str, Decimal] = {}
        for container in pod["spec"]["containers"]:
            for name, amount in container.get("resources", {}).get("requests", {}).items():
                asked[name] = asked.get(name, Decimal(0)) + quantities.value(amount)
        short = [name for name, amount in asked.items() if amount > self._allocatable.get(name, Decimal(0))]
        reasons = [f"Insufficient {name}" for name in short]
        if pod["spec"].get("nodeSelector"):  # the node has no labels
            reasons = ["node(s) didn't match Pod's node affinity/selector"]
        if not reasons:
            return None
        return Unschedulable(
            f"0/1 nodes are available: 1 {', 1 '.join(reasons)}. preemption: 0/1 nodes are available: "
            "1 Preemption is not helpful for scheduling."
        )

    def _write(self, pod: Object, chapter: Chapter) -> None:
        if chapter.writer == "kubelet" and not pod["spec"].get("nodeName"):
            bound = pod | {"spec": pod["spec"] | {"nodeName": NODE_NAME}}
            pod = self._api.edit(POD, bound, manager="kube-scheduler", subresource="binding")
        told = pod | {"status": pod.get("status", {}) | chapter.status}
        self._api.edit(POD, told, manager=chapter.writer, subresource="status")
        for event in chapter.events:
            record(self._api, POD, pod, chapter.writer, event)


def record(api: Api, kind: Kind, subject: Object, component: str, event: Event) -> None:
    """Write an Event about an object, or count it up if it was written before."""
    metadata = subject["metadata"]
    same = (metadata["uid"], event.reason, event.message)
    with api.store.changed:
        for held in api.store.all(EVENT, metadata["namespace"]):
            if (held["involvedObject"]["uid"], held["reason"], held["message"]) == same:
                api.store.put(EVENT, held | {"count": held["count"] + 1, "lastTimestamp": now()})
                return
        written = {
            "metadata": {"name": f"{metadata['name']}.{api.store.version:016x}"},
            "involvedObject": {
                "kind": kind.name,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "apiVersion": kind.api_version,
                "resourceVersion": metadata["resourceVersion"],
            },
            "reason": event.reason,
            "message": event.message,
            "type": event.level,
            "source": {"component": component},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
            "reportingComponent": component,
            "reportingInstance": "",
        }
        try:
            api.create(EVENT, written, metadata["namespace"], trusted=True)
        except ApiError:
            return  # the namespace is going


def _lacks(api: Api, pod: Object) -> Iterator[Lack]:
    """Objects that the pod's volumes and environments need and that are not there."""
    spec, namespace = pod["spec"], pod["metadata"]["namespace"]

    def absent(kind: Kind, reference: Object | None, key: str = "name") -> str | None:
        if not reference or reference.get("optional"):
            return None
        name = reference[key]
        return None if api.store.get(kind, namespace, name) else f'{kind.name.lower()} "{name}" not found'

    for volume in spec.get("volumes") or ():
        if why := absent(CLAIM, volume.get("persistentVolumeClaim"), "claimName"):
            yield Lack(why)
        parts = volume.get("projected", {}).get("sources") or ()
        needs = [
            absent(CONFIG_MAP, volume.get("configMap")),
            absent(SECRET, volume.get("secret"), "secretName"),
            *(absent(CONFIG_MAP, part.get("configMap")) for part in parts),
            *(absent(SECRET, part.get("secret")) for part in parts),
        ]
        for why in filter(None, needs):
            yield Lack(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {why}')
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        sources = [variable.get("valueFrom", {}) for variable in container.get("env") or ()]
        needs = [
            *(absent(SECRET, source.get("secretKeyRef")) for source in sources),
            *(absent(CONFIG_MAP, source.get("configMapKeyRef")) for source in sources),
            *(absent(SECRET, source.get("secretRef")) for source in container.get("envFrom") or ()),
            *(absent(CONFIG_MAP, source.get("configMapRef")) for source in container.get("envFrom") or ()),
        ]
        for why in filter(None, needs):
            yield Lack(why, container["name"])
