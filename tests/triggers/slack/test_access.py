"""Who may do what; refused politely, and kept."""

from pathlib import Path

import pytest
from bot import ADA, BOB, CHANNEL, EVE, Bot, MemoryRuns

from tests.loopback.slack import Person, SlackServer


def test_nobody_may_anything_until_somebody_is_named(
    slack: SlackServer, runs: MemoryRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bot = Bot(slack, runs, tmp_path, {})
    told = bot.told(ADA, "/retrain")
    assert told.status == 200
    assert "nobody may start runs from Slack yet" in told.body
    assert "U0ADA" in told.body
    assert "slack.may_start" in told.body
    bot.look()
    assert slack.messages == []
    (line,) = bot.audit()
    assert (line["who"], line["what"], line["result"]) == ("ada (U0ADA in Slack)", "start", "refused")
    assert "refused: ada" in caplog.text


def test_a_click_by_somebody_not_on_the_list_starts_nothing(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    bot.clicked(BOB, asked, "Start training")
    bot.look()
    assert runs.started == {}
    assert asked.buttons == ["Start training", "Not now"]
    assert "you may not start runs" in slack.whispers[-1].text
    assert bot.audit()[-1]["result"] == "refused"
    bot.clicked(BOB, asked, "Not now")
    bot.look()
    assert asked.buttons == ["Start training", "Not now"]


@pytest.mark.parametrize("command", ["stop 12345678", "schedule stop", "schedule start"])
def test_every_command_that_changes_something_asks_who_it_is(bot: Bot, command: str) -> None:
    assert "Sorry, you may not" in bot.told(BOB, f"/evernear {command}").body
    assert [line["result"] for line in bot.audit()] == ["refused"]


def test_the_question_before_a_rollback_is_not_for_everybody(bot: Bot) -> None:
    assert "Sorry, you may not roll back" in bot.answered(BOB, "/evernear rollback").text
    assert [line["result"] for line in bot.audit()] == ["refused"]


def test_a_channel_lets_its_people_in_but_no_other_organisation(
    slack: SlackServer, runs: MemoryRuns, tmp_path: Path
) -> None:
    bot = Bot(slack, runs, tmp_path, {"may_start": (CHANNEL,)})
    asked = bot.asks(person=BOB)
    assert "only members of this workspace" in bot.told(EVE, "/retrain").body
    assert "you may not start runs" in bot.told(BOB, "/retrain", channel="C0OTHER").body
    bot.clicked(EVE, asked, "Start training")
    bot.look()
    assert runs.started == {}
    bot.clicked(BOB, asked, "Start training")
    bot.look()
    assert len(runs.started) == 1


def test_a_user_group_lets_its_members_in(slack: SlackServer, runs: MemoryRuns, tmp_path: Path) -> None:
    bot = Bot(slack, runs, tmp_path, {"may_start": ("S0TRAINERS",)})
    assert "could not look up" in bot.told(BOB, "/retrain").body, "in doubt the answer is no"
    slack.groups["S0TRAINERS"] = [BOB.id]
    assert bot.told(BOB, "/retrain").body == ""
    assert "you may not" in bot.told(ADA, "/retrain").body
    slack.groups["S0TRAINERS"] = []
    bot.clock.move(61)
    assert "you may not" in bot.told(BOB, "/retrain").body
    assert slack.calls.count("usergroups.users.list") <= 6


def test_names_do_not_speak_for_ids(bot: Bot) -> None:
    impostor = Person("U0MALLORY", "ada (U0ADA in Slack)")
    assert "you may not" in bot.told(impostor, "/retrain").body
    assert bot.audit()[-1]["who"].endswith("(U0MALLORY in Slack)")
