"""Promote anyway and roll back, with real releases in a real registry."""

import json
from collections.abc import Callable

import pytest
from bot import ADA, BOB, Bot, MemoryRuns
from releases import MakeRelease, PackedRelease

from evernear import deployment
from evernear.evaluation.verdict import Verdict
from evernear.kubeflow.runs import State
from evernear.release.registry import Registry
from evernear.reporting.notify import finalize
from evernear.run_record import RunRecord
from tests.loopback.slack import SlackServer
from tests.loopback.slack.server import Shown

Ran = Callable[[bool], Shown]


@pytest.fixture
def registry(bot: Bot) -> Registry:
    return Registry(bot.store)


@pytest.fixture(scope="module")
def packed(make_release: MakeRelease) -> dict[bool, list[PackedRelease]]:
    """Real releases by what their verdict says; to pack one takes a second."""
    return {True: [make_release() for _ in range(3)], False: [make_release(promote=False)]}


@pytest.fixture
def ran(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, registry: Registry, packed: dict[bool, list[PackedRelease]]
) -> Ran:
    """Let a run come to a release, promoted or held, and return the verdict's message."""
    next_of = {promote: iter(releases) for promote, releases in packed.items()}

    def run(promote: bool) -> Shown:
        champion, release = registry.champion(), next(next_of[promote])
        bot.clicked(ADA, bot.asks(), "Start training")
        bot.look()
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
        bot.look(30)
        return slack.messages[-1]

    return run


def test_a_held_release_is_promoted_by_a_person_who_stays_in_the_history(
    bot: Bot, slack: SlackServer, registry: Registry, ran: Ran
) -> None:
    ran(True)
    earlier = ran(True)
    serving = registry.champion()
    assert serving is not None
    held = ran(False)
    assert f"{serving.version}* serves as before" in held.text
    assert held.buttons == ["Promote anyway", "Open in Kubeflow"]
    click = slack.button(held, "Promote anyway")
    assert "Your name goes into the history" in click.button["confirm"]["text"]["text"]

    bot.receives(click.by(BOB))
    bot.look()
    assert registry.champion() == serving
    bot.receives(click.by(ADA))
    bot.receives(click.by(ADA))
    bot.look()
    champion = registry.champion()
    assert champion is not None
    assert champion.version == json.loads(click.button["value"])["release"]
    assert (champion.promotion.how, champion.promotion.by) == ("force", "ada (U0ADA in Slack)")
    assert champion.promotion.number == 3
    assert slack.messages[-1].thread == held.thread == slack.messages[-2].thread
    assert f"*{champion.version}* serves now" in slack.messages[-1].text

    # The earlier run's button is about a champion that is one no longer.
    bot.clicked(ADA, earlier, "Roll back")
    bot.look()
    assert registry.champion() == champion
    assert "The champion has changed since" in slack.messages[-1].text
    told = {(line["what"], line["result"], line["release"]) for line in bot.audit() if line["what"] != "start"}
    assert told == {
        ("promote", "refused", ""),
        ("promote", "done", champion.version),
        ("roll_back", "failed", serving.version),
    }


def test_two_clicks_on_roll_back_take_one_move_back(bot: Bot, slack: SlackServer, registry: Registry, ran: Ran) -> None:
    versions = []
    for _ in range(3):
        verdict = ran(True)
        champion = registry.champion()
        assert champion is not None
        versions.append(champion.version)
    assert verdict.buttons == ["Roll back", "Open in Kubeflow"]
    click = slack.button(verdict, "Roll back")
    bot.receives(click.by(ADA))
    bot.look()
    bot.receives(click.by(ADA))
    bot.restart()
    bot.look()
    champion = registry.champion()
    assert champion is not None
    assert champion.version == versions[1]
    assert champion.promotion.how == "rollback"


def test_a_process_that_dies_after_the_move_says_so_when_it_is_back(
    bot: Bot, slack: SlackServer, registry: Registry, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(True)
    verdict = ran(True)
    roll_back = deployment.roll_back

    def roll_back_and_die(*arguments: object, **more: object) -> None:
        roll_back(*arguments, **more)  # pyright: ignore
        bot.store.is_down = True
        raise RuntimeError("killed")

    monkeypatch.setattr(deployment, "roll_back", roll_back_and_die)
    bot.clicked(ADA, verdict, "Roll back")
    bot.look()
    monkeypatch.undo()
    bot.store.is_down = False
    bot.restart()
    bot.look()
    champion = registry.champion()
    assert champion is not None
    assert champion.promotion.number == 3
    assert "rolled back" in slack.messages[-1].text
    assert [line["result"] for line in bot.audit() if line["what"] == "roll_back"] == ["done"]


def test_evernear_rollback_asks_and_champion_tells_who_did_it(
    bot: Bot, slack: SlackServer, registry: Registry, ran: Ran
) -> None:
    ran(True)
    ran(True)
    question = bot.answered(ADA, "/evernear rollback")
    assert question.buttons == ["Roll back"]
    bot.clicked(ADA, question, "Roll back")
    bot.look()
    champion = registry.champion()
    assert champion is not None
    assert champion.promotion.how == "rollback"
    assert (slack.messages[-1].channel, slack.messages[-1].thread) == (question.channel, None)


def test_what_is_broken_is_told_and_can_be_tried_again(
    bot: Bot, slack: SlackServer, registry: Registry, ran: Ran
) -> None:
    ran(True)
    held = ran(False)
    archive = registry.get(json.loads(slack.button(held, "Promote anyway").button["value"])["release"]).archive_key
    content = bot.store.get(archive)
    bot.store.delete(archive)
    bot.clicked(ADA, held, "Promote anyway")
    bot.look()
    assert "*Not promoted.*" in slack.messages[-1].text
    bot.store.put(archive, content)
    bot.clicked(ADA, held, "Promote anyway")
    bot.look()
    assert "serves now" in slack.messages[-1].text


def test_nobody_who_may_no_button(bot: Bot, ran: Ran) -> None:
    bot.restart(may_promote=(), may_roll_back=())
    assert ran(True).buttons == ["Open in Kubeflow"]
    assert ran(False).buttons == ["Open in Kubeflow"]
