"""A small version of the Job controller, for Indexed Jobs:
each pod is a process of this machine.

A pod gets the command and ``JOB_COMPLETION_INDEX``. As in ``pkg/controller/job``, a failed index is
retried up to ``backoffLimitPerIndex`` times unless the ``podFailurePolicy`` says otherwise, and
more failed indexes than ``maxFailedIndexes`` end the Job and its other pods. A Job that fails has
the condition FailureTarget until its pods have terminated, then Failed. The node has no labels, so
a pod with a ``nodeSelector`` stays pending.
"""

import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.loopback.kubernetes.api import Api, now
from tests.loopback.kubernetes.controller_base import Controller
from tests.loopback.kubernetes.kinds import JOB, POD
from tests.loopback.kubernetes.kubelet import SELECTED_ELSEWHERE, unschedulable
from tests.loopback.kubernetes.users import config_errors

Object = dict[str, Any]
POLL_S = 0.05


@dataclass
class _Pods:
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By index."""
    pending: set[int] = field(default_factory=set)
    """Indexes whose pod cannot be scheduled, or has a container that the kubelet refuses."""
    started_s: float = field(default_factory=time.monotonic)
    failure: tuple[str, str] | None = None
    """Why the Job fails, while its pods terminate."""
    evicted: set[int] = field(default_factory=set)
    """Indexes whose running pod has the condition DisruptionTarget."""
    failures: dict[int, int] = field(default_factory=dict)
    """Failures that count, by index."""
    failed_pods: int = 0
    completed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def kill(self) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.running = {}


class Jobs(Controller):
    """Runs every Job that has not ended."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._pods: dict[str, _Pods] = {}  # by UID

    def step(self) -> bool:
        """Start, watch and end pods; return whether a status changed."""
        jobs = self.api.store.all(JOB)
        for uid in self._pods.keys() - {job["metadata"]["uid"] for job in jobs}:
            self._pods.pop(uid).kill()
        return sum([self._advance(job) for job in jobs if not _has_finished(job)]) > 0

    def due_in_s(self) -> float | None:
        """Processes may exit at any time."""
        return POLL_S if any(pods.running or pods.pending for pods in self._pods.values()) else None

    def evict(self, name: str, index: int) -> None:
        """Kill the running pod of an index of the Job ``name``, with the condition of an
        eviction."""
        job = next(job for job in self.api.store.all(JOB) if job["metadata"]["name"] == name)
        pods = self._pods[job["metadata"]["uid"]]
        pods.evicted.add(index)
        pods.running[index].kill()

    def stop(self) -> None:
        """End all processes."""
        for pods in self._pods.values():
            pods.kill()

    def _advance(self, job: Object) -> bool:
        spec = job["spec"]
        pods = self._pods.setdefault(job["metadata"]["uid"], _Pods())
        for index, process in [*pods.running.items()]:
            if (code := process.poll()) is not None:
                del pods.running[index]
                self._end_pod(pods, index, code, spec)
        if pods.failure:
            return not pods.running and self._end(job, pods, "Failed", *pods.failure)
        if time.monotonic() - pods.started_s > spec.get("activeDeadlineSeconds", math.inf):
            return self._fail(job, pods, "DeadlineExceeded", "Job was active longer than specified deadline")
        if len(pods.failed) > spec.get("maxFailedIndexes", spec["completions"]):
            message = "Job has exceeded the specified maximal number of failed indexes"
            return self._fail(job, pods, "MaxFailedIndexesExceeded", message)
        ended = pods.completed | pods.failed | pods.running.keys() | pods.pending
        waiting = [index for index in range(spec["completions"]) if index not in ended]
        for index in waiting[: spec["parallelism"] - len(pods.running) - len(pods.pending)]:
            if spec["template"]["spec"].get("nodeSelector"):
                pods.pending.add(index)
                self.warn(POD, _pod(job, index), "FailedScheduling", unschedulable(SELECTED_ELSEWHERE))
            elif errors := config_errors(spec["template"]["spec"]):
                pods.pending.add(index)
                self.warn(POD, _pod(job, index), "Failed", f"Error: {next(iter(errors.values()))}")
            else:
                pods.running[index] = _start(spec["template"]["spec"]["containers"][0], index)
        if pods.running or pods.pending:
            return self.set_status(JOB, job, _status(pods))
        if pods.failed:
            return self._end(job, pods, "Failed", "FailedIndexes", "Job has failed indexes")
        return self._end(job, pods, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")

    def _end_pod(self, pods: _Pods, index: int, code: int, spec: Object) -> None:
        if code == 0:
            pods.completed.add(index)
            return
        pods.failed_pods += 1
        action = _action(spec, code, evicted=index in pods.evicted)
        pods.evicted.discard(index)
        if action != "Ignore":
            pods.failures[index] = pods.failures.get(index, 0) + 1
        if action == "FailIndex" or pods.failures.get(index, 0) > spec["backoffLimitPerIndex"]:
            pods.failed.add(index)

    def _fail(self, job: Object, pods: _Pods, reason: str, message: str) -> bool:
        pods.failure = reason, message
        pods.pending.clear()
        for process in pods.running.values():
            process.terminate()
        return self.set_status(JOB, job, _status(pods) | _conditions(reason, message, "FailureTarget"))

    def _end(self, job: Object, pods: _Pods, kind: str, reason: str, message: str) -> bool:
        target = {"Failed": "FailureTarget", "Complete": "SuccessCriteriaMet"}[kind]
        return self.set_status(JOB, job, _status(pods) | _conditions(reason, message, target, kind))


def _has_finished(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(item["type"] in ("Complete", "Failed") for item in conditions)


def _conditions(reason: str, message: str, *kinds: str) -> Object:
    conditions = [
        {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
        for kind in kinds
    ]
    return {"conditions": conditions}


def _pod(job: Object, index: int) -> Object:
    """The pod of an index that an event is about."""
    metadata = job["metadata"]
    names = {"name": f"{metadata['name']}-{index}-pod", "uid": f"{metadata['uid']}-{index}"}
    return {"metadata": {**names, "namespace": metadata["namespace"], "resourceVersion": metadata["resourceVersion"]}}


def _status(pods: _Pods) -> Object:
    counts = {"active": len(pods.running) + len(pods.pending), "ready": len(pods.running)}
    counts |= {"succeeded": len(pods.completed), "failed": pods.failed_pods}
    return counts | {"completedIndexes": _intervals(pods.completed), "failedIndexes": _intervals(pods.failed)}


def _intervals(numbers: set[int]) -> str:
    """``0-3,7``, as in ``completedIndexes``."""
    intervals: list[list[int]] = []
    for number in sorted(numbers):
        if intervals and number == intervals[-1][1] + 1:
            intervals[-1][1] = number
        else:
            intervals.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in intervals)


def _action(spec: Object, code: int, *, evicted: bool) -> str:
    """The action of the first rule of the ``podFailurePolicy`` that matches."""
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        if evicted and any(item["type"] == "DisruptionTarget" for item in rule.get("onPodConditions") or ()):
            return rule["action"]
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return rule["action"]
    return "Count"


def _start(container: Object, index: int) -> subprocess.Popen[bytes]:
    program, *arguments = [*container["command"], *container.get("args", ())]
    command = [sys.executable if program == "python" else program, *arguments]
    variables = {item["name"]: item["value"] for item in container.get("env", ()) if "value" in item}
    return subprocess.Popen(command, env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)})
