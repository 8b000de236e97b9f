"""What pods do, and how a scheduler and a kubelet tell of it.

A *behaviour* says what a pod does. Its *story* is the list of statuses that follow from it, each with the events that
go with it, in the words of real schedulers and kubelets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopback.kubernetes.api import now

Object = dict[str, Any]
Address = tuple[str, int]
NODE_NAME, NODE_IP = "node-1", "192.0.2.10"
_CRASHES = 3  # the story ends in the back-off after so many; a real kubelet goes on, ever more slowly


@dataclass(frozen=True)
class Ready:
    """The containers run and the readiness probes pass, after so long.

    ``serves`` says where the container ports are in truth: a request that the API server proxies to port 8080 of the
    pod goes to ``serves[8080]``.
    """

    log: str = ""
    after_s: float = 0.0
    serves: Mapping[int, Address] = field(default_factory=dict)


@dataclass(frozen=True)
class NotReady:
    """The containers run and the readiness probe of one fails, for ever."""

    message: str = "Readiness probe failed: HTTP probe failed with statuscode: 503"
    log: str = ""
    container: str = ""  # empty: the first


@dataclass(frozen=True)
class CrashLoop:
    """A container, or an init container, ends with an error as often as it is started."""

    log: str = ""
    exit_code: int = 1
    reason: str = "Error"  # or OOMKilled
    container: str = ""  # empty: the first that is no init container


@dataclass(frozen=True)
class ImageMissing:
    """The registry refuses the image of a container, or of an init container."""

    why: str = "manifest unknown"
    container: str = ""  # empty: the first that is no init container


@dataclass(frozen=True)
class Unschedulable:
    """No node takes the pod."""

    message: str = (
        "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )


@dataclass(frozen=True)
class Stuck:
    """The containers are being created, for ever."""


Behaviour = Ready | NotReady | CrashLoop | ImageMissing | Unschedulable | Stuck


@dataclass(frozen=True)
class Lack:
    """An object that a pod needs and that is not there: for a volume, or for the environment of a ``container``."""

    message: str
    container: str = ""


@dataclass(frozen=True)
class Event:
    """What ``kubectl describe`` shows."""

    reason: str
    message: str
    level: str = "Normal"


@dataclass(frozen=True)
class Chapter:
    """One status of a pod, so long after the one before, and its events."""

    status: Object
    events: Sequence[Event] = ()
    after_s: float = 0.0
    writer: str = "kubelet"


def tell(pod: Object, behaviour: Behaviour, pod_ip: str, lack: Lack | None) -> list[Chapter]:
    """The story of a pod from now on."""
    if isinstance(behaviour, Unschedulable):
        return [_refused(behaviour.message)]
    story = list(_Story(pod, behaviour, pod_ip, lack).chapters())
    if pod.get("status", {}).get("phase") != "Running":
        return story
    # What runs is not created again; it only changes its ways.
    return [chapter for chapter in story if chapter.status["phase"] == "Running"] or story


def container_of(behaviour: Behaviour, pod: Object) -> str:
    """The name of the container that a behaviour is about."""
    named = behaviour.container if isinstance(behaviour, NotReady | CrashLoop | ImageMissing) else ""
    return named or pod["spec"]["containers"][0]["name"]


class _Story:
    """Tells the story of a pod that a node has taken."""

    def __init__(self, pod: Object, behaviour: Behaviour, pod_ip: str, lack: Lack | None) -> None:
        self._pod, self._behaviour, self._lack = pod, behaviour, lack
        self._init: list[Object] = pod["spec"].get("initContainers") or []
        self._main: list[Object] = pod["spec"]["containers"]
        self._address = {"podIP": pod_ip, "podIPs": [{"ip": pod_ip}]}
        reason = "PodInitializing" if self._init else "ContainerCreating"
        self._idle = [_waiting(container, reason) for container in self._main]

    def chapters(self) -> Iterator[Chapter]:
        """From the node's taking of the pod to where its behaviour leaves it."""
        name, namespace = self._pod["metadata"]["name"], self._pod["metadata"]["namespace"]
        if not self._pod["spec"].get("nodeName"):
            bound = Event("Scheduled", f"Successfully assigned {namespace}/{name} to {NODE_NAME}")
            yield Chapter(self._before_init(), [bound])
        if self._lack and not self._lack.container:
            yield Chapter(self._before_init(), [Event("FailedMount", self._lack.message, "Warning")])
            return
        if isinstance(self._behaviour, Stuck):
            return
        for position, container in enumerate(self._init):
            if self._fails(container):
                for status, events in self._trouble(container):
                    yield Chapter(self._in_init(position, status), events)
                return
            done = _terminated(container, 0, "Completed") | {"ready": True}
            yield Chapter(self._in_init(position, done), _started(container))
        yield from self._run()

    def _run(self) -> Iterator[Chapter]:
        for position, container in enumerate(self._main):
            if self._fails(container):
                for status, events in self._trouble(container):
                    yield Chapter(self._with_trouble(position, status), events)
                return
        events = [event for container in self._main for event in _started(container)]
        yield Chapter(self._running(ready=()), events)
        if isinstance(self._behaviour, NotReady):
            at_fault = container_of(self._behaviour, self._pod)
            others = [container["name"] for container in self._main if container["name"] != at_fault]
            unhealthy = Event("Unhealthy", self._behaviour.message, "Warning")
            yield Chapter(self._running(ready=others), [unhealthy])
        elif isinstance(self._behaviour, Ready):
            names = [container["name"] for container in self._main]
            yield Chapter(self._running(ready=names), after_s=self._behaviour.after_s)

    def _fails(self, container: Object) -> bool:
        if self._lack and self._lack.container == container["name"]:
            return True
        fails = isinstance(self._behaviour, CrashLoop | ImageMissing)
        return fails and container["name"] == container_of(self._behaviour, self._pod)

    def _trouble(self, container: Object) -> Iterator[tuple[Object, list[Event]]]:
        if self._lack and self._lack.container == container["name"]:
            failed = Event("Failed", f"Error: {self._lack.message}", "Warning")
            yield _waiting(container, "CreateContainerConfigError", self._lack.message), [failed]
        elif isinstance(self._behaviour, ImageMissing):
            yield from _no_image(container, self._behaviour.why)
        elif isinstance(self._behaviour, CrashLoop):
            yield from _crashes(container, self._behaviour, self._pod["metadata"])

    def _before_init(self) -> Object:
        return self._status("Pending", [_waiting(container, "PodInitializing") for container in self._init], self._idle)

    def _in_init(self, position: int, status: Object) -> Object:
        before = [_terminated(one, 0, "Completed") | {"ready": True} for one in self._init[:position]]
        after = [_waiting(one, "PodInitializing") for one in self._init[position + 1 :]]
        return self._status("Pending", [*before, status, *after], self._idle) | self._address

    def _with_trouble(self, position: int, status: Object) -> Object:
        """One container is in trouble; the others run where a container has run at all."""
        has_run = isinstance(self._behaviour, CrashLoop) and not self._lack
        others = [_running(one, ready=True) for one in self._main] if has_run else list(self._idle)
        others[position] = status
        return self._status("Running" if has_run else "Pending", self._initialised(), others) | self._address

    def _running(self, *, ready: Sequence[str]) -> Object:
        mains = [_running(container, ready=container["name"] in ready) for container in self._main]
        return self._status("Running", self._initialised(), mains) | self._address

    def _initialised(self) -> list[Object]:
        return [_terminated(one, 0, "Completed") | {"ready": True} for one in self._init]

    def _status(self, phase: str, inits: list[Object], mains: list[Object]) -> Object:
        ready = _all_ready("ContainersNotReady", "unready", mains)
        conditions = [
            _condition("PodReadyToStartContainers"),
            _condition("Initialized", *_all_ready("ContainersNotInitialized", "incomplete", inits)),
            _condition("Ready", *ready),
            _condition("ContainersReady", *ready),
            _condition("PodScheduled"),
        ]
        return {
            "phase": phase,
            "conditions": conditions,
            "hostIP": NODE_IP,
            "startTime": self._pod.get("status", {}).get("startTime") or now(),
            "qosClass": "Burstable",
            "containerStatuses": mains,
            **({"initContainerStatuses": inits} if inits else {}),
        }


