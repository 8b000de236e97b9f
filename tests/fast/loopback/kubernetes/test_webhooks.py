"""The webhooks of the fakes accept the objects of this repository, and refuse their likely
mistakes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.loopback.kubernetes import webhooks
from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.kinds import NAMESPACE, TRAINING_RUNTIME
from tests.loopback.kubernetes.status import ApiError

RUNTIME = ROOT / "deploy/components/multi-node-training/runtime.yaml"
NAME = "evernear-0123456789abcdef"
Object = dict[str, Any]


def runtime(change: Callable[[Object], object] = lambda _: None) -> Object:
    tree = yaml.safe_load(RUNTIME.read_text())
    change(tree["spec"]["template"]["spec"])
    return tree


def reasons(tree: Object, name: str = NAME) -> list[str]:
    return webhooks.training_runtime(tree) + webhooks.job_set(name, tree["spec"]["template"]["spec"], 2)


def rule(**fields: Any) -> Callable[[Object], object]:
    return lambda spec: spec["failurePolicy"]["rules"][0].update(fields)


def test_runtime_is_accepted() -> None:
    assert reasons(runtime()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rule(name="training-error"), "invalid failure policy rule name 'training-error'"),
        (rule(name="1st"), "must start with an alphabetic character"),
        (rule(name="a" * 129), "invalid failure policy rule name"),
        (rule(targetReplicatedJobs=["worker"]), "'worker' in failure policy does not appear"),
        (rule(onJobFailureReasons=["PodFailure"]), "'PodFailure' in failure policy is not a recognized"),
        (lambda spec: spec["failurePolicy"]["rules"].append(spec["failurePolicy"]["rules"][0]), "not unique"),
        (lambda spec: spec["replicatedJobs"][0].update(replicas=2), "replicas: Invalid value: 2: always must be 1"),
        (
            lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0].update(
                name="trainer"
            ),
            "must contain the required container for the ancestor: trainer",
        ),
    ],
)
def test_mistake_in_a_runtime_is_refused(change: Callable[[Object], object], reason: str) -> None:
    (refusal,) = reasons(runtime(change))
    assert reason in refusal


def test_names_of_jobs_and_pods_are_labels() -> None:
    assert reasons(runtime(), "e" * 48) == []
    assert "pod names generated for this JobSet" in reasons(runtime(), "e" * 49)[0]


def test_failure_policy_is_immutable() -> None:
    api = Api("1.34")
    api.create(NAMESPACE, {"metadata": {"name": "kubeflow"}})
    api.create(TRAINING_RUNTIME, runtime(rule(name="training-error")), "kubeflow")
    changed = copy.deepcopy(api.get(TRAINING_RUNTIME, "kubeflow", "evernear"))
    changed["spec"] = runtime()["spec"]
    with pytest.raises(ApiError, match=r"failurePolicy: .*immutable"):
        api.replace(TRAINING_RUNTIME, changed, "kubeflow", "evernear")
