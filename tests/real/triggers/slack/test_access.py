"""Permissions: refusals are polite and audited."""

from pathlib import Path

import pytest

from tests.loopback.slack import Person, SlackServer
from tests.real.triggers.slack.bot import ADA, BOB, CHANNEL, EVE, Bot, MemoryRuns


def test_nothing_is_permitted_by_default(
    slack: SlackServer, runs: MemoryRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bot = Bot(slack, runs, tmp_path)
    response = bot.command(ADA, "/retrain")
    assert response.status == 200
    assert "no one may start runs, stop runs or pause the watcher from Slack yet" in response.body
    assert "U0ADA" in response.body
    assert "permissions.start" in response.body
    bot.poll()
    assert slack.messages == []
    (line,) = bot.audit()
    assert (line["who"], line["what"], line["result"]) == ("ada (U0ADA in Slack)", "/retrain", "refused")
    assert "refused: ada" in caplog.text


def test_click_without_permission_starts_nothing(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.prompt()
    bot.click(BOB, prompt, "Start training")
    bot.poll()
    assert runs.started == {}
    assert prompt.buttons == ["Start training", "Not now"]
    assert "you may not start runs" in slack.ephemeral[-1].text
    assert bot.audit()[-1]["result"] == "refused"
    bot.click(BOB, prompt, "Not now")
    bot.poll()
    assert prompt.buttons == ["Start training", "Not now"]


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("stop 12345678", ""),
        ("schedule stop", ""),
        ("schedule start", ""),
        ("rollback", "promote a release or roll back"),
    ],
)
def test_commands_that_change_something_need_a_permission(bot: Bot, command: str, right: str) -> None:
    assert f"Sorry, you may not {right}" in bot.command(BOB, f"/evernear {command}").body
    assert [line["result"] for line in bot.audit()] == ["refused"]


def test_channel_grants_its_members_but_no_other_organization(
    slack: SlackServer, runs: MemoryRuns, tmp_path: Path
) -> None:
    bot = Bot(slack, runs, tmp_path, start=(CHANNEL,))
    prompt = bot.prompt(person=BOB)
    assert "only members of this workspace" in bot.command(EVE, "/retrain").body
    assert "you may not start runs" in bot.command(BOB, "/retrain", channel="C0OTHER").body
    bot.click(EVE, prompt, "Start training")
    bot.poll()
    assert runs.started == {}
    bot.click(BOB, prompt, "Start training")
    bot.poll()
    assert len(runs.started) == 1


def test_user_group_grants_its_members(slack: SlackServer, runs: MemoryRuns, tmp_path: Path) -> None:
    bot = Bot(slack, runs, tmp_path, start=("S0TRAINERS",))
    assert "could not look up" in bot.command(BOB, "/retrain").body, "an unknown group grants nothing"
    slack.groups["S0TRAINERS"] = [BOB.id]
    assert bot.command(BOB, "/retrain").body == ""
    assert "you may not" in bot.command(ADA, "/retrain").body
    slack.groups["S0TRAINERS"] = []
    bot.clock.move(61)
    assert "you may not" in bot.command(BOB, "/retrain").body
    assert slack.calls.count("usergroups.users.list") <= 6


def test_display_names_grant_nothing(bot: Bot) -> None:
    impostor = Person("U0MALLORY", "ada (U0ADA in Slack)")
    assert "you may not" in bot.command(impostor, "/retrain").body
    assert bot.audit()[-1]["who"].endswith("(U0MALLORY in Slack)")