def _refused(message: str) -> Chapter:
    condition = _condition("PodScheduled", "Unschedulable", message)
    events = [Event("FailedScheduling", message, "Warning")]
    return Chapter({"phase": "Pending", "conditions": [condition]}, events, writer="default-scheduler")


def _no_image(container: Object, why: str) -> Iterator[tuple[Object, list[Event]]]:
    image = container["image"]
    failed = (
        f'Failed to pull image "{image}": rpc error: code = NotFound desc = failed to pull and unpack image '
        f'"{image}": failed to resolve reference "{image}": {why}'
    )
    pulling = Event("Pulling", f'Pulling image "{image}"')
    errors = [pulling, Event("Failed", failed, "Warning"), Event("Failed", "Error: ErrImagePull", "Warning")]
    yield _waiting(container, "ErrImagePull", failed), errors
    back_off = f'Back-off pulling image "{image}"'
    errors = [Event("BackOff", back_off), Event("Failed", "Error: ImagePullBackOff", "Warning")]
    yield _waiting(container, "ImagePullBackOff", f"{back_off}: ErrImagePull: {failed}"), errors


def _crashes(container: Object, crash: CrashLoop, metadata: Object) -> Iterator[tuple[Object, list[Event]]]:
    pod = f"{metadata['name']}_{metadata['namespace']}({metadata['uid']})"
    ended = _terminated(container, crash.exit_code, crash.reason)
    for restarts in range(_CRASHES):
        past = {"restartCount": restarts} | ({"lastState": ended["state"]} if restarts else {})
        yield _running(container, ready=False) | past, _started(container)
        yield ended | past, []
        why = f"back-off {10 * 2**restarts}s restarting failed container={container['name']} pod={pod}"
        event = Event("BackOff", f"Back-off restarting failed container {container['name']} in pod {pod}", "Warning")
        waiting = {"restartCount": restarts, "lastState": ended["state"]}
        yield _waiting(container, "CrashLoopBackOff", why) | waiting, [event]


def _started(container: Object) -> list[Event]:
    name, image = container["name"], container["image"]
    return [
        Event("Pulled", f'Container image "{image}" already present on machine'),
        Event("Created", f"Created container: {name}"),
        Event("Started", f"Started container {name}"),
    ]


def _all_ready(reason: str, adjective: str, containers: list[Object]) -> tuple[str, str]:
    names = [one["name"] for one in containers if not one["ready"]]
    return (reason, f"containers with {adjective} status: [{' '.join(names)}]") if names else ("", "")


def _condition(name: str, reason: str = "", message: str = "") -> Object:
    """A condition that holds, unless there is a reason why not."""
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
