"""The queries of /evernear, whose answers only the caller sees."""

import pytest

from evernear.kubeflow.runs import State
from evernear.triggers.slack import app, commands
from evernear.triggers.slack.prompts import request_run
from evernear.triggers.slack.services import Call
from evernear.triggers.watch.schedule_state import ScheduleStore
from tests.loopback.slack import SlackServer
from tests.real.triggers.slack.bot import ADA, BOB, Bot, MemoryRuns


def _query(bot: Bot, text: str) -> str:
    return bot.query(BOB, text).text


def test_status_shows_release_runs_prompts_and_watcher(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.prompt()
    runs.start("continuous-training", {}, "key")
    bot.clock.move(90)
    text = _query(bot, "/evernear status")
    assert "*Live release* none yet" in text
    assert "|continuous-training 1> for 1 min 30 s" in text
    assert "*Open prompts* 1" in text
    assert "*Watcher* on" in text


def test_phone_may_capitalize_a_command(bot: Bot, slack: SlackServer) -> None:
    assert _query(bot, "/evernear Status") == _query(bot, "/evernear status")
    assert "Which run?" in str(bot.command(ADA, "/evernear Stop ab").body)


def test_runs_lists_the_newest(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    assert "No runs yet." in _query(bot, "/evernear runs")
    runs.start("continuous-training", {}, "1")
    runs.set(State.FAILED, ended=bot.clock())
    runs.start("reindex", {}, "2")
    lines = _query(bot, "/evernear runs").splitlines()
    assert [line.split(" ")[0] for line in lines] == [":white_circle:", ":x:"]
    assert "`00000002`" in lines[0]


def test_champion_before_the_first_promotion(bot: Bot, slack: SlackServer) -> None:
    assert "No release has been promoted yet." in _query(bot, "/evernear champion")


def test_kfp_outage_is_reported(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    runs.is_down = True
    assert "Kubeflow Pipelines at http://kfp.example cannot be reached." in _query(bot, "/evernear status")


def test_internal_error_is_reported(bot: Bot, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "list", lambda **_: 1 / 0)
    assert "An internal error occurred (ZeroDivisionError); the bot's log has the details." in _query(
        bot, "/evernear runs"
    )


@pytest.mark.parametrize(
    "text", ["/evernear", "/evernear help", "/evernear console", "/evernear champion now", "/evernear <!channel>"]
)
def test_unknown_commands_get_help(bot: Bot, text: str) -> None:
    answer = bot.command(BOB, text).body
    assert "/evernear rollback" in answer
    assert "Live queries are labeled on the Review page of the console" in answer


def test_stop_needs_a_run(bot: Bot) -> None:
    assert "Which run?" in bot.command(ADA, "/evernear stop").body
    assert "Which run?" in bot.command(ADA, "/evernear stop 1").body


def test_schedule_is_paused_and_resumed_by_name(bot: Bot, slack: SlackServer) -> None:
    assert "The watcher is off by ada (U0ADA in Slack)" in bot.command(ADA, "/evernear schedule stop").body
    assert ScheduleStore(bot.store).read().on is False
    assert "off by ada" in _query(bot, "/evernear schedule")
    bot.command(ADA, "/evernear schedule start")
    assert ScheduleStore(bot.store).read().on is True
    assert {line["what"] for line in bot.audit()} == {"schedule_stop", "schedule_start"}


def test_new_command_is_one_decorated_function(bot: Bot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMANDS", dict(commands.COMMANDS))
    monkeypatch.setattr(app, "COMMANDS", commands.COMMANDS)

    @commands.command("/evernear reindex", "starts a reindex", usage="[name=value ...]", permission="start")
    def reindex(call: Call) -> None:
        request_run(call, "reindex")

    bot.restart()
    assert "you may not start runs" in bot.command(BOB, "/evernear reindex index.k=9").body
    assert "`/evernear reindex [name=value ...]` starts a reindex" in bot.command(BOB, "/evernear help").body
    prompt = bot.prompt("/evernear reindex index.k=9")
    assert "*Time to index the gallery?* Requested by <@U0ADA>" in prompt.text
    bot.click(ADA, prompt, "Start")
    bot.poll()
    (run,) = bot.runs.started.values()
    assert (run.pipeline, run.parameters["settings"]) == ("reindex", {"index": {"k": 9}})
