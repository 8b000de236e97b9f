"""Runs through the real ``kfp.Client``, on a loopback server that enforces the published API."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.errors import PipelineServerError, SettingsError
from evernear.kubeflow import GOLDEN, client, connection
from evernear.kubeflow.client import KfpRuns
from evernear.kubeflow.runs import State, outcome_of
from evernear.reporting.notify import finalize
from evernear.settings import PipelineSettings
from tests.loopback.kfp import KfpServer

PIPELINE = "continuous-training"
COMPILED = GOLDEN / "continuous_training.yaml"
CREATE = "run_service_create_run"


class Clock:
    """The server's clock. It advances by a second at each reading, so that no two timestamps are
    equal."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 22, 8, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


pytestmark = pytest.mark.usefixtures("short_backoff")


@pytest.fixture(autouse=True)
def _short_lock_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOCK_POLL_S", 0.02)


@pytest.fixture(autouse=True)
def _first_version(kfp: KfpServer) -> None:
    kfp.state.now = Clock()
    kfp.publish(COMPILED, version="first")


@pytest.fixture
def kfp_runs(kfp: KfpServer) -> KfpRuns:
    return runs_of(kfp)


def runs_of(server: KfpServer, **settings: Any) -> KfpRuns:
    return KfpRuns(PipelineSettings.model_validate({"endpoint": server.url, **settings}))


def test_parameters_come_from_the_newest_version(kfp: KfpServer, kfp_runs: KfpRuns, tmp_path: Path) -> None:
    newer = tmp_path / "newer.yaml"
    newer.write_text(COMPILED.read_text().replace("train_accelerators", "train_gpus"))
    declared = {parameter.name: parameter for parameter in kfp_runs.parameters(PIPELINE)}
    assert declared["store"].type == "STRING"
    assert declared["store"].default == "s3://evernear"
    assert declared["store"].description.startswith("Object store")
    assert declared["settings"].type == "STRUCT"
    assert not any(parameter.required for parameter in declared.values())
    assert "train_accelerators" in declared
    kfp.publish(newer, version="second")
    assert "train_gpus" in {parameter.name for parameter in kfp_runs.parameters(PIPELINE)}
    assert kfp_runs.start(PIPELINE, {}, "a").pipeline_version == "second"


