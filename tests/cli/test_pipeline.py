"""``evernear pipeline``, with a KFP server on loopback."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from evernear.cli import app, runs
from evernear.errors import EvernearError, PipelineServerError, SettingsError, UserInterruptError
from evernear.kubeflow import GOLDEN, NAMES, connection
from evernear.kubeflow.client import KfpRuns
from evernear.reporting.notify import finalize
from evernear.run_record import RunRecord, StepRecord
from evernear.settings import PipelineSettings
from evernear.store import open_store
from tests.loopback.kfp import KfpServer, RunControl

IMAGE = "registry.example/evernear-train@sha256:" + "ab" * 32
UPLOAD = ("upload", "--image", IMAGE, "--version", "5b67dc9f1c0b6c0f")


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_S", 0.01)
    monkeypatch.setattr(connection, "BACKOFF_S", 0.01)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpServer]:
    """A server whose runs do as their parameters say, and leave their outcome in their store."""
    with KfpServer(executor=act) as server:
        monkeypatch.setenv("EVERNEAR_PIPELINE__ENDPOINT", server.url)
        yield server


@pytest.fixture
def published(server: KfpServer) -> KfpServer:
    """The server, with continuous-training on it."""
    server.publish(GOLDEN / "continuous_training.yaml", version="5b67dc9f1c0b6c0f")
    return server


def act(run: RunControl) -> None:
    """The parameter ``task_cpu`` is the part to play: hold, fail, or wait to be stopped."""
    part = run.parameters.get("task_cpu", "hold")
    run.begin()
    run.task("ingest", "SUCCEEDED")
    while part == "wait" and not run.is_canceling:
        run.ended.wait(0.01)
    record = RunRecord(open_store(run.parameters["store"]), run.id) if "store" in run.parameters else None
    if part == "fail":
        run.task("train", "FAILED", error="" if record else "Training cannot go on: the loss is not finite.")
    if record:
        if part == "fail":
            record.save_step(
                StepRecord(step="train", state="failed", message="The disk is full.", started=datetime.now(UTC))
            )
        if part == "hold":
            record.save(verdict={"promote": False, "reasons": ["Accuracy fell by 0.4 points."]})
        finalize(record, "continuous-training", "SUCCEEDED" if part == "hold" else "FAILED", "")
    # KFP calls a stopped run failed if its tasks have retries.
    run.end("SUCCEEDED" if part == "hold" else "FAILED" if record or part == "fail" else "CANCELED")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", *words], catch_exceptions=True)


def evernear(*words: str) -> str:
    """What a command prints; its error is raised."""
    done = invoke(*words)
    if isinstance(done.exception, EvernearError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*words: str) -> Any:
    return json.loads(evernear(*words, "--json"))


def test_pipelines_are_written_for_a_cluster(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        evernear("compile", "--image", IMAGE, "--output", str(tmp_path / directory))
    for name in NAMES:
        written = (tmp_path / "one" / f"{name}.yaml").read_bytes()
        assert written == (tmp_path / "two" / f"{name}.yaml").read_bytes()
        assert IMAGE.encode() in written
    words = ("--kubernetes-native", "--version", "abc", "--namespace", "kubeflow", "--output", str(tmp_path))
    assert evernear("compile", "rollback", "--image", IMAGE, *words) == f"{tmp_path}/rollback.yaml\n"
    kinds = [one["kind"] for one in yaml.load_all((tmp_path / "rollback.yaml").read_bytes(), yaml.CSafeLoader)]
    assert kinds == ["Pipeline", "PipelineVersion"]


def test_what_cannot_be_compiled_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    here = ("--output", str(tmp_path / "out"))
    with pytest.raises(SettingsError, match="has no digest"):
        evernear("compile", "--image", "evernear-train:latest", *here)
    with pytest.raises(SettingsError, match="Unknown pipeline 'retrain'; known: continuous-training"):
        evernear("compile", "rollback", "retrain", "--image", IMAGE, *here)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("a file")
    with pytest.raises(SettingsError, match=r"out/rollback\.yaml: File exists"):
        evernear("compile", "rollback", "--image", IMAGE, *here)


def test_defaults_of_the_place_go_into_what_is_uploaded(server: KfpServer) -> None:
    ours = ("--store", "s3://ours", "--set", "data.source=s3://images", "--set", "data.size_px=32")
    evernear(*UPLOAD, *ours)
    assert [one["new"] for one in told(*UPLOAD, *ours)] == [False] * len(NAMES)
    training, rollback = (
        KfpRuns(PipelineSettings(endpoint=server.url)).parameters(name) for name in ("continuous-training", "rollback")
    )
    defaults = {parameter.name: parameter.default for parameter in training}
    assert defaults["store"] == "s3://ours"
    assert (defaults["source"], defaults["settings"]) == ("s3://images", {"data": {"size_px": 32}})
    assert "s3://ours" in [parameter.default for parameter in rollback], "each takes what it knows"
    with pytest.raises(SettingsError, match="no parameter or setting 'sources'; did you mean"):
        evernear(*UPLOAD, "--set", "sources=x")


def test_a_run_sends_what_is_set_and_keeps_what_the_upload_pinned(server: KfpServer) -> None:
    serving = IMAGE.replace("train", "serve")
    evernear(
        *UPLOAD,
        *("--source", "s3://images", "--target", "kubernetes", "--serving-image", serving),
        *("--set", "kubernetes.namespace=vision", "--set", "data.size_px=32"),
    )
    evernear("run", "--preset", "best", "--set", "kubernetes.replicas_min=3", "--set", "train.epochs=5")
    parameters = server.runs[0].parameters
    assert set(parameters) == {"preset", "settings", "started_by"}
    assert parameters["settings"] == {
        "kubernetes": {"namespace": "vision", "replicas_min": 3},
        "data": {"size_px": 32},
        "train": {"epochs": 5},
    }
    evernear("run", "rollback", "--set", "kubernetes.image=" + serving)
    assert server.runs[1].parameters["serving_image"] == serving
    assert "@" in server.runs[1].parameters["started_by"]


def test_from_upload_to_a_held_release(server: KfpServer, tmp_path: Path) -> None:
    assert evernear(*UPLOAD).splitlines() == [f"{name} 5b67dc9f1c0b6c0f: uploaded." for name in NAMES]
    assert [one["new"] for one in told(*UPLOAD)] == [False] * len(NAMES)
    with pytest.raises(PipelineServerError, match="already exists with different content"):
        evernear("upload", "rollback", "--image", IMAGE.replace("ab", "cd"), "--version", "5b67dc9f1c0b6c0f")

    store = tmp_path.as_uri()
    done = invoke("run", "--set", f"store={store}", "--set", "train.epochs=3", "--wait")
    assert done.exit_code == 0, "a held release is a success"
    (run,) = server.runs
    assert run.parameters["store"] == store
    assert run.parameters["settings"] == {"train": {"epochs": 3}}
    assert done.stdout.splitlines() == [
        f"Run {run.id} of continuous-training 5b67dc9f1c0b: succeeded. {server.url}/#/runs/details/{run.id}",
        "held: Accuracy fell by 0.4 points.",
    ]
    assert "ok ingest" in done.stderr

    looked = told("status", run.id)
    assert (looked["state"], looked["outcome"]["state"]) == ("succeeded", "held")
    assert [step["name"] for step in looked["steps"]] == ["ingest"]
    assert evernear("status", run.id).splitlines()[1].split()[:2] == ["ok", "ingest"]


@pytest.mark.parametrize(
    "why", ["It calls every 7 a 1", "It\u2019s wrong", 'a "b" \\ c', "two\nlines", "", "x" * 3000], ids=repr
)
def test_a_parameter_may_be_any_text(server: KfpServer, why: str) -> None:
    evernear(*UPLOAD)
    evernear("run", "rollback", "--set", f"reason={why}")
    assert server.runs[0].parameters["reason"] == why


def test_a_failed_run_says_where_and_why(published: KfpServer, tmp_path: Path) -> None:
    with pytest.raises(
        EvernearError, match=r"failed at train: Training cannot go on: the loss is not finite\.$"
    ) as error:
        evernear("run", "--set", "task_cpu=fail", "--wait")
    assert error.value.exit_code == 1
    reason = r"failed at train: The disk is full\.$"
    with pytest.raises(EvernearError, match=reason):  # the store knows what KFP does not say
        evernear("run", "--set", "task_cpu=fail", "--set", f"store={tmp_path.as_uri()}", "--wait")
    assert [run["state"] for run in told("status")["runs"]] == ["failed", "failed"]
    shown = evernear("status", published.runs[-1].id)
    assert "failed at train: The disk is full.\nNext: evernear pipeline run continuous-training\n" in shown


def test_a_run_is_stopped(published: KfpServer) -> None:
    started = told("run", "--set", "task_cpu=wait", "--key", "a")
    assert told("run", "--set", "task_cpu=wait", "--key", "a")["id"] == started["id"]
    said = evernear("stop", started["id"])
    assert said.startswith(f"Run {started['id']} is stopping. The run's store is not writable from here")
    assert published.run(started["id"]).ended.wait(10)
    assert evernear("stop", started["id"]) == f"Run {started['id']} has already ended: canceled.\n"
    assert told("status", started["id"])["state"] == "canceled"
    with pytest.raises(EvernearError, match="was stopped"):
        evernear("run", "--key", "a", "--wait")


def test_a_stopped_run_says_by_whom_although_kfp_calls_it_failed(
    published: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ACTIONS": "true", "ACTOR": "ada", "EVENT_NAME": "push", "SHA": "5b67dc9f1c0b6c0f"}.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    started = told("run", "--set", "task_cpu=wait", "--set", f"store={tmp_path.as_uri()}")
    assert evernear("stop", started["id"]) == f"Run {started['id']} is stopping.\n"
    assert published.run(started["id"]).ended.wait(10)
    looked = told("status", started["id"])
    assert (looked["state"], looked["outcome"]["state"]) == ("failed", "stopped")
    assert "stopped by GitHub Actions (push of commit 5b67dc9f1c0b by ada" in evernear("status", started["id"])


def test_a_wait_is_interrupted_and_the_run_goes_on(published: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.time, "sleep", interrupt)
    with pytest.raises(UserInterruptError, match=r"continues in Kubeflow Pipelines; `evernear pipeline status [^ ]+`"):
        evernear("run", "--set", "task_cpu=wait", "--wait")
    monkeypatch.undo()
    (run,) = published.runs
    assert not run.is_canceling
    KfpRuns(PipelineSettings(endpoint=published.url)).stop(run.id)


def test_a_server_that_restarts_does_not_end_the_wait(published: KfpServer) -> None:
    published.fail(operation="run_service_get_run", times=6)
    done = invoke("run", "--wait")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1].startswith("The outcome is unknown: ")


def test_a_pipeline_runs_by_the_clock(published: KfpServer) -> None:
    assert evernear("status") == "run  pipeline  version  state  started (UTC)  duration\n"
    assert evernear("schedule", "--cron", "0 3 * * *") == "continuous-training runs at 0 0 3 * * * (seconds first).\n"
    made = told("schedule", "--cron", "0 4 * * *", "--set", "target=local")
    assert [one["id"] for one in told("status")["schedules"]] == [made["id"]]
    assert "continuous-training runs at 0 0 4 * * * (seconds first), enabled." in evernear("status")
    assert evernear("schedule", "--off") == "continuous-training: 1 schedule removed.\n"
    assert told("schedule", "--off") == {"removed": 0}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "--set", "tagret=local"), "no parameter or setting 'tagret'; did you mean 'target'?"),
        (("run", "--set", "train.epoch=3"), r"did you mean 'train\.epochs'?"),
        (("run", "--set", "epochs=3"), r"did you mean 'train\.epochs'?"),
        (("run", "--set", "train.epochs=many"), r"Invalid setting train\.epochs = many: "),
        (("run", "--set", "settings=[]"), r"settings = '\[\]' is not a JSON object"),
        (("run", "--preset", "bset"), "No preset 'bset'; known: best"),
        (("run", "--set", "target"), "'target' has no '='; write key=value"),
        (("run", "reindexx"), 'No pipeline "reindexx"'),
        (("schedule",), "Pass either --cron"),
        (("schedule", "--cron", "0 3 * * *", "--off"), "Pass either --cron"),
        (("schedule", "--cron", "nightly"), "Schedule cron is not a supported format"),
        (("status", "gone"), "No run gone"),
        (("status", "--endpoint", "kfp.example.org"), r"Invalid setting pipeline\.endpoint = kfp\.example\.org"),
    ],
)
def test_what_is_wrong_is_one_sentence(published: KfpServer, words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(EvernearError, match=sentence) as error:
        evernear(*words)
    assert "\n" not in str(error.value)
    assert not published.runs
