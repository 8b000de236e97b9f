"""The bot with the real KFP client and a KFP API on loopback."""

import threading
from pathlib import Path
from typing import Any

import pytest

from evernear.common.run_record import RunRecord
from evernear.kubeflow.client import KfpRuns
from evernear.kubeflow.publish import fill_defaults
from evernear.release.registry import Registry
from evernear.reporting.notify import finalize
from evernear.settings import KubernetesSettings, PipelineSettings
from tests import ROOT
from tests.loopback.kfp import KfpServer
from tests.loopback.slack import SlackServer
from tests.real.triggers.slack.bot import ADA, Bot
from tests.releases import MakeRelease

GOLDEN = ROOT / "pipelines" / "golden" / "continuous_training.yaml"


SERVED = {"image": "serve@sha256:" + 64 * "a", "store_claim": "store"}


@pytest.fixture
def kfp_bot(slack: SlackServer, kfp: KfpServer, tmp_path: Path) -> Bot:
    (tmp_path / GOLDEN.name).write_bytes(fill_defaults(GOLDEN.read_bytes(), {"source": "s3://images"}))
    kfp.publish(tmp_path / GOLDEN.name, version="c0ffee1")
    return Bot(slack, KfpRuns(PipelineSettings(endpoint=kfp.url)), tmp_path, start=(ADA.id,), promote=(ADA.id,))


def test_only_parameters_that_are_set_are_sent(kfp_bot: Bot, kfp: KfpServer) -> None:
    prompt = kfp_bot.prompt("/retrain train.epochs=3 index.k=9")
    kfp_bot.click(ADA, prompt, "Start training")
    kfp_bot.poll()
    run = kfp.wait_for_run()
    started = run.resource["runtime_config"]["parameters"]
    assert set(started) == {"store", "started_by", "settings", "target"}
    assert started["settings"] == {"train": {"epochs": 3}, "index": {"k": 9}}
    run.begin()
    run.task("ingest", "SUCCEEDED")
    run.task("train", "RUNNING")
    kfp_bot.poll(20)
    assert "*Running*: train" in prompt.text


def test_concurrent_clicks_and_a_lost_response_start_one_run(kfp_bot: Bot, slack: SlackServer, kfp: KfpServer) -> None:
    prompt = kfp_bot.prompt()
    kfp.fail(operation="run_service_create_run", status=503, after=True)
    clicks = [slack.button(prompt, "Start training").by(ADA) for _ in range(4)]

    def deliver(click: dict[str, Any]) -> None:
        kfp_bot.deliver(click)
        kfp_bot.worker.poll()

    threads = [threading.Thread(target=deliver, args=(click,)) for click in clicks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        kfp_bot.poll(600)
    assert len(kfp.runs) == 1
    assert kfp.runs[0].id in prompt.text


def test_rollback_in_a_cluster_is_a_pipeline_run(kfp_bot: Bot, kfp: KfpServer, make_release: MakeRelease) -> None:
    """The bot has no rights in the cluster; the steps of the pipeline have."""
    kfp.publish(GOLDEN.with_name("rollback.yaml"), version="c0ffee1")
    kfp_bot.settings = kfp_bot.settings.model_copy(
        update={"target": "kubernetes", "kubernetes": KubernetesSettings(**SERVED)}
    )
    kfp_bot.restart()
    registry = Registry(kfp_bot.store)
    champion = None
    for release in (make_release(), make_release()):
        registry.publish(release.archive)
        champion = registry.set_champion(release.version, champion)
    assert champion is not None

    question = kfp_bot.query(ADA, "/evernear rollback")
    click = kfp_bot.slack.button(question, "Roll back").by(ADA)
    kfp_bot.deliver(click)
    kfp_bot.poll()
    run = kfp.wait_for_run()
    sent = run.resource["runtime_config"]["parameters"]
    assert (sent["release"], sent["started_by"]) == (champion.version, "ada (U0ADA in Slack)")
    assert (sent["target"], sent["store"]) == ("kubernetes", kfp_bot.settings.store_uri)
    run.begin()
    run.task("rollback", "FAILED", error="The rollout did not complete.")
    run.end("FAILED")
    kfp_bot.poll(20)
    assert "The rollout did not complete." in kfp_bot.slack.messages[-1].text

    kfp_bot.deliver(click)  # a copy of the click
    kfp_bot.poll()
    assert len(kfp.runs) == 1
    kfp_bot.click(ADA, question, "Roll back")
    kfp_bot.poll()
    assert len(kfp.runs) == 2
    restored = registry.roll_back(champion)
    record = RunRecord(kfp_bot.store, kfp.runs[1].id)
    record.save(rollback={"version": restored.version, "why": ""})
    finalize(record, "rollback", "SUCCEEDED", "")
    kfp.runs[1].begin()
    kfp.runs[1].end("SUCCEEDED")
    kfp_bot.poll(20)
    assert f"Rolled back: {restored.version}" in kfp_bot.slack.messages[-1].text
    assert {line["what"] for line in kfp_bot.audit()} == {"roll_back"}

    stale = kfp_bot.slack.button(question, "Roll back").by(ADA)
    kfp_bot.deliver(stale)
    kfp_bot.poll()
    assert len(kfp.runs) == 2


def test_promotion_in_a_cluster_is_a_pipeline_run(kfp_bot: Bot, slack: SlackServer, kfp: KfpServer) -> None:
    kfp.publish(GOLDEN.with_name("promote.yaml"), version="c0ffee1")
    kfp_bot.settings = kfp_bot.settings.model_copy(
        update={"target": "kubernetes", "kubernetes": KubernetesSettings(**SERVED)}
    )
    kfp_bot.restart()
    kfp_bot.start()
    run = kfp.wait_for_run()
    record = RunRecord(kfp_bot.store, run.id)
    record.save(archived={"version": "20261122.090000.0a0b0c0d"})
    finalize(record, "continuous-training", "SUCCEEDED", "")
    run.begin()
    run.end("SUCCEEDED")
    kfp_bot.poll(20)
    kfp_bot.click(ADA, slack.messages[-1], "Promote anyway")
    kfp_bot.poll()
    sent = kfp.wait_for_run(2).resource["runtime_config"]["parameters"]
    assert sent["release"] == "20261122.090000.0a0b0c0d"
    assert sent["reason"].startswith("requested in Slack")
    assert sent["started_by"] == "ada (U0ADA in Slack)"
