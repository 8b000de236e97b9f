"""What /evernear answers, to who asked alone."""

import pytest
from bot import ADA, BOB, Bot, MemoryRuns

from evernear.kubeflow.runs import State
from evernear.triggers.watch.switch import Switch
from tests.loopback.slack import SlackServer


def _asked(bot: Bot, text: str) -> str:
    return bot.answered(BOB, text).text


def test_status_tells_what_serves_runs_and_waits(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.asks()
    runs.start("continuous-training", {}, "key")
    bot.clock.move(90)
    told = _asked(bot, "/evernear status")
    assert "*Serves* nothing yet" in told
    assert "|continuous-training 1> for 1 min 30 s" in told
    assert "*Waits for an answer* 1" in told
    assert "*Watcher* on" in told


def test_runs_lists_the_newest(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    assert "There are no runs yet." in _asked(bot, "/evernear runs")
    runs.start("continuous-training", {}, "1")
    runs.set(State.FAILED, ended=bot.clock())
    runs.start("reindex", {}, "2")
    told = _asked(bot, "/evernear runs").splitlines()
    assert [line.split(" ")[0] for line in told] == [":white_circle:", ":x:"]
    assert "`00000002`" in told[0]


@pytest.mark.parametrize("state", State)
def test_runs_in_every_state_are_listed(bot: Bot, runs: MemoryRuns, state: State) -> None:
    runs.start("continuous-training", {}, "1")
    runs.set(state)
    assert f": {state}, " in _asked(bot, "/evernear runs")


def test_champion_before_the_first(bot: Bot, slack: SlackServer) -> None:
    assert "No release has been promoted yet." in _asked(bot, "/evernear champion")


def test_kfp_that_is_down_is_said(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    runs.is_down = True
    assert "Kubeflow Pipelines at http://kfp.example cannot be reached." in _asked(bot, "/evernear status")


def test_what_evernear_itself_fails_on_is_said(bot: Bot, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "list", lambda **_: 1 / 0)
    assert "I failed at it myself (ZeroDivisionError); my log tells more." in _asked(bot, "/evernear runs")


@pytest.mark.parametrize("text", ["/evernear", "/evernear help", "/evernear champion now", "/evernear <!channel>"])
def test_anything_else_gets_help(bot: Bot, text: str) -> None:
    assert "/evernear rollback" in bot.told(BOB, text).body


def test_stop_wants_a_run(bot: Bot) -> None:
    assert "Which run?" in bot.told(ADA, "/evernear stop").body
    assert "Which run?" in bot.told(ADA, "/evernear stop 1").body


def test_the_watcher_is_switched_and_remembers_by_whom(bot: Bot, slack: SlackServer) -> None:
    assert "The watcher is off by ada (U0ADA in Slack)" in bot.told(ADA, "/evernear schedule stop").body
    assert Switch(bot.store).read().on is False
    assert "off by ada" in _asked(bot, "/evernear schedule")
    bot.told(ADA, "/evernear schedule start")
    assert Switch(bot.store).read().on is True
    assert {line["what"] for line in bot.audit()} == {"schedule_stop", "schedule_start"}
