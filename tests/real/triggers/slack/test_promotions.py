"""Promotions and rollbacks, with real releases in a real registry."""

import json
from collections.abc import Callable

import pytest

from evernear import deployment
from evernear.common.run_record import RunRecord
from evernear.evaluation.verdict import Verdict
from evernear.kubeflow.runs import State
from evernear.release.registry import Registry
from evernear.reporting.notify import finalize
from tests.loopback.slack import SlackServer
from tests.loopback.slack.server import PostedMessage
from tests.real.triggers.slack.bot import ADA, BOB, Bot, MemoryRuns
from tests.releases import MakeRelease, PackedRelease

EndRun = Callable[[bool], PostedMessage]


@pytest.fixture(scope="module")
def releases_by_verdict(make_release: MakeRelease) -> dict[bool, list[PackedRelease]]:
    """Real releases by verdict; packing one takes a second."""
    return {True: [make_release() for _ in range(3)], False: [make_release(promote=False)]}


@pytest.fixture
def end_run(
    bot: Bot,
    slack: SlackServer,
    runs: MemoryRuns,
    registry: Registry,
    releases_by_verdict: dict[bool, list[PackedRelease]],
) -> EndRun:
    """End a run with a release, promoted or held, and return the message with its verdict."""
    next_of = {promote: iter(releases) for promote, releases in releases_by_verdict.items()}

    def run(promote: bool) -> PostedMessage:
        champion, release = registry.champion(), next(next_of[promote])
        bot.start()
        (started,) = [run for run in runs.started.values() if run.state is State.PENDING]
        record = registry.publish(release.archive)
        verdict = Verdict.load(release.verdict).model_dump(mode="json")
        of_run = RunRecord(bot.store, started.id)
        of_run.save(verdict=verdict, archived={"version": record.manifest.version}, metrics={})
        if promote:
            moved = registry.set_champion(record.manifest.version, champion)
            of_run.save(deployment={"version": moved.version})
        finalize(of_run, "continuous-training", "SUCCEEDED", "")
        runs.set(State.SUCCEEDED, ended=bot.clock(), gate=State.SUCCEEDED)
        bot.poll(30)
        return slack.messages[-1]

    return run


def test_promotion_of_a_held_release_records_the_person(bot: Bot, registry: Registry, end_run: EndRun) -> None:
    end_run(True)
    earlier = end_run(True)
    serving = registry.champion()
    assert serving is not None
    message = end_run(False)
    assert f"{serving.version}* is still live" in message.text
    assert message.buttons == ["Promote anyway", "Open in Kubeflow"]
    click = bot.slack.button(message, "Promote anyway")
    assert "Your name is recorded" in click.button["confirm"]["text"]["text"]

    bot.deliver(click.by(BOB))
    bot.poll()
    assert registry.champion() == serving
    bot.deliver(click.by(ADA))
    bot.deliver(click.by(ADA))
    bot.poll()
    champion = registry.champion()
    assert champion is not None
    assert champion.version == json.loads(click.button["value"])["release"]
    assert (champion.promotion.how, champion.promotion.by) == ("force", "ada (U0ADA in Slack)")
    assert champion.promotion.number == 3
    assert bot.slack.messages[-1].thread == message.thread == bot.slack.messages[-2].thread
    assert f"*{champion.version}* is live" in bot.slack.messages[-1].text

    # The button of the earlier run is for a former champion.
    bot.click(ADA, earlier, "Roll back")
    bot.poll()
    assert registry.champion() == champion
    assert "The champion has changed since" in bot.slack.messages[-1].text
    audited = {(line["what"], line["result"], line["release"]) for line in bot.audit() if line["what"] != "start"}
    assert audited == {
        ("release.promote", "refused", ""),
        ("promote", "done", champion.version),
        ("roll_back", "failed", serving.version),
    }


def test_double_click_rolls_back_once(bot: Bot, slack: SlackServer, registry: Registry, end_run: EndRun) -> None:
    versions = []
    for _ in range(3):
        verdict = end_run(True)
        champion = registry.champion()
        assert champion is not None
        versions.append(champion.version)
    assert verdict.buttons == ["Roll back", "Open in Kubeflow"]
    click = slack.button(verdict, "Roll back")
    bot.deliver(click.by(ADA))
    bot.poll()
    bot.deliver(click.by(ADA))
    bot.restart()
    bot.poll()
    champion = registry.champion()
    assert champion is not None
    assert champion.version == versions[1]
    assert champion.promotion.how == "rollback"


def test_crash_after_a_rollback_is_reported_by_the_next_process(
    bot: Bot, slack: SlackServer, registry: Registry, end_run: EndRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_run(True)
    verdict = end_run(True)
    roll_back = deployment.roll_back

    def roll_back_and_die(*arguments: object, **more: object) -> None:
        roll_back(*arguments, **more)  # pyright: ignore
        bot.store.is_down = True
        raise RuntimeError("killed")

    monkeypatch.setattr(deployment, "roll_back", roll_back_and_die)
    bot.click(ADA, verdict, "Roll back")
    bot.poll()
    monkeypatch.undo()
    bot.store.is_down = False
    bot.restart()
    bot.poll()
    champion = registry.champion()
    assert champion is not None
    assert champion.promotion.number == 3
    assert "rolled back" in slack.messages[-1].text
    assert [line["result"] for line in bot.audit() if line["what"] == "roll_back"] == ["done"]


def test_rollback_command_prompts_before_it_rolls_back(bot: Bot, registry: Registry, end_run: EndRun) -> None:
    end_run(True)
    end_run(True)
    question = bot.query(ADA, "/evernear rollback")
    assert question.buttons == ["Roll back"]
    bot.click(ADA, question, "Roll back")
    bot.poll()
    champion = registry.champion()
    assert champion is not None
    assert champion.promotion.how == "rollback"
    assert (bot.slack.messages[-1].channel, bot.slack.messages[-1].thread) == (question.channel, None)


def test_failed_promotion_is_reported_and_can_be_repeated(bot: Bot, registry: Registry, end_run: EndRun) -> None:
    end_run(True)
    message = end_run(False)
    archive = registry.get(
        json.loads(bot.slack.button(message, "Promote anyway").button["value"])["release"]
    ).archive_key
    content = bot.store.get(archive)
    bot.store.delete(archive)
    bot.click(ADA, message, "Promote anyway")
    bot.poll()
    assert "*Not promoted.*" in bot.slack.messages[-1].text
    bot.store.put(archive, content)
    bot.click(ADA, message, "Promote anyway")
    bot.poll()
    assert "is live" in bot.slack.messages[-1].text


def test_buttons_without_permissions_are_hidden(bot: Bot, end_run: EndRun) -> None:
    bot.restart(promote=())
    assert end_run(True).buttons == ["Open in Kubeflow"]
    assert end_run(False).buttons == ["Open in Kubeflow"]
