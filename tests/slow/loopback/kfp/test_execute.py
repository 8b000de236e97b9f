"""A run whose pipeline the loopback server executes, as in tests/real/scenarios/test_promise.py."""

from pathlib import Path

import pytest

from evernear.kubeflow import GOLDEN
from evernear.kubeflow.client import KfpRuns
from evernear.kubeflow.runs import State
from evernear.settings import PipelineSettings
from tests.loopback.kfp import KfpServer, LocalExecutor


@pytest.mark.slow
def test_error_of_a_failed_step_is_reported(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with KfpServer(executor=LocalExecutor(tmp_path / "runs", store=store)) as server:
        server.publish(GOLDEN / "continuous_training.yaml", version="first")
        runs = KfpRuns(PipelineSettings(endpoint=server.url))
        started = runs.start("continuous-training", {"source": f"folder:{tmp_path / 'nowhere'}"}, "a")
        assert server.run(started.id).ended.wait(120)
        run_detail = runs.show(started.id)
    steps = {step.name: step for step in run_detail.steps}
    assert run_detail.state is State.FAILED
    assert steps["ingest"].state is State.FAILED
    assert f"{tmp_path / 'nowhere'}" in steps["ingest"].error
    assert steps["notify"].state is State.SUCCEEDED
    assert "train" not in steps
    assert (tmp_path / "store" / "runs" / started.id / "outcome.json").exists(), "the run ID is the one from KFP"
