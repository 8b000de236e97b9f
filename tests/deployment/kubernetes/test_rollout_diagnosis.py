"""What is read from pods: a container that runs for a while between its crashes, a pod that was evicted."""

from typing import Any, cast

import pytest

from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.objects import REVISION
from evernear.deployment.kubernetes.rollout_diagnosis import Diagnosis, diagnose
from evernear.settings import KubernetesSettings

DEPLOYMENT = {"spec": {"template": {"metadata": {"labels": {REVISION: "r"}}}}}


class Told:
    """What an API server tells of pods; asked for nothing else."""

    def __init__(self, container: dict[str, Any]) -> None:
        status = {"phase": "Running", "containerStatuses": [{"name": "torchserve", "image": "i"} | container]}
        self.pods: list[dict[str, Any]] = [{"metadata": {"name": "p"}, "status": status}]
        self.previous: list[bool] = []

    def list(self, kind: str, **_: str) -> list[Any]:
        return [*self.pods] if kind == "Pod" else []

    def log(self, pod: str, container: str, *, previous: bool, lines: int) -> Any:
        self.previous.append(previous)
        return ["last words"]


CRASHED = {"terminated": {"exitCode": 1}}


@pytest.mark.parametrize(
    ("state", "restarts", "ready", "persistent", "previous"),
    [
        (CRASHED, 0, False, True, [False]),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, 1, False, True, [True]),
        ({"running": {}}, 1, False, False, []),
        ({"running": {}}, 2, False, True, [True]),
        ({"running": {}}, 2, True, None, []),
    ],
)
def test_crashes_with_a_rest_between_them(
    state: dict[str, Any], restarts: int, ready: bool, persistent: bool | None, previous: list[bool]
) -> None:
    told = Told({"state": state, "lastState": CRASHED, "restartCount": restarts, "ready": ready, "started": ready})
    diagnosis = diagnose(cast("Cluster", told), KubernetesSettings(), DEPLOYMENT)
    assert (diagnosis.persistent if diagnosis else None) == persistent
    assert told.previous == previous


def test_a_pod_that_was_evicted_bars_nothing() -> None:
    """Its ReplicaSet has made another one; what is left of it may be weeks old, and nobody removes it."""
    told = Told({"state": {"running": {}}, "ready": False, "started": False})
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    starts = told.pods
    told.pods = [{"metadata": {"name": "gone"}, "status": evicted}]
    diagnosis = diagnose(cast("Cluster", told), KubernetesSettings(), DEPLOYMENT)
    assert diagnosis == Diagnosis("pod gone failed: The node was low on resource: memory")
    told.pods += starts
    diagnosis = diagnose(cast("Cluster", told), KubernetesSettings(), DEPLOYMENT)
    assert diagnosis == Diagnosis("the startup probe of pod p fails")
