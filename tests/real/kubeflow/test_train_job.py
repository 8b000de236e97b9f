"""Training on several nodes: a TrainJob on the loopback cluster, whose nodes are processes that
really train."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.errors import ClusterError, SettingsError, TrainingError
from evernear.kubeflow import PLACEHOLDER_IMAGE, train_job
from evernear.kubeflow import job as job_module
from evernear.kubeflow.train_job import run_train_job
from evernear.settings import DataSettings, RunSettings, TrainSettings, parse
from evernear.settings.sources import IMAGE_VARIABLE
from tests.loopback.kubernetes import LoopbackCluster
from tests.loopback.kubernetes.api import now
from tests.loopback.kubernetes.kinds import EVENT, ROLE, TRAIN_JOB, TRAINING_RUNTIME
from tests.real.kubeflow.conftest import IMAGE, Objects

COMPONENT = "multi-node-training"
pytestmark = pytest.mark.usefixtures("step_image")
TINY = {
    "epochs": 3, "min_steps": 0, "width": 4, "embedding_dim": 16, "batch_size": 128, "nodes": 2,
    "augment": "none",
}  # fmt: skip


@pytest.fixture
def ingested_digits(tmp_path: Path) -> Dataset:
    manifest = ingest_source(DataSettings(source="digits"), (tmp_path / "store").as_uri())
    save_manifest(manifest, tmp_path / "dataset")
    return Dataset.open(tmp_path / "dataset")


@pytest.fixture
def tiny_settings(tmp_path: Path) -> RunSettings:
    return parse(RunSettings, {"store": (tmp_path / "store").as_uri(), "train": TINY})


def train_jobs(cluster: LoopbackCluster) -> list[dict[str, Any]]:
    return cluster.api.store.all(TRAIN_JOB)


def run_command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the command of the nodes by a Python program."""
    manifest = train_job.train_job

    def changed(*arguments: Any) -> dict[str, Any]:
        tree = manifest(*arguments)
        tree["spec"]["trainer"] |= {"command": [sys.executable], "args": ["-c", code]}
        return tree

    monkeypatch.setattr(train_job, "train_job", changed)


def follow(
    digits: Dataset, settings: RunSettings, on_epoch: Any = lambda _: None, report: Any = lambda _: None
) -> None:
    run_train_job("run-1", digits, with_defaults(settings.train, digits), settings, on_epoch, report)


