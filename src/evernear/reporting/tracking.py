"""Runs in MLflow, and releases in Kubeflow's model registry, for teams that compare or find them there.

Each system is used if the environment has its address: ``MLFLOW_TRACKING_URI``, and ``MODEL_REGISTRY_BASE_URL`` as for
KServe's storage initializer of the model registry. The run's record in the store remains the truth: a failure here is a
warning and never fails a run.
"""

import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from evernear.reporting.model_registry import REGISTRY_ADDRESS, TIMEOUT_S, follow_champion, register, warning
from evernear.reporting.page import RunReport
from evernear.run_record import RunRecord

MLFLOW_ADDRESS = "MLFLOW_TRACKING_URI"
EXPERIMENT = "evernear"
"""The MLflow experiment, unless ``MLFLOW_EXPERIMENT_NAME`` is set."""
STATES = {"failed": "FAILED", "stopped": "KILLED"}
"""The MLflow status of a run's state; FINISHED for all others."""
PARAMETERS_MAX, METRICS_MAX = 100, 1000
"""Maximum number of entries in one request to MLflow."""
PARAMETER_MAX_CHARACTERS = 6000
_MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TIMEOUT_S),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow's default of 7 would take minutes
}


def track(record: RunRecord, page: str) -> list[str]:
    """Send a run that has ended to the configured systems; return a warning for each that failed.

    ``page`` is the HTML of the run page.
    """
    warnings: list[str] = []
    if not (os.environ.get(MLFLOW_ADDRESS) or os.environ.get(REGISTRY_ADDRESS)):
        return warnings
    report = RunReport.load(record)
    if os.environ.get(MLFLOW_ADDRESS) and report.settings:
        try:
            _log_to_mlflow(report, page)
        except ImportError:
            warnings.append(f"{MLFLOW_ADDRESS} is set, but the client is missing: install evernear[mlflow].")
        except Exception as error:  # whatever the client raises
            warnings.append(warning("MLflow", MLFLOW_ADDRESS, error))
    if report.outcome.candidate:
        return warnings + register(record.store, report.outcome.candidate, report.outcome.summary(), _facts(report))
    return warnings + follow_champion(record.store)  # a rollback or a promotion of an earlier release


def _log_to_mlflow(report: RunReport, page: str) -> None:
    """Log parameters, metrics and the run page. A step that is retried logs to the same run."""
    for variable, value in _MLFLOW_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client, outcome = MlflowClient(), report.outcome
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name, _artifact_location())
    started_ms, ended_ms = (_milliseconds(time) for time in (report.started, report.ended or report.started))
    logged = client.search_runs([experiment_id], f"attributes.run_name = '{outcome.run}'", max_results=1)
    run = logged[0] if logged else client.create_run(experiment_id, started_ms, run_name=outcome.run)
    parameters = [Param(key, str(value)[:PARAMETER_MAX_CHARACTERS]) for key, value in report.settings.items()]
    metrics = [Metric(key, value, ended_ms, 0) for key, value in outcome.metrics.items()]
    metrics += [Metric(key, value, ended_ms, epoch) for key, value, epoch in _curves(report)]
    tags = [RunTag(f"evernear.{key}", value) for key, value in _facts(report).items()]
    for first in range(0, len(parameters), PARAMETERS_MAX):
        client.log_batch(run.info.run_id, params=parameters[first : first + PARAMETERS_MAX])
    for first in range(0, len(metrics), METRICS_MAX):
        client.log_batch(run.info.run_id, metrics=metrics[first : first + METRICS_MAX])
    client.log_batch(run.info.run_id, tags=tags)
    client.log_text(run.info.run_id, page, "run.html")
    client.set_terminated(run.info.run_id, STATES.get(outcome.state, "FINISHED"), ended_ms)


def _artifact_location() -> str | None:
    """The directory ``mlruns`` beside a SQLite database.

    MLflow's default is ``mlruns`` in the current directory, which is temporary in a step.
    """
    database = re.fullmatch(r"sqlite(?:\+\w+)?:///([^:?][^?]*).*", os.environ[MLFLOW_ADDRESS])
    return (Path(database[1]).absolute().parent / "mlruns").as_uri() if database else None


def _curves(report: RunReport) -> Iterator[tuple[str, float, int]]:
    """Name, value and epoch of each point of the training curves."""
    for epoch in report.training.get("epochs", ()):
        for key in ("train_loss", "gallery_loss", "gallery_accuracy", "learning_rate"):
            yield key, epoch[key], epoch["epoch"]


def _facts(report: RunReport) -> dict[str, str]:
    """The outcome and the lineage of a run, by names without spaces."""
    facts = {"state": report.outcome.state, "summary": report.outcome.summary()} | dict(report.lineage)
    return {key.replace(" (sha256)", "_sha256").replace(" ", "_"): value for key, value in facts.items()}


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
