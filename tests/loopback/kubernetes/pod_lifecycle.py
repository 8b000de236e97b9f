"""Pod behaviors and the statuses that a scheduler and a kubelet report for them.

A *behavior* determines how a pod runs. It translates into a sequence of statuses, each with its
events, in the wording of the real scheduler and kubelet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.loopback.kubernetes.api import now

Object = dict[str, Any]
Address = tuple[str, int]
NODE_NAME, NODE_IP = "node-1", "192.0.2.10"
_CRASHES = 3  # the sequence ends in the last back-off; a real kubelet continues, with growing delays


@dataclass(frozen=True)
class Ready:
    """The containers run, and the readiness probes pass after ``after_s``.

    ``serves`` maps container ports to real addresses: a request that the API server proxies to port
    8080 of the pod goes to ``serves[8080]``.
    """

    log: str = ""
    after_s: float = 0.0
    serves: Mapping[int, Address] = field(default_factory=dict)


@dataclass(frozen=True)
class NotReady:
    """The containers run, and the readiness probe of one keeps failing."""

    message: str = "Readiness probe failed: HTTP probe failed with statuscode: 503"
    log: str = ""
    container: str = ""  # empty: the first


@dataclass(frozen=True)
class CrashLoop:
    """A container or an init container fails on every start."""

    log: str = ""
    exit_code: int = 1
    reason: str = "Error"  # or OOMKilled
    container: str = ""  # empty: the first main container


@dataclass(frozen=True)
class ImageMissing:
    """The registry does not have the image of a container or an init container."""

    why: str = "manifest unknown"
    container: str = ""  # empty: the first main container


@dataclass(frozen=True)
class Unschedulable:
    """The pod fits on no node."""

    message: str = (
        "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )


@dataclass(frozen=True)
class Stuck:
    """The containers remain in ContainerCreating."""


PodBehavior = Ready | NotReady | CrashLoop | ImageMissing | Unschedulable | Stuck


@dataclass(frozen=True)
class MissingObject:
    """A missing object that a volume or the environment of a ``container`` references, or another
    reason not to create the container."""

    message: str
    container: str = ""


@dataclass(frozen=True)
class Event:
    """An event of ``kubectl describe``."""

    reason: str
    message: str
    level: str = "Normal"


@dataclass(frozen=True)
class StatusUpdate:
    """A status of a pod, its events, and the delay after the previous status."""

    status: Object
    events: Sequence[Event] = ()
    after_s: float = 0.0


def status_updates(
    pod: Object, behavior: PodBehavior, pod_ip: str, missing: MissingObject | None
) -> list[StatusUpdate]:
    """Return the remaining status updates of a pod."""
    if isinstance(behavior, Unschedulable):
        return [_unschedulable_update(behavior.message)]
    updates = list(_StatusSequence(pod, behavior, pod_ip, missing).updates())
    if pod.get("status", {}).get("phase") != "Running":
        return updates
    # A running pod is not created again; only its behavior changes.
    return [update for update in updates if update.status["phase"] == "Running"] or updates


def container_of(behavior: PodBehavior, pod: Object) -> str:
    """Return the name of the container that a behavior affects."""
    named = behavior.container if isinstance(behavior, NotReady | CrashLoop | ImageMissing) else ""
    return named or pod["spec"]["containers"][0]["name"]


class _StatusSequence:
    """Generates the status updates of a scheduled pod."""

    def __init__(self, pod: Object, behavior: PodBehavior, pod_ip: str, missing: MissingObject | None) -> None:
        self._pod, self._behavior, self._missing = pod, behavior, missing
        self._init: list[Object] = pod["spec"].get("initContainers") or []
        self._main: list[Object] = pod["spec"]["containers"]
        self._address = {"podIP": pod_ip}
        reason = "PodInitializing" if self._init else "ContainerCreating"
        self._idle = [_waiting(container, reason) for container in self._main]

    def updates(self) -> Iterator[StatusUpdate]:
        """Yield the updates from scheduling to the final status of the behavior."""
        name, namespace = self._pod["metadata"]["name"], self._pod["metadata"]["namespace"]
        if not self._pod["spec"].get("nodeName"):
            bound = Event("Scheduled", f"Successfully assigned {namespace}/{name} to {NODE_NAME}")
            yield StatusUpdate(self._before_init(), [bound])
        if self._missing and not self._missing.container:
            yield StatusUpdate(self._before_init(), [Event("FailedMount", self._missing.message, "Warning")])
            return
        if isinstance(self._behavior, Stuck):
            return
        for position, container in enumerate(self._init):
            if self._fails(container):
                for status, events in self._failures(container):
                    yield StatusUpdate(self._in_init(position, status), events)
                return
            completed = _terminated(container, 0, "Completed") | {"ready": True}
            yield StatusUpdate(self._in_init(position, completed))
        yield from self._run()

    def _run(self) -> Iterator[StatusUpdate]:
        for position, container in enumerate(self._main):
            if self._fails(container):
                for status, events in self._failures(container):
                    yield StatusUpdate(self._with_failure(position, status), events)
                return
        yield StatusUpdate(self._running(ready=()))
        if isinstance(self._behavior, NotReady):
            at_fault = container_of(self._behavior, self._pod)
            others = [container["name"] for container in self._main if container["name"] != at_fault]
            unhealthy = Event("Unhealthy", self._behavior.message, "Warning")
            yield StatusUpdate(self._running(ready=others), [unhealthy])
        elif isinstance(self._behavior, Ready):
            names = [container["name"] for container in self._main]
            yield StatusUpdate(self._running(ready=names), after_s=self._behavior.after_s)

    def _fails(self, container: Object) -> bool:
        if self._missing and self._missing.container == container["name"]:
            return True
        fails = isinstance(self._behavior, CrashLoop | ImageMissing)
        return fails and container["name"] == container_of(self._behavior, self._pod)

    def _failures(self, container: Object) -> Iterator[tuple[Object, list[Event]]]:
        if self._missing and self._missing.container == container["name"]:
            failed = Event("Failed", f"Error: {self._missing.message}", "Warning")
            yield _waiting(container, "CreateContainerConfigError", self._missing.message), [failed]
        elif isinstance(self._behavior, ImageMissing):
            yield from _image_pull_failures(container, self._behavior.why)
        elif isinstance(self._behavior, CrashLoop):
            yield from _crash_failures(container, self._behavior, self._pod["metadata"])

    def _before_init(self) -> Object:
        return self._status("Pending", [_waiting(container, "PodInitializing") for container in self._init], self._idle)

    def _in_init(self, position: int, status: Object) -> Object:
        before = [_terminated(item, 0, "Completed") | {"ready": True} for item in self._init[:position]]
        after = [_waiting(item, "PodInitializing") for item in self._init[position + 1 :]]
        return self._status("Pending", [*before, status, *after], self._idle) | self._address

    def _with_failure(self, position: int, status: Object) -> Object:
        """One container fails; the others run if the failing container has started at all."""
        has_run = isinstance(self._behavior, CrashLoop) and not self._missing
        others = [_running(item, ready=True) for item in self._main] if has_run else list(self._idle)
        others[position] = status
        return self._status("Running" if has_run else "Pending", self._initialized(), others) | self._address

    def _running(self, *, ready: Sequence[str]) -> Object:
        statuses = [_running(container, ready=container["name"] in ready) for container in self._main]
        return self._status("Running", self._initialized(), statuses) | self._address

    def _initialized(self) -> list[Object]:
        return [_terminated(item, 0, "Completed") | {"ready": True} for item in self._init]

    def _status(self, phase: str, init_statuses: list[Object], statuses: list[Object]) -> Object:
        ready = _all_ready("ContainersNotReady", "unready", statuses)
        conditions = [
            _condition("Initialized", *_all_ready("ContainersNotInitialized", "incomplete", init_statuses)),
            _condition("Ready", *ready),
            _condition("PodScheduled"),
        ]
        return {
            "phase": phase,
            "conditions": conditions,
            "hostIP": NODE_IP,
            "containerStatuses": statuses,
            **({"initContainerStatuses": init_statuses} if init_statuses else {}),
        }


def _unschedulable_update(message: str) -> StatusUpdate:
    condition = _condition("PodScheduled", "Unschedulable", message)
    events = [Event("FailedScheduling", message, "Warning")]
    return StatusUpdate({"phase": "Pending", "conditions": [condition]}, events)


def _image_pull_failures(container: Object, reason: str) -> Iterator[tuple[Object, list[Event]]]:
    image = container["image"]
    failed = (
        f'Failed to pull image "{image}": rpc error: code = NotFound desc = failed to pull and unpack image '
        f'"{image}": failed to resolve reference "{image}": {reason}'
    )
    errors = [Event("Failed", failed, "Warning"), Event("Failed", "Error: ErrImagePull", "Warning")]
    yield _waiting(container, "ErrImagePull", failed), errors
    back_off = f'Back-off pulling image "{image}"'
    errors = [Event("BackOff", back_off), Event("Failed", "Error: ImagePullBackOff", "Warning")]
    yield _waiting(container, "ImagePullBackOff", f"{back_off}: ErrImagePull: {failed}"), errors


def _crash_failures(container: Object, crash: CrashLoop, metadata: Object) -> Iterator[tuple[Object, list[Event]]]:
    pod = f"{metadata['name']}_{metadata['namespace']}({metadata['uid']})"
    ended = _terminated(container, crash.exit_code, crash.reason)
    for restarts in range(_CRASHES):
        past = {"restartCount": restarts} | ({"lastState": ended["state"]} if restarts else {})
        yield _running(container, ready=False) | past, []
        yield ended | past, []
        reason = f"back-off {10 * 2**restarts}s restarting failed container={container['name']} pod={pod}"
        event = Event("BackOff", f"Back-off restarting failed container {container['name']} in pod {pod}", "Warning")
        waiting = {"restartCount": restarts, "lastState": ended["state"]}
        yield _waiting(container, "CrashLoopBackOff", reason) | waiting, [event]


def _all_ready(reason: str, adjective: str, containers: list[Object]) -> tuple[str, str]:
    names = [item["name"] for item in containers if not item["ready"]]
    return (reason, f"containers with {adjective} status: [{' '.join(names)}]") if names else ("", "")


def _condition(name: str, reason: str = "", message: str = "") -> Object:
    """A condition that is true unless a reason is given."""
    condition = {"type": name, "lastProbeTime": None, "lastTransitionTime": now()}
    if not reason:
        return condition | {"status": "True"}
    return condition | {"status": "False", "reason": reason, "message": message}


def _container_status(container: Object, state: Object, *, ready: bool = False) -> Object:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "" if "waiting" in state else container["image"],
        "ready": ready,
        "started": "running" in state,
        "restartCount": 0,
        "state": state,
        "lastState": {},
    }


def _waiting(container: Object, reason: str, message: str = "") -> Object:
    return _container_status(container, {"waiting": {"reason": reason} | ({"message": message} if message else {})})


def _running(container: Object, *, ready: bool) -> Object:
    return _container_status(container, {"running": {"startedAt": now()}}, ready=ready)


def _terminated(container: Object, exit_code: int, reason: str) -> Object:
    ended = {"exitCode": exit_code, "reason": reason, "startedAt": now(), "finishedAt": now()}
    return _container_status(container, {"terminated": ended})
