"""The deployment controller: rolling updates and their status.

It follows the deployment controller of Kubernetes (``sync.go``, ``progress.go``). Of its timers, it
has only ``progressDeadlineSeconds``, where each second takes ``second_s`` real seconds.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from tests.loopback.kubernetes.api import Api, now
from tests.loopback.kubernetes.controller_base import Controller, reference
from tests.loopback.kubernetes.kinds import DEPLOYMENT, POD, REPLICA_SET
from tests.loopback.kubernetes.store import deep_copy

Object = dict[str, Any]
REVISION = "deployment.kubernetes.io/revision"
HASH = "pod-template-hash"
_SUFFIXES = "bcdfghjklmnpqrstvwxz2456789"


@dataclass
class _Progress:
    summary: str  # of the status, without conditions
    since_s: float
    outcome: str = ""


class Deployments(Controller):
    """The deployment controller."""

    def __init__(self, api: Api, second_s: float) -> None:
        super().__init__(api)
        self._second_s = second_s
        self._progressing: dict[str, _Progress] = {}  # by uid

    def due_in_s(self) -> float | None:
        """Seconds until a rollout exceeds its progress deadline; None without a rollout in
        progress."""
        waits: list[float] = []
        for deployment in self.api.store.all(DEPLOYMENT):
            progress = self._progressing.get(deployment["metadata"]["uid"])
            if progress and not progress.outcome:
                waits.append(max(self._deadline_s(deployment, progress) - time.monotonic(), 0.001))
        return min(waits, default=None)

    def step(self) -> bool:
        """Advance every Deployment by one write; return whether anything was written."""
        return sum(map(self._deployment, self.api.store.all(DEPLOYMENT))) > 0

    def _deployment(self, deployment: Object) -> bool:
        if deployment["metadata"].get("deletionTimestamp"):
            return False
        replica_sets = self.owned(REPLICA_SET, deployment)
        new = next((item for item in replica_sets if _template(item) == _template(deployment)), None)
        old = [item for item in replica_sets if new is None or item["metadata"]["uid"] != new["metadata"]["uid"]]
        changed = self._revise(deployment, new, old)
        if changed or new is None:
            return True
        return self._scale(deployment, new, old) or self._report(deployment, new, old)

    def _revise(self, deployment: Object, new: Object | None, old: list[Object]) -> bool:
        """Create the ReplicaSet of the current template, or give the existing one the newest
        revision number."""
        revision = str(max((_revision(item) for item in old), default=0) + 1)
        if new is None:
            self._create_replica_set(deployment, revision)
            return True
        changed = False
        annotations = new["metadata"].setdefault("annotations", {})
        desired = self._copied_annotations(deployment)
        if _revision(new) < int(revision):
            desired[REVISION] = revision
        if any(annotations.get(key) != value for key, value in desired.items()):
            annotations |= desired
            self.api.edit(REPLICA_SET, new)
            changed = True
        if (deployment["metadata"].get("annotations") or {}).get(REVISION) != annotations[REVISION]:
            deployment["metadata"].setdefault("annotations", {})[REVISION] = annotations[REVISION]
            self.api.edit(DEPLOYMENT, deployment)
            changed = True
        return changed

    @staticmethod
    def _copied_annotations(deployment: Object) -> dict[str, str]:
        have = deployment["metadata"].get("annotations") or {}
        return {key: value for key, value in have.items() if key != REVISION}

    def _create_replica_set(self, deployment: Object, revision: str) -> None:
        metadata, spec = deployment["metadata"], deployment["spec"]
        template = deep_copy(spec["template"])
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()
        mark = "".join(_SUFFIXES[byte % len(_SUFFIXES)] for byte in digest[:10])
        template.setdefault("metadata", {}).setdefault("labels", {})[HASH] = mark
        selector = deep_copy(spec["selector"])
        selector.setdefault("matchLabels", {})[HASH] = mark
        replica_set = {
            "metadata": {
                "name": f"{metadata['name']}-{mark}",
                "labels": template["metadata"]["labels"],
                "annotations": self._copied_annotations(deployment) | {REVISION: revision},
                "ownerReferences": [reference(DEPLOYMENT, deployment)],
            },
            "spec": {"replicas": 0, "selector": selector, "template": template},
        }
        self.create(REPLICA_SET, replica_set, metadata["namespace"])

    def _scale(self, deployment: Object, new: Object, old: list[Object]) -> bool:
        """Replace the old pods by new ones: all at once, or one at a time with ``maxSurge: 1`` and
        ``maxUnavailable: 0``."""
        desired, current = deployment["spec"]["replicas"], new["spec"]["replicas"]
        if current > desired:
            return self._resize(new, desired)
        left = [item for item in old if item["spec"]["replicas"]]
        if deployment["spec"]["strategy"]["type"] == "Recreate":
            if left:
                return self._resize(left[0], 0)
            return not any(self.owned(POD, item) for item in old) and self._resize(new, desired)
        if current < desired >= current + sum(item["spec"]["replicas"] for item in left):
            return self._resize(new, current + 1)
        left.sort(key=lambda item: _available(item) == item["spec"]["replicas"])
        is_enough = sum(map(_available, [new, *left])) > desired
        if left and (is_enough or _available(left[0]) < left[0]["spec"]["replicas"]):
            return self._resize(left[0], left[0]["spec"]["replicas"] - 1)
        return False

    def _resize(self, replica_set: Object, replicas: int) -> bool:
        if replica_set["spec"]["replicas"] == replicas:
            return False
        replica_set["spec"]["replicas"] = replicas
        self.api.edit(REPLICA_SET, replica_set)
        return True

    def _report(self, deployment: Object, new: Object | None, old: list[Object]) -> bool:
        sets = [item for item in [new, *old] if item is not None]
        count = {
            field: sum(item.get("status", {}).get(field, 0) for item in sets)
            for field in ("replicas", "readyReplicas", "availableReplicas")
        }
        updated = new.get("status", {}).get("replicas", 0) if new else 0
        desired = deployment["spec"]["replicas"]
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            **{field: value for field, value in count.items() if value},
            **({"updatedReplicas": updated} if updated else {}),
        }
        if unavailable := max(count["replicas"] - count["availableReplicas"], desired - count["availableReplicas"], 0):
            status["unavailableReplicas"] = unavailable
        previous = deployment.get("status", {})
        conditions = [self._availability(deployment, count["availableReplicas"])]
        complete = updated == desired == count["replicas"] == count["availableReplicas"]
        conditions.append(self._progress(deployment, new, status, complete=complete))
        conditions += [
            condition | {"lastUpdateTime": condition["lastTransitionTime"]}
            for item in sets
            for condition in item.get("status", {}).get("conditions", ())
            if condition["type"] == "ReplicaFailure"
        ][:1]
        status["conditions"] = [_preserve_times(condition, previous.get("conditions", [])) for condition in conditions]
        return self.set_status(DEPLOYMENT, deployment, status)

    @staticmethod
    def _availability(deployment: Object, available: int) -> Object:
        if available >= deployment["spec"]["replicas"]:
            message = "Deployment has minimum availability."
            return _condition("Available", "True", "MinimumReplicasAvailable", message)
        message = "Deployment does not have minimum availability."
        return _condition("Available", "False", "MinimumReplicasUnavailable", message)

    def _progress(self, deployment: Object, new: Object | None, status: Object, *, complete: bool) -> Object:
        uid, name = deployment["metadata"]["uid"], new["metadata"]["name"] if new else ""
        summary = json.dumps({k: v for k, v in status.items() if k != "unavailableReplicas"}, sort_keys=True)
        progress = self._progressing.get(uid)
        if progress is None or progress.summary != summary:
            progress = self._progressing[uid] = _Progress(summary, time.monotonic())
        if complete:
            progress.outcome = "complete"
            message = f'ReplicaSet "{name}" has successfully progressed.'
            return _condition("Progressing", "True", "NewReplicaSetAvailable", message)
        if time.monotonic() >= self._deadline_s(deployment, progress):
            progress.outcome = "given up"
            message = f'ReplicaSet "{name}" has timed out progressing.'
            return _condition("Progressing", "False", "ProgressDeadlineExceeded", message)
        progress.outcome = ""
        return _condition("Progressing", "True", "ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.')

    def _deadline_s(self, deployment: Object, progress: "_Progress") -> float:
        """The progress deadline, on the monotonic clock."""
        return progress.since_s + deployment["spec"]["progressDeadlineSeconds"] * self._second_s


def _template(owner: Object) -> Object:
    template = deep_copy(owner["spec"]["template"])
    (template.setdefault("metadata", {}).setdefault("labels", {})).pop(HASH, None)
    template["metadata"].pop("creationTimestamp", None)
    return template


def _revision(replica_set: Object) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(REVISION, 0))


def _available(replica_set: Object) -> int:
    return replica_set.get("status", {}).get("availableReplicas", 0)


def _condition(name: str, holds: str, reason: str, message: str) -> Object:
    when = {"lastTransitionTime": now(), "lastUpdateTime": now()}
    return {"type": name, "status": holds, "reason": reason, "message": message} | when


def _preserve_times(condition: Object, before: list[Object]) -> Object:
    """Preserve the times of a condition that has not changed."""
    previous = next((item for item in before if item["type"] == condition["type"]), None)
    if previous is None or any(previous[field] != condition[field] for field in ("status", "reason", "message")):
        return condition
    return previous
