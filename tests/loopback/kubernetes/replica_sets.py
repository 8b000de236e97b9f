"""The ReplicaSet controller."""

from typing import Any

from tests.loopback.kubernetes.api import now
from tests.loopback.kubernetes.controller_base import Controller, is_ready, reference
from tests.loopback.kubernetes.kinds import POD, REPLICA_SET
from tests.loopback.kubernetes.status import ApiError
from tests.loopback.kubernetes.store import deep_copy

Object = dict[str, Any]


class ReplicaSets(Controller):
    """Creates and deletes the pods of each ReplicaSet."""

    def step(self) -> bool:
        """Create or delete one pod per ReplicaSet; return whether anything was written."""
        return sum(map(self._replica_set, self.api.store.all(REPLICA_SET))) > 0

    def _replica_set(self, replica_set: Object) -> bool:
        metadata, spec = replica_set["metadata"], replica_set["spec"]
        if metadata.get("deletionTimestamp"):
            return False
        pods = [pod for pod in self.owned(POD, replica_set) if not pod["metadata"].get("deletionTimestamp")]
        failure: list[Object] = []
        changed = False
        missing = spec["replicas"] - len(pods)
        if missing > 0:
            try:
                self._create_pod(replica_set)
                changed = True
            except ApiError as error:
                failure = self._failure(replica_set, str(error))
        elif missing < 0:
            # Delete unready pods before ready ones, and newer pods before older ones, as the real
            # controller does.
            pods.sort(key=lambda pod: (is_ready(pod), -int(pod["metadata"]["resourceVersion"])))
            victim = pods[0]["metadata"]
            self.api.delete(POD, victim["namespace"], victim["name"])
            changed = True
        ready = sum(is_ready(pod) for pod in pods)
        status = {
            "replicas": len(pods),
            "fullyLabeledReplicas": len(pods),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "observedGeneration": metadata["generation"],
        }
        if failure:
            status["conditions"] = failure
        if changed:
            return True
        return self.set_status(REPLICA_SET, replica_set, status)

    def _failure(self, replica_set: Object, reason: str) -> list[Object]:
        """The condition of a ReplicaSet that cannot create pods. Messages differ in the pod name of
        each attempt."""
        conditions = replica_set["status"].get("conditions") or []
        if (
            conditions
            and conditions[0]["message"].partition(" is forbidden")[2] == reason.partition(" is forbidden")[2]
        ):
            return conditions
        condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": reason}
        return [condition | {"lastTransitionTime": now()}]

    def _create_pod(self, replica_set: Object) -> None:
        template = deep_copy(replica_set["spec"]["template"])
        template["metadata"] |= {
            "generateName": f"{replica_set['metadata']['name']}-",
            "ownerReferences": [reference(REPLICA_SET, replica_set)],
        }
        self.create(POD, template, replica_set["metadata"]["namespace"])
