"""Minimal controllers of a cluster: each step reads the objects and makes the next write toward the
desired state."""

import threading
import time
from typing import Any

from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.deployments import Deployments
from tests.loopback.kubernetes.fields import Manager
from tests.loopback.kubernetes.jobs import Jobs
from tests.loopback.kubernetes.kinds import (
    AUTOSCALER,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    NAMESPACE,
    SERVICE_ACCOUNT,
)
from tests.loopback.kubernetes.kubelet import Node
from tests.loopback.kubernetes.replica_sets import ReplicaSets
from tests.loopback.kubernetes.train_jobs import TrainJobs

Object = dict[str, Any]
_SCALER = Manager("kube-controller-manager", "Update", DEPLOYMENT.api_version, "scale")
_PAUSE_S = 0.002  # lets clients observe intermediate states


class Controllers:
    """One thread that runs the controllers and the node in turn until no work remains."""

    def __init__(self, api: Api, node: Node, second_s: float) -> None:
        self._api, self._node = api, node
        self._deployments, self._replica_sets = Deployments(api, second_s), ReplicaSets(api)
        self.train_jobs, self.jobs = TrainJobs(api), Jobs(api)
        self._seen = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Reconcile again although no object has changed."""
        with self._api.store.changed:
            self._seen = -1
            self._api.store.changed.notify_all()

    def stop(self) -> None:
        """Stop the thread and raise the exception of a failed controller, which is a bug in this
        package."""
        self._stopping = True
        self.wake()
        self._thread.join()
        self.train_jobs.stop()
        self.jobs.stop()
        if self.failure:
            raise self.failure

    def _run(self) -> None:
        steps = (
            self._namespaces,
            self._autoscalers,
            self._deployments.step,
            self._replica_sets.step,
            self._node.step,
            self.train_jobs.step,
            self.jobs.step,
            self._collect_garbage,
        )
        changed = self._api.store.changed
        try:
            while not self._stopping:
                with changed:
                    self._seen = self._api.store.version
                    if not sum(step() for step in steps):
                        changed.wait_for(self._has_work, self._due_in_s())
                time.sleep(_PAUSE_S)
        except Exception as error:
            self.failure = error

    def _has_work(self) -> bool:
        return self._stopping or self._api.store.version != self._seen

    def _due_in_s(self) -> float | None:
        waits = (self._node.due_in_s(), self._deployments.due_in_s(), self.train_jobs.due_in_s(), self.jobs.due_in_s())
        return min((wait for wait in waits if wait is not None), default=None)

    def _namespaces(self) -> bool:
        changed = False
        for namespace in self._api.store.all(NAMESPACE):
            name = namespace["metadata"]["name"]
            if not self._api.store.get(SERVICE_ACCOUNT, name, "default"):
                self._api.create(SERVICE_ACCOUNT, {"metadata": {"name": "default"}}, name, trusted=True)
                self._api.create(CONFIG_MAP, {"metadata": {"name": "kube-root-ca.crt"}, "data": {}}, name, trusted=True)
                changed = True
        return changed

    def _autoscalers(self) -> bool:
        """Keep the replicas within the bounds; metrics are not simulated."""
        changed = False
        for autoscaler in self._api.store.all(AUTOSCALER):
            spec, target = autoscaler["spec"], autoscaler["spec"]["scaleTargetRef"]
            namespace = autoscaler["metadata"]["namespace"]
            deployment = self._api.store.get(DEPLOYMENT, namespace, target["name"])
            if target["kind"] != "Deployment" or deployment is None or deployment["spec"]["replicas"] == 0:
                continue
            current = deployment["spec"]["replicas"]
            desired = min(max(current, spec["minReplicas"]), spec["maxReplicas"])
            if desired != current:
                scaled = deployment | {"spec": deployment["spec"] | {"replicas": desired}}
                self._api.replace(DEPLOYMENT, scaled, namespace, target["name"], manager=_SCALER)
                changed = True
        return changed

    def _collect_garbage(self) -> bool:
        """Delete dependents of deleted owners."""
        changed = False
        everything = [(kind, item) for kind, item in self._api.store.everything() if kind is not EVENT]
        alive = {subject["metadata"]["uid"] for _, subject in everything}
        for kind, subject in everything:
            metadata = subject["metadata"]
            owners = {owner["uid"] for owner in metadata.get("ownerReferences") or ()}
            if owners and not owners & alive and not metadata.get("deletionTimestamp"):
                self._api.delete(kind, metadata["namespace"], metadata["name"])
                changed = True
        return changed
