"""Who starts runs and moves the champion through the console,
and what of it is recorded where.
"""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import Store
from evernear.kubeflow import GOLDEN
from evernear.kubeflow.local_run import STARTED_BY_VARIABLE, pipeline_arguments
from evernear.release.promotions import whoami
from evernear.release.registry import Registry
from evernear.settings import Settings, load
from evernear.triggers.audit import AUDIT
from evernear.triggers.console.runs import LocalRuns, PipelineRuns, Runner
from tests.consoles import console_client, with_csrf
from tests.loopback.kfp import KfpServer
from tests.releases import MakeRelease

PROXY = {
    "console.identity_header": "X-Auth-Request-Email",
    "console.trusted_proxies": '["10.0.0.0/8"]',
    "console.may_start": '["ann@x"]',
    "console.may_promote": '["ann@x"]',
}


@pytest.fixture
def kfp() -> Iterator[KfpServer]:
    with KfpServer() as server:
        for name in ("continuous_training", "reindex", "promote", "rollback"):
            server.publish(GOLDEN / f"{name}.yaml", version="c0ffee1")
        yield server


def settings_of(store: Store, source: Path, **others: str) -> Settings:
    values = {"store": store.uri, "data.source": f"folder:{source}", **PROXY, **others}
    return load(overrides=[f"{name}={value}" for name, value in values.items()], environment={})


@pytest.fixture
def in_cluster(store: Store, source: Path, kfp: KfpServer) -> Settings:
    address = {"pipeline.endpoint": kfp.url, "pipeline.timeout_s": "5", "target": "kubernetes", "train.epochs": "3"}
    return settings_of(store, source, **address)


def behind_proxy(settings: Settings, store: Store, person: str, runner: Runner | None = None) -> TestClient:
    """The console behind a proxy, as ``person`` sees it;
    without a ``runner`` on Kubeflow Pipelines.
    """
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
    assert client.post("/runs", data={"pipeline": "continuous-training"}).status_code == 200
    (run,) = kfp.runs
    sent = run.resource["runtime_config"]["parameters"]
    assert (sent["started_by"], sent["store"], sent["target"]) == ("ann@x", store.uri, "kubernetes")
    assert sent["settings"]["train"] == {"epochs": 3}
    assert "console" not in sent["settings"], "a run needs no settings of the console"
    assert audited(store) == [{"who": "ann@x", "what": "start", "result": "done", "where": "console", "run": run.id}]
    again = client.post("/runs", data={"pipeline": "continuous-training"})
    assert (again.status_code, "already in progress" in again.text) == (409, True)
    assert len(kfp.runs) == 1
    assert audited(store)[-1]["result"] == "failed"
    run.begin()
    run.end("FAILED")
    assert client.post("/runs", data={"pipeline": "continuous-training"}).status_code == 200
    assert len(kfp.runs) == 2, "a run that has ended does not stand for the next one"


def test_two_clicks_at_the_same_time_start_one_run(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    """Both have read the list of runs before either starts one, as in two replicas."""
    first, second = PipelineRuns(in_cluster, store), PipelineRuns(in_cluster, store)
    listed = second._runs.list("reindex")
    started = first.start("reindex", "ann@x")
    second._runs.list = lambda pipeline, limit: listed
    assert second.start("reindex", "bob@x") == started
    assert len(kfp.runs) == 1


def test_run_in_progress_on_kubeflow_is_shown(in_cluster: Settings, store: Store) -> None:
    record = StepRecord.of_this_process("embed", datetime.now(UTC))
    RunRecord(store, "run-1").save_step(record.model_copy(update={"host": "a-pod"}))
    page = behind_proxy(in_cluster, store, "bob@x").get("/run-state").text
    assert "A run is in progress" in page
    assert "<b>embed</b>" in page


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
    assert client.post("/runs", data={"pipeline": "reindex"}).status_code == 403
    assert client.post("/releases/promote", data={"version": "v", "why": "w"}).status_code == 403
    assert [(each["who"], each["what"], each["result"]) for each in audited(store)] == [
        ("bob@x", "start", "refused"),
        ("bob@x", "promote", "refused"),
    ]
    assert kfp.runs == []


def test_unreachable_kubeflow_is_one_sentence(in_cluster: Settings, store: Store, kfp: KfpServer) -> None:
    client = behind_proxy(in_cluster, store, "ann@x")
    kfp.fail(status=503, times=100)
    failed = client.post("/runs", data={"pipeline": "reindex"})
    assert (failed.status_code, failed.text.count("\n")) == (503, 0)
    assert audited(store)[-1]["result"] == "failed"


def test_person_behind_a_proxy_is_recorded_as_the_one_who_started_a_local_run(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(store, source, workdir=str(source.parent))
    runner = LocalRuns(settings, ["--set", "no.such=setting"])
    runner.start("reindex", "ann@x")
    assert runner._process is not None
    passed = psutil.Process(runner._process.pid).environ()[STARTED_BY_VARIABLE]
    while not (failure := runner.failure()):
        time.sleep(0.05)
    assert "no.such" in failure
    assert passed == "ann@x"
    monkeypatch.setenv(STARTED_BY_VARIABLE, passed)
    assert pipeline_arguments(settings)["started_by"] == "ann@x"
    monkeypatch.delenv(STARTED_BY_VARIABLE)
    assert pipeline_arguments(settings)["started_by"] == whoami()


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
