"""Runs in MLflow, which cannot fail a run. MLflow is the real server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from evernear.common.run_record import RunRecord
from evernear.integrations.mlflow import track
from tests import ROOT
from tests.ended_run import STARTED
from tests.ports import free_ports, wait_for_port

MLFLOW = ROOT / ".venv/mlflow/bin/mlflow"


def test_missing_client_is_a_warning(ended_run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert track(ended_run, "") == [
        "MLFLOW_TRACKING_URI is set, but its client is not installed; run `pip install 'evernear[mlflow]'`."
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # of MLflow's
def test_artifacts_of_a_run_in_a_sqlite_database_are_beside_it(
    ended_run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow would put them into the current directory, which is deleted after a step."""
    pytest.importorskip("sqlalchemy")
    step = tmp_path / "step"
    step.mkdir()
    monkeypatch.chdir(step)
    (tmp_path / "tracking").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking/mlflow.db")
    assert track(ended_run, "<p>page</p>") == []
    (page,) = (tmp_path / "tracking").rglob("run.html")
    assert page.read_text() == "<p>page</p>"
    assert list(step.iterdir()) == []


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of MLflow's tracking server."""
    (port,) = free_ports(1)
    command = [MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", tmp_path / "files"]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            wait_for_port(port, process, timeout_s=240)
            address = f"http://127.0.0.1:{port}"
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            yield address
        finally:
            os.killpg(process.pid, 15)


@pytest.mark.slow
@pytest.mark.skipif(not MLFLOW.exists(), reason="make .venv/mlflow/.installed installs the server")
def test_run_is_logged_once_to_mlflow(ended_run: RunRecord, mlflow: str) -> None:
    assert [track(ended_run, "<p>page</p>") for _ in range(2)] == [[], []]
    with httpx.Client(base_url=f"{mlflow}/api/2.0/mlflow", timeout=60) as client:
        experiment = client.get("/experiments/get-by-name", params={"experiment_name": "evernear"}).json()
        identifier = experiment["experiment"]["experiment_id"]
        (run,) = client.post("/runs/search", json={"experiment_ids": [identifier]}).json()["runs"]
        query = {"run_id": run["info"]["run_id"], "metric_key": "train_loss"}
        losses = client.get("/metrics/get-history", params=query).json()["metrics"]
        page = httpx.get(f"{mlflow}/get-artifact", params={"run_id": run["info"]["run_id"], "path": "run.html"})
    parameters = {entry["key"]: entry["value"] for entry in run["data"]["params"]}
    metrics = {entry["key"]: entry["value"] for entry in run["data"]["metrics"]}
    tags = {entry["key"]: entry["value"] for entry in run["data"]["tags"]}
    assert (run["info"]["run_name"], run["info"]["status"]) == ("run-1", "FINISHED")
    assert run["info"]["start_time"] == STARTED.timestamp() * 1000
    assert parameters["train.batch_size"] == "256"
    assert metrics["label_right"] == 0.875
    assert {(point["step"], point["value"]) for point in losses} == {(1, 1.0), (2, 0.5)}
    assert (tags["evernear.state"], tags["evernear.release"]) == ("held", ended_run.load("archived")["version"])
    assert page.text == "<p>page</p>"
