"""Who starts a reindex and moves the champion through the console, and what of it is recorded
where."""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import pytest
from starlette.testclient import TestClient

from evernear.common.audit import AUDIT
from evernear.common.progress import DIRECTORY_FORMAT, Event
from evernear.common.run_record import RunRecord, StepProgress, StepRecord
from evernear.common.store import Store
from evernear.console.runs import LocalRuns, PipelineRuns, Runner
from evernear.kubeflow import GOLDEN
from evernear.kubeflow.local_run import STARTED_BY_VARIABLE, pipeline_arguments
from evernear.release.promotions import whoami
from evernear.release.registry import Registry
from evernear.reporting.notify import RunOutcome
from evernear.settings import Settings, load
from tests.consoles import console_client, with_csrf
from tests.loopback.kfp import KfpServer
from tests.releases import MakeRelease

PROXY = {
    "console.identity_header": "X-Auth-Request-Email",
    "console.trusted_proxies": '["10.0.0.0/8"]',
    "permissions.start": '["ann@x"]',
    "permissions.promote": '["ann@x"]',
}


def settings_of(store: Store, source: Path, **others: str) -> Settings:
    values = {"store": store.uri, "data.source": f"folder:{source}", **PROXY, **others}
    return load(overrides=[f"{name}={value}" for name, value in values.items()], environment={})


@pytest.fixture
def in_cluster(store: Store, source: Path, kfp: KfpServer) -> Settings:
    for name in ("continuous_training", "reindex", "promote", "rollback"):
        kfp.publish(GOLDEN / f"{name}.yaml", version="c0ffee1")
    address = {"pipeline.endpoint": kfp.url, "target": "kubernetes", "train.epochs": "3"}
    served = {"kubernetes.image": "serve@sha256:" + 64 * "a", "kubernetes.store_claim": "store"}
    return settings_of(store, source, **address, **served)


def behind_proxy(settings: Settings, store: Store, person: str, runner: Runner | None = None) -> TestClient:
    """The console behind a proxy, as ``person`` sees it; without a ``runner`` on Kubeflow
    Pipelines."""
    runner = runner or PipelineRuns(settings, store)
    client = console_client(settings, store, runner, address="10.1.2.3", **{"X-Auth-Request-Email": person})
    assert client.get("/").status_code == 200
    return with_csrf(client)


def audited(store: Store) -> list[dict[str, str]]:
    """The audit log, without times and ids, oldest first."""
    events = [json.loads(store.get(info.key)) for info in store.list(AUDIT)]
    shown = ("who", "what", "result", "where", "run", "release", "detail")
    return [{name: event[name] for name in shown if event[name]} for event in sorted(events, key=lambda e: e["at"])]