def test_start_is_idempotent_per_key(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    first = kfp_runs.start(PIPELINE, {"store": "file:///store"}, "2026-11-22T08:00:00+00:00 50%")
    again = runs_of(kfp).start(PIPELINE, {"store": "file:///elsewhere"}, "2026-11-22T08:00:00+00:00 50%")
    other = kfp_runs.start(PIPELINE, {"store": "file:///store"}, "2026-11-22t08:00:00+00:00 50%")
    assert first == again
    assert first.key == "2026-11-22T08:00:00+00:00 50%"
    assert first.parameters == {"store": "file:///store"}
    assert (first.pipeline, first.pipeline_version, first.state) == (PIPELINE, "first", State.PENDING)
    assert first.url == f"{kfp.url}/#/runs/details/{first.id}"
    assert other.id != first.id, "KFP's search ignores case, keys do not"
    assert [run.id for run in kfp.runs] == [first.id, other.id]
    assert [e["display_name"] for e in kfp.state.experiments.values()] == ["evernear"]


def test_concurrent_starts_with_one_key_create_one_run(kfp: KfpServer, store: Store) -> None:
    barrier = threading.Barrier(6)

    def start(_: int) -> str:
        starter = runs_of(kfp)
        barrier.wait()
        return starter.start(PIPELINE, {}, "proposal-1", store).id

    with ThreadPoolExecutor(6) as pool:
        ids = set(pool.map(start, range(6)))
    assert ids == {run.id for run in kfp.runs}
    assert len(ids) == 1
    assert not list(store.list("runs/")), "the lock is released"


def test_start_ignores_clones_of_the_run(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    started = kfp_runs.start(PIPELINE, {}, "a")
    clone = {**kfp.run(started.id).resource, "display_name": f"Clone of {started.name}"}
    del clone["created_at"]
    kfp.state.create_run(clone)
    assert kfp_runs.start(PIPELINE, {}, "a").id == started.id
    assert kfp_runs.list()[0].key == ""


def test_repeated_start_after_a_lost_response_returns_the_run(kfp: KfpServer, kfp_runs: KfpRuns, store: Store) -> None:
    kfp.fail(operation=CREATE, status=504, after=True)
    with pytest.raises(PipelineServerError, match=r"answered 504.* may exist nevertheless: a start with the key a ret"):
        kfp_runs.start(PIPELINE, {}, "a", store)
    assert kfp.calls.count(CREATE) == 1, "create requests are not retried"
    kfp.fail(operation=CREATE, status=504, after=True)
    with pytest.raises(PipelineServerError, match="`evernear pipeline run --key b` returns it"):
        kfp_runs.start(PIPELINE, {}, "b", store, "evernear pipeline run --key b")
    assert len(list(store.list("runs/starting/"))) == 2
    assert [kfp_runs.start(PIPELINE, {}, key, store).id for key in "ab"] == [run.id for run in kfp.runs]
    assert not list(store.list("runs/")), "the locks of runs that stand go"


def test_lock_of_an_unfinished_start_expires(kfp: KfpServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.5)
    short_timeout = runs_of(kfp)
    kfp.fail(operation=CREATE, status=503)
    with pytest.raises(PipelineServerError, match="answered 503"):
        short_timeout.start(PIPELINE, {}, "a", store)
    assert len(list(store.list("runs/"))) == 1, "the lock stays because the server may still execute the request"
    started = datetime.now(UTC)
    assert short_timeout.start(PIPELINE, {}, "a", store).id == kfp.runs[0].id
    assert datetime.now(UTC) - started > timedelta(seconds=1.0), "the lease is twice the request timeout"
    assert len(kfp.runs) == 1
    assert not list(store.list("runs/"))


def test_rejected_start_releases_the_lock(kfp: KfpServer, kfp_runs: KfpRuns, store: Store) -> None:
    kfp.fail(operation=CREATE, status=403)
    with pytest.raises(PipelineServerError, match="denied the request"):
        kfp_runs.start(PIPELINE, {}, "a", store)
    assert not list(store.list("runs/"))
    assert kfp_runs.start(PIPELINE, {}, "a", store).state is State.PENDING


def test_start_validates_parameters_before_creating_anything(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    for parameters, sentence in (
        ({"tagret": "local"}, "no parameter 'tagret'; did you mean 'target'?"),
        ({"target": 3}, "target must be a STRING, not 3"),
        ({"settings": "digits"}, "settings must be a STRUCT"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            kfp_runs.start(PIPELINE, parameters, "a")
    assert not kfp.runs
    assert not kfp.state.experiments


def test_show_lists_steps_with_their_states(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    started = kfp_runs.start(PIPELINE, {}, "a")
    assert kfp_runs.show(started.id).steps == ()
    run = kfp.run(started.id)
    run.begin()
    run.task("exit-handler-1", "RUNNING")
    run.task("ingest", "SUCCEEDED")
    run.task("validate", "RUNNING")
    run.task("train", "SKIPPED")
    run_detail = kfp_runs.show(started.id)
    assert run_detail.state is State.RUNNING
    assert run_detail.ended is None, "KFP reports 1970"
    states = {step.name: step.state for step in run_detail.steps}
    assert states == {"ingest": State.SUCCEEDED, "validate": State.RUNNING, "train": State.SKIPPED}, (
        "without root, groups, drivers and executors"
    )
    assert [step.name for step in run_detail.steps] == ["ingest", "validate", "train"]
    ingest, validate = run_detail.steps[0], run_detail.steps[1]
    assert ingest.started is not None
    assert ingest.ended is not None
    assert ingest.started <= ingest.ended < validate.started  # type: ignore[operator] - it has started
    assert validate.ended is None
    run.task("validate", "FAILED", error="Images are missing.")
    run.end("FAILED")
    run_detail = kfp_runs.show(started.id)
    assert (run_detail.state, run_detail.steps[1].error) == (State.FAILED, "Images are missing.")
    assert run_detail.ended is not None
    assert run_detail.ended > run_detail.created


def test_every_kfp_state_is_mapped(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    started = kfp_runs.start(PIPELINE, {}, "a")

    def shown(kfp_state: str) -> State:
        kfp.run(started.id).resource["state"] = kfp_state
        return kfp_runs.show(started.id).state

    final = {"CANCELED", "FAILED", "SKIPPED", "SUCCEEDED"}
    for name in ("PENDING", "RUNNING", "PAUSED", "CANCELING", *final):
        assert (shown(name), shown(name).is_final) == (State[name], name in final)
    assert shown("RUNTIME_STATE_UNSPECIFIED") is State.PENDING


def test_runs_are_listed_newest_first(
    kfp: KfpServer, kfp_runs: KfpRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAGE_SIZE", 10)
    other = tmp_path / "other.yaml"
    other.write_text(COMPILED.read_text().replace("name: continuous-training", "name: another"))
    kfp.publish(other, version="first")
    template = kfp_runs.start(PIPELINE, {}, "0")
    base = {k: v for k, v in kfp.run(template.id).resource.items() if k not in ("created_at", "run_id")}
    for number in range(1, 26):
        kfp.state.create_run({**base, "display_name": f"{PIPELINE} [{number}]"})
    newest = kfp_runs.start("another", {}, "x")
    listed = kfp_runs.list(limit=3)
    assert [run.key for run in listed] == ["x", "25", "24"]
    assert listed[0] == newest
    assert [run.key for run in kfp_runs.list(PIPELINE, limit=200)] == [str(n) for n in range(25, -1, -1)], (
        "several pages"
    )


def test_a_run_that_was_stopped_in_the_ui_was_stopped(kfp: KfpServer, kfp_runs: KfpRuns, store: Store) -> None:
    """KFP calls it failed if its tasks have retries, and tells the exit step nothing."""
    started = kfp_runs.start(PIPELINE, {}, "a")
    kfp.run(started.id).begin()
    kfp_runs._kfp.call("run_service_terminate_run", run_id=started.id)
    finalize(RunRecord(store, started.id), PIPELINE, "RUNNING", "")
    assert outcome_of(store, kfp_runs.show(started.id)) is None, "the run has not ended"
    kfp.run(started.id).end("FAILED")
    stopped = kfp_runs.show(started.id)
    assert (stopped.state, kfp_runs.list()[0].state) == (State.CANCELED, State.CANCELED)
    outcome = outcome_of(store, stopped)
    assert outcome is not None
    assert outcome.summary() == "stopped in Kubeflow Pipelines."


def test_stop_terminates_a_run_once(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    started = kfp_runs.start(PIPELINE, {}, "a")
    run = kfp.run(started.id)
    run.begin()
    kfp_runs.stop(started.id)
    assert kfp_runs.show(started.id).state is State.CANCELING
    kfp_runs.stop(started.id)
    run.end("CANCELED")
    kfp_runs.stop(started.id)
    assert kfp_runs.show(started.id).state is State.CANCELED
    assert kfp.calls.count("run_service_terminate_run") == 1


def test_stop_ignores_a_run_that_has_just_ended(
    kfp: KfpServer, kfp_runs: KfpRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = kfp_runs.start(PIPELINE, {}, "a")
    run = kfp.run(started.id)
    original_call = kfp_runs._kfp.call

    def end_before_termination(operation: str, **arguments: Any) -> Any:
        if operation == "run_service_terminate_run":
            run.begin()
            run.end("SUCCEEDED")
        return original_call(operation, **arguments)

    monkeypatch.setattr(kfp_runs._kfp, "call", end_before_termination)
    kfp_runs.stop(started.id)
    assert kfp_runs.show(started.id).state is State.SUCCEEDED


def test_show_works_after_the_version_is_deleted(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    started = kfp_runs.start(PIPELINE, {}, "a")
    run = kfp.run(started.id)
    run.begin()
    run.task("ingest", "RUNNING")
    kfp.state.versions.clear()
    kfp.state.pipelines.clear()
    run_detail = runs_of(kfp).show(started.id)
    assert run_detail.pipeline == run.resource["pipeline_version_reference"]["pipeline_id"]
    assert [step.name for step in run_detail.steps] == ["ingest"]


def test_missing_resources_are_reported(kfp: KfpServer, kfp_runs: KfpRuns) -> None:
    with pytest.raises(PipelineServerError, match="No run gone at"):
        kfp_runs.show("gone")
    with pytest.raises(PipelineServerError, match="No run gone at"):
        kfp_runs.stop("gone")
    with pytest.raises(PipelineServerError, match=r'No pipeline "nothing" .*evernear pipeline upload'):
        kfp_runs.start("nothing", {}, "a")
    kfp.state.versions.clear()
    with pytest.raises(PipelineServerError, match="has no version"):
        kfp_runs.parameters(PIPELINE)


def test_multi_user_kfp_requires_the_namespace() -> None:
    with KfpServer(namespaces={"alice"}, now=Clock()) as server:
        server.publish(COMPILED, version="first", namespace="alice")
        runs = runs_of(server, namespace="alice")
        started = runs.start(PIPELINE, {}, "a")
        assert runs.start(PIPELINE, {}, "a") == started
        assert runs.list() == (started,)
        assert {e["namespace"] for e in server.state.experiments.values()} == {"alice"}
        with pytest.raises(PipelineServerError, match=r"empty namespace .* set pipeline\.namespace"):
            runs_of(server).start(PIPELINE, {}, "b")
        with pytest.raises(PipelineServerError, match=r"denied the request .*pipeline\.namespace"):
            runs_of(server, namespace="bob").list()
