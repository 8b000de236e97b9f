"""What is read from a pod whose container runs for a while between its crashes."""

from typing import Any, cast

import pytest

from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.objects import REVISION
from evernear.deployment.kubernetes.stall import find_stall
from evernear.settings import KubernetesSettings

DEPLOYMENT = {"spec": {"template": {"metadata": {"labels": {REVISION: "r"}}}}}


class Told:
    """What an API server tells of one pod; asked for nothing else."""

    def __init__(self, container: dict[str, Any]) -> None:
        status = {"phase": "Running", "containerStatuses": [{"name": "torchserve", "image": "i"} | container]}
        self.pod = {"metadata": {"name": "p"}, "status": status}
        self.previous: list[bool] = []

    def list(self, kind: str, **_: str) -> list[Any]:
        return [self.pod] if kind == "Pod" else []

    def log(self, pod: str, container: str, *, previous: bool, lines: int) -> Any:
        self.previous.append(previous)
        return ["last words"]


CRASHED = {"terminated": {"exitCode": 1}}


@pytest.mark.parametrize(
    ("state", "restarts", "ready", "hopeless", "previous"),
    [
        (CRASHED, 0, False, True, [False]),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, 1, False, True, [True]),
        ({"running": {}}, 1, False, False, []),
        ({"running": {}}, 2, False, True, [True]),
        ({"running": {}}, 2, True, None, []),
    ],
)
def test_crashes_with_a_rest_between_them(
    state: dict[str, Any], restarts: int, ready: bool, hopeless: bool | None, previous: list[bool]
) -> None:
    told = Told({"state": state, "lastState": CRASHED, "restartCount": restarts, "ready": ready, "started": ready})
    stall = find_stall(cast("Cluster", told), KubernetesSettings(), DEPLOYMENT)
    assert (stall.hopeless if stall else None) == hopeless
    assert told.previous == previous