def test_run_on_kubeflow_has_the_settings_and_the_person(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    client = behind_proxy(in_cluster, store, "ann@x")
    assert client.post("/review/reindex").status_code == 200
    (run,) = kfp.runs
    sent = run.resource["runtime_config"]["parameters"]
    assert (sent["started_by"], sent["store"], sent["target"]) == ("ann@x", store.uri, "kubernetes")
    assert sent["settings"]["train"] == {"epochs": 3}
    assert "console" not in sent["settings"], "a run needs no settings of the console"
    assert audited(store) == [{"who": "ann@x", "what": "start", "result": "done", "where": "console", "run": run.id}]
    again = client.post("/review/reindex")
    assert (again.status_code, "already in progress" in again.text) == (409, True)
    assert len(kfp.runs) == 1
    assert audited(store)[-1]["result"] == "failed"
    run.begin()
    run.end("FAILED")
    assert client.post("/review/reindex").status_code == 200
    assert len(kfp.runs) == 2, "a run that has ended does not stand for the next one"


def test_two_clicks_at_the_same_time_start_one_run(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    """Both have read the list of runs before either starts one, as in two replicas."""
    first, second = PipelineRuns(in_cluster, store), PipelineRuns(in_cluster, store)
    listed = second._runs.list("reindex")
    started = first.start("reindex", "ann@x")
    second._runs.list = lambda pipeline, limit: listed
    assert second.start("reindex", "bob@x") == started
    assert len(kfp.runs) == 1


def test_line_follows_a_reindex_on_kubeflow_to_its_outcome(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    client = behind_proxy(in_cluster, store, "ann@x")
    assert "No run has ended yet." in client.get("/review/reindex").text
    assert "in progress: starting" in client.post("/review/reindex").text
    (run,) = kfp.runs
    run.begin()
    now = datetime.now(UTC)
    here = StepRecord.of_this_process("embed", now)
    progress = StepProgress(at=now, message="500 of 900 images, about 1 min left", done=500, total=900, left_s=60.0)
    RunRecord(store, run.id).save_step(here.model_copy(update={"host": "a-pod", "progress": progress}))
    line = client.get("/review/reindex?watching")
    assert "embed: 500 of 900 images, about 1 min left" in line.text
    assert 'hx-trigger="every 2s"' in line.text, "the line polls while the run is in progress"
    assert "HX-Trigger" not in line.headers
    outcome = RunOutcome(run=run.id, state="held", reasons=("The candidate is worse.",))
    RunRecord(store, run.id).save(outcome=outcome.model_dump(mode="json"))
    run.end("SUCCEEDED")
    line = client.get("/review/reindex?watching")
    assert "The last run: held: The candidate is worse." in line.text
    assert "hx-trigger" not in line.text, "and no longer"
    assert line.headers["HX-Trigger"] == "run-ended"
    assert "HX-Trigger" not in client.get("/review/reindex").headers, "a page that opens later saw no run"


def test_line_shows_the_local_run_and_its_failure(store: Store, source: Path) -> None:
    settings = settings_of(store, source, workdir=str(source.parent))
    directory = source.parent / "runs" / f"{datetime.now(UTC):{DIRECTORY_FORMAT}}"
    directory.mkdir(parents=True)
    event = Event(at=datetime.now(UTC), step="embed", kind="progress", message="500 of 900 images")
    (directory / "events.jsonl").write_text(event.model_dump_json() + "\n")
    (source.parent / "run.pid").write_text(str(os.getpid()))
    client = behind_proxy(settings, store, "ann@x", LocalRuns(settings, ()))
    assert "A run is in progress: embed: 500 of 900 images" in client.get("/review/reindex").text
    refused = client.post("/review/reindex")
    assert (refused.status_code, "already in progress" in refused.text) == (409, True)
    (source.parent / "run.pid").unlink()
    assert "The last run: stopped before it ended: it was interrupted" in client.get("/review/reindex").text
    outcome = RunOutcome(run="run-1", state="failed", step="embed", reasons=("Out of memory.",))
    (directory / "run-1/notify").mkdir(parents=True)
    outcome.save(directory / "run-1/notify/outcome")
    assert '<p class="fault">The last run: failed at embed: Out of memory.' in client.get("/review/reindex").text


def test_promotion_and_rollback_on_kubeflow_have_reason_and_person(
    in_cluster: Settings, store: Store, kfp: KfpServer, make_release: MakeRelease
) -> None:
    registry, champion = Registry(store), None
    released = [registry.publish(make_release(promote=promote).archive).manifest.version for promote in (True, False)]
    champion = registry.set_champion(released[0], champion)
    client = behind_proxy(in_cluster, store, "ann@x")
    form = {"version": released[1], "why": "a new camera"}
    refused = client.post("/releases/promote", data=form)
    assert (refused.status_code, "verdict on this release is hold" in refused.text) == (400, True)
    assert kfp.runs == []
    assert "A run promotes release" in client.post("/releases/promote", data=form | {"force": "yes"}).text
    sent = kfp.runs[0].resource["runtime_config"]["parameters"]
    assert (sent["release"], sent["reason"], sent["started_by"]) == (released[1], "a new camera", "ann@x")
    registry.set_champion(released[1], champion)
    assert "rolls back" in client.post("/releases/rollback", data={"version": released[1], "why": "worse"}).text
    sent = kfp.runs[1].resource["runtime_config"]["parameters"]
    assert (sent["release"], sent["reason"], sent["started_by"]) == (released[1], "worse", "ann@x")
    assert [(each["what"], each["result"], each["release"]) for each in audited(store)] == [
        ("promote", "failed", released[1]),
        ("promote", "done", released[1]),
        ("roll_back", "done", released[1]),
    ]


def test_refused_person_is_recorded(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    client = behind_proxy(in_cluster, store, "bob@x")
    assert client.post("/review/reindex").status_code == 403
    assert client.post("/releases/promote", data={"version": "v", "why": "w"}).status_code == 403
    assert [(each["who"], each["what"], each["result"]) for each in audited(store)] == [
        ("bob@x", "start", "refused"),
        ("bob@x", "promote", "refused"),
    ]
    assert kfp.runs == []


def test_unreachable_kubeflow_is_one_sentence(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    client = behind_proxy(in_cluster, store, "ann@x")
    kfp.fail(status=503, times=100)
    failed = client.post("/review/reindex")
    assert (failed.status_code, failed.text.count("\n")) == (503, 0)
    assert audited(store)[-1]["result"] == "failed"


def test_person_behind_a_proxy_is_recorded_as_the_one_who_started_a_local_run(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(store, source, workdir=str(source.parent))
    runner = LocalRuns(settings, ["--set", "no.such=setting"])
    with patch.object(subprocess, "Popen", wraps=subprocess.Popen) as started:
        runner.start("reindex", "ann@x")
    passed = started.call_args.kwargs["env"][STARTED_BY_VARIABLE]
    assert runner._process is not None
    runner._process.wait()
    state = runner.state()
    assert (state.is_failed, "no.such" in state.sentence) == (True, True)
    assert passed == "ann@x"
    monkeypatch.setenv(STARTED_BY_VARIABLE, passed)
    assert pipeline_arguments(settings, {})["started_by"] == "ann@x"
    monkeypatch.delenv(STARTED_BY_VARIABLE)
    assert pipeline_arguments(settings, {})["started_by"] == whoami()


def test_person_behind_a_proxy_is_in_the_history_of_a_local_promotion(
    store: Store, source: Path, make_release: MakeRelease
) -> None:
    registry = Registry(store)
    version = registry.publish(make_release().archive).manifest.version
    settings = settings_of(store, source, workdir=str(source.parent), target="registry")
    client = behind_proxy(settings, store, "ann@x", LocalRuns(settings, ()))
    assert client.post("/releases/promote", data={"version": version, "why": "first"}).status_code == 200
    (promotion,) = registry.history()
    assert (promotion.by, promotion.why) == ("ann@x", "first")
