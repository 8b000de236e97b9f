"""Integrations that fail at the end of a run are warnings of its exit step."""

from pathlib import Path

import pytest

from evernear import steps
from evernear.common.run_record import RunRecord
from tests.ports import free_ports


def test_unreachable_systems_are_warnings_of_a_run_that_succeeds(
    ended_run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MODEL_REGISTRY_BASE_URL", f"http://user:secret@127.0.0.1:{port}")
    files = str(tmp_path / "outcome.json"), str(tmp_path / "page.html")
    steps.notify("run-1", ended_run.store.uri, "continuous-training", "SUCCEEDED", "", *files)
    (message,) = [step.message for step in ended_run.steps() if step.step == "notify"]
    assert message.startswith("held:")
    assert "; WARNING: MLflow of MLFLOW_TRACKING_URI rejected the run: [Errno 111] Connection refused." in message
    assert "; WARNING: The model registry of MODEL_REGISTRY_BASE_URL rejected the run: [Errno 111]" in message
    assert "secret" not in message
