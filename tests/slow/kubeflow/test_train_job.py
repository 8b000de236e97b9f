"""Real training in a TrainJob on the fake cluster."""

from pathlib import Path

import pytest

from evernear import steps
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.embedding.artifact import Epoch
from evernear.embedding.node import NodeLog
from evernear.embedding.train import train_network
from evernear.errors import TrainingError
from evernear.settings import RunSettings
from tests.loopback.kubernetes import LoopbackCluster
from tests.real.kubeflow.test_train_job import COMPONENT, follow, ingested_digits, tiny_settings, train_jobs

__all__ = ["COMPONENT", "ingested_digits", "tiny_settings"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("step_image")]


def test_two_nodes_train_as_one_process(
    pipeline_cluster: LoopbackCluster,
    ingested_digits: Dataset,
    tiny_settings: RunSettings,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    steps.train(
        "run-1", tiny_settings.model_dump(mode="json"), str(tmp_path / "dataset"), str(tmp_path / "out"),
        str(tmp_path / "curves.html"),
    )  # fmt: skip
    trained = RunRecord(open_store(tiny_settings.store_uri), "run-1").load("training")["epochs"]
    alone = train_network(
        ingested_digits, tiny_settings.train.model_copy(update={"nodes": 1}), tmp_path / "alone"
    ).epochs
    assert [epoch["epoch"] for epoch in trained] == [1, 2, 3]
    assert [epoch["train_loss"] for epoch in trained] == pytest.approx([e.train_loss for e in alone], rel=2e-2)
    assert (tmp_path / "out" / "weights.pt").exists()
    assert {(call.verb, call.kind.name, call.namespace) for call in pipeline_cluster.calls} == {
        (verb, "TrainJob", "kubeflow") for verb in ("create", "get", "delete")
    }
    assert train_jobs(pipeline_cluster) == []
    log = capfd.readouterr().out
    assert "2 of 2 nodes ready" in log
    assert "epoch 3/3" in log
    assert "resumed" not in log
    for rank in (0, 1):
        assert f"Node {rank + 1} of 2 started. Processes: 1." in log.partition(f"[node {rank}]")[2]


def test_training_resumes_after_a_lost_node(
    pipeline_cluster: LoopbackCluster, ingested_digits: Dataset, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    longer = tiny_settings.model_copy(update={"train": tiny_settings.train.model_copy(update={"epochs": 40})})

    def lose_node(epoch: Epoch) -> None:
        if epoch.epoch == 1:
            pipeline_cluster.lose_node(train_jobs(pipeline_cluster)[0]["metadata"]["name"])

    follow(ingested_digits, longer, lose_node)
    resumed = train_network(ingested_digits, longer.train, tmp_path / "out", open_store(tiny_settings.store_uri))
    assert [epoch.epoch for epoch in resumed.epochs] == list(range(1, 41))
    lines = NodeLog.of(RunRecord(open_store(tiny_settings.store_uri), "run-1"), 0).lines
    assert sum("Node 1 of 2 started" in line for line in lines) == 2
    assert sum("epoch 1/40" in line for line in lines) == 1


def test_training_error_ends_the_train_job_without_another_start(
    pipeline_cluster: LoopbackCluster, ingested_digits: Dataset, tiny_settings: RunSettings
) -> None:
    diverging = tiny_settings.train.model_copy(update={"learning_rate": 1e38})
    with pytest.raises(TrainingError, match=r"failed: FailJobSet: .*The loss is not a finite number after epoch 1"):
        follow(ingested_digits, tiny_settings.model_copy(update={"train": diverging}))
    lines = NodeLog.of(RunRecord(open_store(tiny_settings.store_uri), "run-1"), 0).lines
    assert sum("started" in line for line in lines) == 1
