"""``evernear pipeline`` with a loopback KFP server."""

import json
import re
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evernear.cli import runs
from evernear.cli.app import app
from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import open_store
from evernear.errors import EvernearError, PipelineServerError, SettingsError, UserInterruptError
from evernear.kubeflow import GOLDEN, NAMES, connection
from evernear.kubeflow.client import KfpRuns
from evernear.kubeflow.publish import fill_defaults, uploaded_version
from evernear.reporting.notify import finalize
from evernear.settings import PipelineSettings
from tests.loopback.kfp import KfpServer, RunControl

IMAGE = "registry.example/evernear-train@sha256:" + "ab" * 32
UPLOAD = ("upload", "--image", IMAGE, "--version", "5b67dc9f1c0b6c0f")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_S", 0.01)
    monkeypatch.setattr(connection, "BACKOFF_S", 0.01)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)


@pytest.fixture(autouse=True)
def _runs_act(kfp: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs behave as ``act`` describes and record their outcome in their store."""
    kfp.executor = act
    monkeypatch.setenv("EVERNEAR_PIPELINE__ENDPOINT", kfp.url)


@pytest.fixture
def kfp_with_pipeline(kfp: KfpServer, tmp_path_factory: pytest.TempPathFactory) -> KfpServer:
    """The server with the pipeline continuous-training, whose upload set a source."""
    uploaded = tmp_path_factory.mktemp("uploaded") / "continuous_training.yaml"
    uploaded.write_bytes(fill_defaults((GOLDEN / uploaded.name).read_bytes(), {"source": "s3://images"}))
    kfp.publish(uploaded, version="5b67dc9f1c0b6c0f")
    return kfp


def act(run: RunControl) -> None:
    """Execute a run. The parameter ``source`` selects its behavior: hold, fail, or wait to be
    stopped."""
    behavior = run.parameters.get("source", "hold")
    run.begin()
    run.task("ingest", "SUCCEEDED")
    while behavior == "wait" and not run.is_canceling:
        run.ended.wait(0.01)
    record = RunRecord(open_store(run.parameters["store"]), run.id) if "store" in run.parameters else None
    if behavior == "fail":
        run.task("train", "FAILED", error="" if record else "Training cannot continue: the loss is not finite.")
    if record:
        if behavior == "fail":
            record.save_step(
                StepRecord(step="train", state="failed", message="The disk is full.", started=datetime.now(UTC))
            )
        if behavior == "hold":
            record.save(verdict={"promote": False, "reasons": ["Accuracy fell by 0.4 points."]})
        finalize(record, "continuous-training", "SUCCEEDED" if behavior == "hold" else "FAILED", "")
    # KFP calls a stopped run failed if its tasks have retries.
    run.end("SUCCEEDED" if behavior == "hold" else "FAILED" if record or behavior == "fail" else "CANCELED")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", *arguments], catch_exceptions=True)


def evernear(*arguments: str) -> str:
    """The output of a command. Raises its error."""
    completed = invoke(*arguments)
    if isinstance(completed.exception, EvernearError):
        raise completed.exception
    assert completed.exit_code == 0, completed.output
    return completed.stdout


def evernear_json(*arguments: str) -> Any:
    return json.loads(evernear(*arguments, "--json"))


def test_upload_sets_defaults(kfp: KfpServer) -> None:
    options = ("--store", "s3://team", "--set", "data.source=s3://images", "--set", "data.size_px=32")
    evernear(*UPLOAD, *options)
    assert [version["new"] for version in evernear_json(*UPLOAD, *options)] == [False] * len(NAMES)
    training, rollback = (
        KfpRuns(PipelineSettings(endpoint=kfp.url)).parameters(name) for name in ("continuous-training", "rollback")
    )
    defaults = {parameter.name: parameter.default for parameter in training}
    assert defaults["store"] == "s3://team"
    assert (defaults["source"], defaults["settings"]) == ("s3://images", {"data": {"size_px": 32}})
    assert "s3://team" in [parameter.default for parameter in rollback], (
        "each pipeline gets the defaults of its own parameters"
    )
    with pytest.raises(SettingsError, match="No parameter or setting 'sources'; did you mean"):
        evernear(*UPLOAD, "--set", "sources=x")


@pytest.mark.slow
def test_facts_about_the_cluster_are_set_at_upload(kfp: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    evernear(*UPLOAD)
    evernear(*UPLOAD, "--set", "pipeline.train_memory=64Gi", "--set", "train.epochs=3")
    monkeypatch.setenv("EVERNEAR_PIPELINE__TASK_MEMORY", "5Gi")
    evernear(*UPLOAD)
    assert len(kfp.state.versions) == 3 * len(NAMES)
    files = [kfp.state.files[version].decode() for version in kfp.state.versions]
    assert ["64Gi" in file for file in files] == [
        name == "continuous-training" and part == 1 for part in range(3) for name in NAMES
    ]
    assert ["5Gi" in file for file in files] == [part == 2 for part in range(3) for _ in NAMES]
    for key in ("train_memory", "pipeline.train_memory"):
        with pytest.raises(SettingsError, match=r"`evernear pipeline upload --set pipeline\.train_memory=VALUE`"):
            evernear("run", "--set", f"{key}=64Gi")
    with pytest.raises(SettingsError, match=r"pipeline\.task_cpu"):
        evernear(*UPLOAD, "--set", "pipeline.task_cpu=many")


def test_run_overrides_only_the_parameters_that_are_set(kfp: KfpServer) -> None:
    serving = IMAGE.replace("train", "serve")
    evernear(
        *UPLOAD,
        *("--source", "s3://images", "--target", "kubernetes", "--serving-image", serving),
        *("--set", "kubernetes.namespace=vision", "--set", "data.size_px=32"),
    )
    evernear("run", "--preset", "best", "--set", "kubernetes.replicas_min=3", "--set", "train.epochs=5")
    parameters = kfp.runs[0].parameters
    assert set(parameters) == {"preset", "settings", "started_by"}
    assert parameters["settings"] == {
        "kubernetes": {"namespace": "vision", "replicas_min": 3},
        "data": {"size_px": 32},
        "train": {"epochs": 5},
    }
    evernear("run", "rollback", "--set", "kubernetes.image=" + serving)
    assert kfp.runs[1].parameters["settings"]["kubernetes"] == {"namespace": "vision", "image": serving}
    assert "@" in kfp.runs[1].parameters["started_by"]


def test_upload_run_and_status_of_a_held_release(kfp: KfpServer, tmp_path: Path) -> None:
    version = uploaded_version("5b67dc9f1c0b6c0f", PipelineSettings())
    assert evernear(*UPLOAD).splitlines() == [f"{name} {version}: uploaded." for name in NAMES]
    assert [version["new"] for version in evernear_json(*UPLOAD)] == [False] * len(NAMES)
    with pytest.raises(PipelineServerError, match="already exists with different content"):
        evernear("upload", "rollback", "--image", IMAGE.replace("ab", "cd"), "--version", "5b67dc9f1c0b6c0f")

    store = tmp_path.as_uri()
    completed = invoke("run", "--source", "hold", "--set", f"store={store}", "--set", "train.epochs=3", "--wait")
    assert completed.exit_code == 0, "a held release is a success"
    (run,) = kfp.runs
    assert run.parameters["store"] == store
    assert run.parameters["settings"] == {"train": {"epochs": 3}}
    assert completed.stdout.splitlines() == [
        f"Run {run.id} of continuous-training {version}: succeeded. {kfp.url}/#/runs/details/{run.id}",
        "held: Accuracy fell by 0.4 points.",
        f"Run page: evernear report {run.id}",
    ]
    assert "ok ingest" in completed.stderr

    status = evernear_json("status", run.id)
    assert (status["state"], status["outcome"]["state"]) == ("succeeded", "held")
    assert [step["name"] for step in status["steps"]] == ["ingest"]
    assert evernear("status", run.id).splitlines()[1].split()[:2] == ["ok", "ingest"]


def test_start_without_an_answer_names_the_command_that_returns_the_run(kfp_with_pipeline: KfpServer) -> None:
    kfp_with_pipeline.fail(operation="run_service_create_run", status=504, after=True)
    words = ("run", "--set", "train.epochs=3", "--preset", "best", "--endpoint", kfp_with_pipeline.url, "--json")
    with pytest.raises(PipelineServerError, match=r"answered 504.* The run may exist nevertheless: `evernear") as error:
        evernear(*words)
    command = str(error.value).split("`")[1]
    again = shlex.split(command)
    assert again[:3] == ["evernear", "pipeline", "run"]
    assert {"--set", "train.epochs=3", "--preset", "best", "--endpoint", kfp_with_pipeline.url, "--json"} <= {*again}
    assert json.loads(evernear(*again[2:]))["id"] == kfp_with_pipeline.runs[0].id
    assert len(kfp_with_pipeline.runs) == 1


def test_parameters_accept_any_text(kfp: KfpServer) -> None:
    kfp.publish(GOLDEN / "rollback.yaml", version="5b67dc9f1c0b6c0f")
    reasons = ["It calls every 7 a 1", "It\u2019s wrong", 'a "b" \\ c', "two\nlines", "", "x" * 3000]
    for reason in reasons:
        evernear("run", "rollback", "--set", f"reason={reason}")
    assert [run.parameters["reason"] for run in kfp.runs] == reasons


def test_wait_reports_the_failed_step_and_its_error(kfp_with_pipeline: KfpServer, tmp_path: Path) -> None:
    with pytest.raises(
        EvernearError, match=r"failed at train: Training cannot continue: the loss is not finite\.$"
    ) as error:
        evernear("run", "--set", "source=fail", "--wait")
    assert error.value.exit_code == 1
    pattern = r"failed at train: The disk is full\.$"
    with pytest.raises(EvernearError, match=pattern):  # from the record in the store
        evernear("run", "--set", "source=fail", "--set", f"store={tmp_path.as_uri()}", "--wait")
    assert [run["state"] for run in evernear_json("status")["runs"]] == ["failed", "failed"]
    output = evernear("status", kfp_with_pipeline.runs[-1].id)
    assert "failed at train: The disk is full.\nNext: evernear pipeline run continuous-training\n" in output


def test_stop_stops_a_run(kfp_with_pipeline: KfpServer) -> None:
    started = evernear_json("run", "--set", "source=wait", "--key", "a")
    assert evernear_json("run", "--set", "source=wait", "--key", "a")["id"] == started["id"]
    output = evernear("stop", started["id"])
    assert output.startswith(f"Run {started['id']} is stopping. The run's store is not writable from here")
    assert kfp_with_pipeline.run(started["id"]).ended.wait(10)
    assert evernear("stop", started["id"]) == f"Run {started['id']} has already ended: canceled.\n"
    assert evernear_json("status", started["id"])["state"] == "canceled"
    with pytest.raises(EvernearError, match="was stopped"):
        evernear("run", "--key", "a", "--wait")


def test_status_shows_who_stopped_a_run(
    kfp_with_pipeline: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ACTIONS": "true", "ACTOR": "ada", "EVENT_NAME": "push", "SHA": "5b67dc9f1c0b6c0f"}.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    started = evernear_json("run", "--set", "source=wait", "--set", f"store={tmp_path.as_uri()}")
    assert evernear("stop", started["id"]) == f"Run {started['id']} is stopping.\n"
    assert kfp_with_pipeline.run(started["id"]).ended.wait(10)
    status = evernear_json("status", started["id"])
    assert (status["state"], status["outcome"]["state"]) == ("canceled", "stopped")
    assert "stopped by GitHub Actions (push of commit 5b67dc9f1c0b by ada" in evernear("status", started["id"])


def test_interrupting_wait_does_not_stop_the_run(kfp_with_pipeline: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    # Not `time.sleep` itself: threads of other tests in this process sleep, too.
    monkeypatch.setattr(runs, "time", SimpleNamespace(**{**vars(time), "sleep": interrupt}))
    with pytest.raises(UserInterruptError, match=r"continues in Kubeflow Pipelines; `evernear pipeline status [^ ]+`"):
        evernear("run", "--set", "source=wait", "--wait")
    monkeypatch.undo()
    (run,) = kfp_with_pipeline.runs
    assert not run.is_canceling
    KfpRuns(PipelineSettings(endpoint=kfp_with_pipeline.url)).stop(run.id)


def test_wait_survives_a_server_restart(kfp_with_pipeline: KfpServer) -> None:
    kfp_with_pipeline.fail(operation="run_service_get_run", times=6)
    completed = invoke("run", "--wait")
    assert completed.exit_code == 0
    assert completed.stdout.splitlines()[1].startswith("The outcome is unknown: ")


def test_schedule_replaces_and_removes_schedules(kfp_with_pipeline: KfpServer) -> None:
    assert evernear("status") == "run  pipeline  version  state  started (UTC)  duration\n"
    assert evernear("schedule", "--cron", "0 3 * * *").startswith(
        "continuous-training 5b67dc9f1c0b6c0f runs at 0 0 3 * * * (seconds first); next run 20"
    )
    scheduled = evernear_json("schedule", "--cron", "0 4 * * *", "--set", "target=local")
    assert [schedule["id"] for schedule in evernear_json("status")["schedules"]] == [scheduled["id"]]
    assert re.search(
        r"continuous-training 5b67dc9f1c0b6c0f runs at 0 0 4 \* \* \* \(seconds first\); next run .* 04:00:00, "
        r"if .* is UTC, enabled\.",
        evernear("status"),
    )
    assert evernear("schedule", "--off") == "continuous-training: 1 schedule removed.\n"
    assert evernear_json("schedule", "--off") == {"removed": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--set", "tagret=local"), "No parameter or setting 'tagret'; did you mean 'target'?"),
        (("run", "--set", "train.epoch=3"), r"did you mean 'train\.epochs'?"),
        (("run", "--set", "epochs=3"), r"did you mean 'train\.epochs'?"),
        (("run", "--set", "train.epochs=many"), r"Invalid setting train\.epochs = many: "),
        (("run", "--set", "settings=[]"), r"settings = '\[\]' is not a JSON object"),
        (("run", "--preset", "bset"), "No preset 'bset'; known: best"),
        (("run", "--set", "target"), "'target' has no '='; write key=value"),
        (("run", "reindexx"), 'No pipeline "reindexx"'),
        (("schedule",), "Pass either --cron"),
        (("schedule", "--cron", "0 3 * * *", "--off"), "Pass either --cron"),
        (("schedule", "--cron", "nightly"), "The schedule 'nightly' is not valid"),
        (("status", "gone"), "No run gone"),
        (("status", "--endpoint", "kfp.example.org"), r"Invalid setting pipeline\.endpoint = kfp\.example\.org"),
    ],
)
def test_invalid_arguments_are_reported(kfp_with_pipeline: KfpServer, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(EvernearError, match=message) as error:
        evernear(*arguments)
    assert "\n" not in str(error.value)
    assert not kfp_with_pipeline.runs
