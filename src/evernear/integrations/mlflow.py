"""Log runs to MLflow if ``MLFLOW_TRACKING_URI`` is set, for teams that compare runs there."""

import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from evernear.common.extras import not_installed
from evernear.common.plugins import Plugin, rejection
from evernear.common.run_record import RunRecord

if TYPE_CHECKING:
    from evernear.reporting.run_report import RunReport

ADDRESS = "MLFLOW_TRACKING_URI"
TIMEOUT_S = 10
EXPERIMENT = "evernear"
"""The MLflow experiment, unless ``MLFLOW_EXPERIMENT_NAME`` is set."""
STATES = {"failed": "FAILED", "stopped": "KILLED"}
"""All other runs are FINISHED."""
PARAMETERS_MAX, METRICS_MAX = 100, 1000
"""Limits of one request to MLflow."""
PARAMETER_MAX_CHARACTERS = 6000
_MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TIMEOUT_S),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow's default of 7 would take minutes
}


def track(record: RunRecord, page: str) -> list[str]:
    """Log an ended run that has settings, with its page's HTML. The record in the store is
    authoritative, so a failure is a warning."""
    if not os.environ.get(ADDRESS):
        return []
    from evernear.reporting.run_report import RunReport

    report = RunReport.load(record)
    if not report.settings:
        return []
    try:
        _log_to_mlflow(report, page)
    except ImportError:
        return [f"{ADDRESS} is set, but {not_installed('its client', PLUGIN.install)}"]
    except Exception as error:  # any error that the client raises
        return [rejection("MLflow", ADDRESS, error, "run")]
    return []


def _log_to_mlflow(report: "RunReport", page: str) -> None:
    """Log parameters, metrics and the run page. A retried step logs to the same MLflow run."""
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
    tags = [RunTag(f"evernear.{key}", value) for key, value in report.facts().items()]
    for first in range(0, len(parameters), PARAMETERS_MAX):
        client.log_batch(run.info.run_id, params=parameters[first : first + PARAMETERS_MAX])
    for first in range(0, len(metrics), METRICS_MAX):
        client.log_batch(run.info.run_id, metrics=metrics[first : first + METRICS_MAX])
    client.log_batch(run.info.run_id, tags=tags)
    client.log_text(run.info.run_id, page, "run.html")
    client.set_terminated(run.info.run_id, STATES.get(outcome.state, "FINISHED"), ended_ms)


def _artifact_location() -> str | None:
    """The URI of ``mlruns`` next to a SQLite database, or None for other servers. MLflow's default
    is the current directory, which is temporary in a pipeline step."""
    database = re.fullmatch(r"sqlite(?:\+\w+)?:///([^:?][^?]*).*", os.environ[ADDRESS])
    return (Path(database[1]).absolute().parent / "mlruns").as_uri() if database else None


def _curves(report: "RunReport") -> Iterator[tuple[str, float, int]]:
    for epoch in report.training.get("epochs", ()):
        for key in ("train_loss", "gallery_loss", "gallery_accuracy", "learning_rate"):
            yield key, epoch[key], epoch["epoch"]


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)


PLUGIN = Plugin(install="evernear[mlflow]", run_ended=track)
