"""Every pipeline is started by everything that starts runs, on a server that checks a run's
parameters as Kubeflow Pipelines does; and what is known to fail starts nothing."""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.common.store import Store
from evernear.console.runs import PipelineRuns
from evernear.errors import EvernearError, SettingsError
from evernear.kubeflow import NAMES
from evernear.kubeflow.client import KfpRuns
from evernear.kubeflow.publish import compile_pipelines
from evernear.settings import PipelineSettings, Settings, load
from evernear.triggers.requests import POLICY, WATCHER, Request, RequestStore
from evernear.triggers.slack.runs import RunTracker
from evernear.triggers.watch.baker import Baker
from evernear.triggers.watch.proposals import Proposer
from tests.loopback.kfp import KfpServer

IMAGE = "registry.example/evernear-train@sha256:" + "ab" * 32
NOW = datetime(2026, 11, 22, 8, tzinfo=UTC)
PARAMETERS: dict[str, dict[str, str]] = {
    "continuous-training": {"source": "s3://images"},
    "reindex": {"source": "s3://images"},
    "rollback": {},
    "promote": {"release": "20261122.080000.c0ffee00", "reason": "It is better"},
    "predict": {"images": "s3://images", "out": "s3://predictions"},
}


@pytest.fixture(scope="module")
def compiled_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All pipelines, as an upload without defaults sends them."""
    directory = tmp_path_factory.mktemp("compiled")
    contents = compile_pipelines(None, IMAGE, [], PipelineSettings())
    for name, content in contents.items():
        (directory / f"{name}.yaml").write_bytes(content)
    return [directory / f"{name}.yaml" for name in contents]


@pytest.fixture(autouse=True)
def _all_pipelines(kfp: KfpServer, compiled_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERNEAR_PIPELINE__ENDPOINT", kfp.url)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    for path in compiled_files:
        kfp.publish(path, "c0ffee1")


def invoke(*words: str) -> None:
    completed = CliRunner().invoke(app, ["pipeline", *words])
    if isinstance(completed.exception, EvernearError):
        raise completed.exception
    assert completed.exit_code == 0, completed.output


def by_command(server: KfpServer, pipeline: str, parameters: dict[str, str], _: Store) -> None:
    invoke("run", pipeline, *(f"--set={name}={value}" for name, value in parameters.items()))


def by_schedule(server: KfpServer, pipeline: str, parameters: dict[str, str], _: Store) -> None:
    invoke(
        "schedule", pipeline, "--cron", "0 3 * * *", *(f"--set={name}={value}" for name, value in parameters.items())
    )
    (scheduled,) = server.state.recurring_runs
    server.fire(scheduled)


def by_slack(server: KfpServer, pipeline: str, parameters: dict[str, str], store: Store) -> None:
    requests = RequestStore(store)
    request = asked(pipeline, parameters, channel="C1", message="C1/1")
    requests.add(request)
    services = SimpleNamespace(
        settings=settings_of(store),
        runs=KfpRuns(PipelineSettings(endpoint=server.url)),
        store=store,
        requests=requests,
        access=SimpleNamespace(is_granted=lambda _: True),
        slack=SimpleNamespace(edit=lambda *_: None),
        audit=lambda *_, **__: None,
    )
    RunTracker(cast(Any, services)).start(request)


def by_watcher(server: KfpServer, pipeline: str, parameters: dict[str, str], store: Store) -> None:
    request = asked(pipeline, parameters)
    RequestStore(store).add(request)
    runs, nothing = KfpRuns(PipelineSettings(endpoint=server.url)), cast(Any, None)
    Proposer(settings_of(store), store, RequestStore(store), runs, nothing, nothing, NOW)._start(request)


def by_bake(server: KfpServer, pipeline: str, parameters: dict[str, str], store: Store) -> None:
    runs = KfpRuns(PipelineSettings(endpoint=server.url))
    baker = Baker(settings_of(store), store, runs, dict, lambda: NOW)
    bake = SimpleNamespace(version="20261122.080000.c0ffee00", number=3, breach="Errors: 3 of 9.")
    baker._start_rollback(cast(Any, bake), runs, NOW)


def by_console(server: KfpServer, pipeline: str, parameters: dict[str, str], store: Store) -> None:
    PipelineRuns(settings_of(store), store)._start(pipeline, "ann", "key", parameters)


def settings_of(store: Store) -> Settings:
    """Of the bot, the watcher and the console, with the pipeline server of the environment."""
    return load(overrides=[f"store={store.uri}"])


def asked(pipeline: str, parameters: dict[str, str], **fields: Any) -> Request:
    people = {"asked_by": WATCHER, "answered_by": POLICY}
    return Request(id="000001-w", created=NOW, pipeline=pipeline, parameters=parameters, **people, **fields)


Start = Callable[[KfpServer, str, dict[str, str], Store], None]


CASES = [
    *product(NAMES, (by_command, by_schedule, by_slack, by_console)),
    *product(("continuous-training", "reindex", "rollback"), (by_watcher,)),
]


@pytest.mark.parametrize(("pipeline", "start"), CASES)
def test_every_pipeline_is_started(pipeline: str, start: Start, kfp: KfpServer, store: Store) -> None:
    start(kfp, pipeline, PARAMETERS[pipeline], store)
    (run,) = kfp.runs
    assert run.parameters.items() >= PARAMETERS[pipeline].items()
    assert ("started_by" in run.parameters) is (pipeline != "predict")


def test_a_bake_starts_a_rollback_once_and_not_again_after_a_person_stopped_it(kfp: KfpServer, store: Store) -> None:
    by_bake(kfp, "rollback", {}, store)
    (run,) = kfp.runs
    assert run.parameters["started_by"]
    run.begin()
    KfpRuns(PipelineSettings(endpoint=kfp.url))._kfp.call("run_service_terminate_run", run_id=run.id)
    run.end("FAILED")
    by_bake(kfp, "rollback", {}, store)
    assert len(kfp.runs) == 1


FROZEN = ("train.frozen=true", "data.source=s3://images")


@pytest.mark.parametrize("verb", [("run",), ("schedule", "--cron", "0 3 * * *")])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--source", ""), r"^The parameter source is empty; set it to s3://"),
        (("reindex",), "The parameter source is empty"),
        (("--source=s3://a", "--target", "nowhere"), "Invalid setting target = nowhere"),
        (("rollback", "--set=target=nowhere"), "Invalid setting target = nowhere"),
        (("--source=s3://a", "--serving-image", "serve:latest"), r"Invalid setting kubernetes\.image = serve:latest"),
        (("--source=s3://a", "--target", "kubernetes"), "needs the serving image by its digest"),
        (("rollback", "--set=target=kubernetes"), "needs the serving image by its digest"),
        (("--source=s3://a", "--set=train_accelerators=two"), "train_accelerators = 'two' is not a number of GPUs"),
        (("--source=s3://a", "--set=train_accelerators="), "train_accelerators = '' is not a number of GPUs"),
        (("--source=s3://a", "--preset", "frozen"), r"requires train\.weights"),
        (("--source=folder:/images", "--set=data.nodes=2"), "cannot reach the source"),
        (("promote", "--set=release=v"), "needs a reason"),
        (("predict", "--set=images=s3://a"), "The parameter out is empty"),
        (("predict", "--set=images=folder:a", "--set=out=s3://b", "--set=nodes=3"), "cannot reach the images"),
    ],
)
def test_what_is_known_to_fail_starts_nothing(
    words: tuple[str, ...], sentence: str, verb: tuple[str, ...], kfp: KfpServer
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        invoke(*verb, *words)
    assert not kfp.runs
    assert not kfp.state.recurring_runs


@pytest.mark.parametrize(
    "default", ["target=nowhere", "serving_image=serve:latest", "train_accelerators=two", "preset=bset"]
)
def test_default_that_no_run_can_have_is_not_uploaded(default: str) -> None:
    with pytest.raises(SettingsError, match=default.partition("=")[2]):
        compile_pipelines(None, IMAGE, [default], PipelineSettings())