def test_exit_code_that_is_not_retried_is_that_of_a_training_error(component: Objects) -> None:
    job = component["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [TrainingError.exit_code]


def test_nodes_that_keep_failing_are_an_error(
    pipeline_cluster: LoopbackCluster,
    ingested_digits: Dataset,
    tiny_settings: RunSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_command(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(
        TrainingError, match=r"failed: ReachedMaxRestarts: jobset failed due to reaching max restarts\."
    ):
        follow(ingested_digits, tiny_settings)
    assert train_jobs(pipeline_cluster) == []


def test_nodes_that_end_without_training_are_an_error(
    pipeline_cluster: LoopbackCluster,
    ingested_digits: Dataset,
    tiny_settings: RunSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_command(monkeypatch, "pass")
    follow(ingested_digits, tiny_settings)
    with pytest.raises(TrainingError, match="2 nodes is not finished: 0 of 3 epochs"):
        train_network(ingested_digits, tiny_settings.train, tmp_path / "out", open_store(tiny_settings.store_uri))


def test_running_train_job_is_adopted_and_a_failed_one_is_replaced(
    pipeline_cluster: LoopbackCluster,
    ingested_digits: Dataset,
    tiny_settings: RunSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_command(monkeypatch, f"raise SystemExit({TrainingError.exit_code})")

    def left_behind() -> str:
        manifest = train_job.train_job("run-1", tiny_settings.train, tiny_settings)
        return pipeline_cluster.api.create(TRAIN_JOB, manifest, "kubeflow")["metadata"]["uid"]

    left_behind()
    while not train_jobs(pipeline_cluster)[0].get("status", {}).get("conditions"):
        pass
    run_command(monkeypatch, "pass")
    follow(ingested_digits, tiny_settings)

    running, seen = left_behind(), set[str]()
    follow(
        ingested_digits,
        tiny_settings,
        report=lambda _: seen.update(job["metadata"]["uid"] for job in train_jobs(pipeline_cluster)),
    )
    assert seen == {running}


def refuse(cluster: LoopbackCluster, manifests: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a TrainingRuntime that passes its schema and webhook, but whose JobSet is refused."""
    runtime = copy.deepcopy(manifests["TrainingRuntime"])
    runtime["metadata"]["name"] = "refused"
    runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"][0]["name"] = "training-error"
    cluster.api.create(TRAINING_RUNTIME, runtime, "kubeflow")
    monkeypatch.setattr(train_job, "RUNTIME", "refused")


def test_refused_job_set_ends_the_step_with_the_event(
    pipeline_cluster: LoopbackCluster, component: Objects, ingested_digits: Dataset, tiny_settings: RunSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(job_module, "CREATION_TIMEOUT_S", 0.5)
    name = train_job.train_job("run-1", tiny_settings.train, tiny_settings)["metadata"]["name"]
    for year, subject in ((2101, f"{name}-node-0"), (2001, name), (2101, "another")):
        event = {"metadata": {"name": subject}, "involvedObject": {"kind": "Job", "name": subject, "uid": subject}}
        event |= {"type": "Warning", "reason": "Quota", "message": f"{subject} in {year}"}
        written = pipeline_cluster.api.create(EVENT, event, "kubeflow", trusted=True)
        written["metadata"]["creationTimestamp"] = f"{year}-01-01T00:00:00Z"
        pipeline_cluster.api.store.put(EVENT, written)
    refuse(pipeline_cluster, component, monkeypatch)
    with pytest.raises(TrainingError) as refused:
        follow(ingested_digits, tiny_settings)
    message = str(refused.value)
    assert "event TrainJobResourcesCreationFailed: TrainJob resources reconciliation failed" in message
    assert "invalid failure policy rule name 'training-error'" in message
    assert f"event Quota: {name}-node-0 in 2101" in message
    assert message.count("event Quota") == 1, "neither another object's nor an earlier attempt's"
    assert "Correct the TrainingRuntime refused" in message
    assert "kubeflow-trainer-controller-manager" in message
    assert train_jobs(pipeline_cluster) == []


def test_step_that_cannot_list_events_still_names_condition_and_controller(
    pipeline_cluster: LoopbackCluster, component: Objects, ingested_digits: Dataset, tiny_settings: RunSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Someone reduced the Role of deploy/ to what they know to be needed."""
    monkeypatch.setattr(job_module, "CREATION_TIMEOUT_S", 0.5)
    role = pipeline_cluster.api.get(ROLE, "kubeflow", component["Role"]["metadata"]["name"])
    pipeline_cluster.api.edit(ROLE, role | {"rules": role["rules"][:1]})

    def add_condition(state: str) -> None:
        if state.startswith("waiting"):
            (job,) = pipeline_cluster.api.store.all(TRAIN_JOB)
            condition = {"type": "TrainJobResourcesCreationFailed", "status": "True", "reason": "Refused"}
            condition |= {"message": "not\ncreated.", "lastTransitionTime": now()}
            pipeline_cluster.api.edit(TRAIN_JOB, job | {"status": {"conditions": [condition]}})

    refuse(pipeline_cluster, component, monkeypatch)
    with pytest.raises(TrainingError, match=r"TrainJobResourcesCreationFailed: Refused: not created; .*cannot be read"):
        follow(ingested_digits, tiny_settings, report=add_condition)


@pytest.mark.parametrize(
    ("status", "state", "has_jobs"),
    [
        ({}, "waiting until all 4 nodes are ready", False),
        ({"jobsStatus": [{}]}, "waiting until all 4 nodes are ready", False),  # a JobSet whose Job has no pods
        ({"jobsStatus": [{"active": 1}]}, "waiting until all 4 nodes are ready", True),
        ({"jobsStatus": [{"active": 1, "ready": 1}]}, "4 of 4 nodes ready", True),
        ({"jobsStatus": [{"succeeded": 1}]}, "4 of 4 nodes ready", True),
        ({"jobsStatus": [{"suspended": 1}]}, "waiting until all 4 nodes are ready", True),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, "waiting until all 4 nodes are ready", True),
    ],
)
def test_status_counts_jobs_and_not_nodes(status: dict[str, Any], state: str, has_jobs: bool) -> None:
    zeros = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
    status = status | {"jobsStatus": [zeros | job for job in status.get("jobsStatus", ())]}
    assert train_job._nodes_ready({"status": status}, 4) == state
    assert train_job._has_jobs({"status": status}) == has_jobs


def test_missing_runtime_is_named_without_a_hint_at_permissions(
    pipeline_cluster: LoopbackCluster,
    ingested_digits: Dataset,
    tiny_settings: RunSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_job, "RUNTIME", "missing")
    with pytest.raises(ClusterError, match=r'"missing" not found: specified trainingRuntime must be created') as error:
        follow(ingested_digits, tiny_settings)
    assert "Role" not in str(error.value)


def test_nodes_use_the_image_of_the_pipeline(tiny_settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, IMAGE)
    assert train_job.train_job("run-1", tiny_settings.train, tiny_settings)["spec"]["trainer"]["image"] == IMAGE
    monkeypatch.setenv(IMAGE_VARIABLE, PLACEHOLDER_IMAGE)
    with pytest.raises(SettingsError, match=r"set the environment variable EVERNEAR_IMAGE="):
        train_job.train_job("run-1", tiny_settings.train, tiny_settings)


def test_weights_on_this_machine_cannot_start_several_nodes() -> None:
    with pytest.raises(SettingsError, match=r"other nodes cannot read; use s3://bucket/key, package:NAME or hub"):
        parse(RunSettings, {"train": {"nodes": 2, "layers": "all", "weights": "file:///models/resnet18.safetensors"}})
    assert TrainSettings(nodes=2, layers="all", weights="s3://models/resnet18.safetensors").nodes == 2
