"""Diagnosis of pods: a container that runs for a while between its crashes, an evicted pod."""

from typing import Any, cast

import pytest

from evernear.deployment.kubernetes.cluster import REVISION, Cluster
from evernear.deployment.kubernetes.rollout import Diagnosis, diagnose
from evernear.settings import KubernetesSettings

DEPLOYMENT = {"spec": {"template": {"metadata": {"labels": {REVISION: "r"}}}}}


class FakeCluster:
    """A cluster with one pod, which supports only the calls that a diagnosis makes."""

    def __init__(self, container: dict[str, Any]) -> None:
        status = {"phase": "Running", "containerStatuses": [{"name": "torchserve", "image": "i"} | container]}
        self.pods: list[dict[str, Any]] = [{"metadata": {"name": "p"}, "status": status}]
        self.previous: list[bool] = []

    def list(self, kind: str, **_: str) -> list[Any]:
        return [*self.pods] if kind == "Pod" else []

    def log(self, pod: str, container: str, *, previous: bool, lines: int) -> Any:
        self.previous.append(previous)
        return ["last line"]


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
def test_repeated_crashes_are_persistent_even_while_the_container_runs(
    state: dict[str, Any], restarts: int, ready: bool, persistent: bool | None, previous: list[bool]
) -> None:
    cluster = FakeCluster(
        {"state": state, "lastState": CRASHED, "restartCount": restarts, "ready": ready, "started": ready}
    )
    diagnosis = diagnose(cast("Cluster", cluster), KubernetesSettings(), DEPLOYMENT)
    assert (diagnosis.persistent if diagnosis else None) == persistent
    assert cluster.previous == previous


def test_evicted_pod_does_not_hide_its_successor() -> None:
    """Its ReplicaSet has created another pod; the evicted one may remain for weeks."""
    cluster = FakeCluster({"state": {"running": {}}, "ready": False, "started": False})
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    starting = cluster.pods
    cluster.pods = [{"metadata": {"name": "gone"}, "status": evicted}]
    diagnosis = diagnose(cast("Cluster", cluster), KubernetesSettings(), DEPLOYMENT)
    assert diagnosis == Diagnosis("pod gone failed: The node was low on resource: memory")
    cluster.pods += starting
    diagnosis = diagnose(cast("Cluster", cluster), KubernetesSettings(), DEPLOYMENT)
    assert diagnosis == Diagnosis("the startup probe of pod p fails")
