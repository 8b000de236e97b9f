"""A run from the question to the verdict, as people in the channel see it."""

from datetime import timedelta
from pathlib import Path

import pytest
from bot import ADA, BOB, CHANNEL, Bot, MemoryRuns

from evernear.errors import StoreError
from evernear.evaluation.verdict import Rule, System, Verdict
from evernear.kubeflow.runs import State
from evernear.reporting.notify import finalize, save_confusion_matrix
from evernear.run_record import RunRecord
from evernear.settings import DataSettings, IndexSettings
from evernear.triggers.slack.inbox import Inbox
from tests.loopback.slack import SlackServer

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 64
HELD = Verdict.of(
    [
        Rule(name="accuracy_floor", passed=True, candidate=0.97, bound=0.95, reason="Accuracy is 97%."),
        Rule(
            name="no_worse",
            passed=False,
            candidate=0.97,
            champion=0.99,
            bound=0.1,
            reason="Accuracy 97.00% against the champion's 99.00% <is worse> & beyond noise.",
        ),
    ],
    candidate=System(name="", network_sha256="0" * 64, index_digest="1"),
    champion=None,
    dataset_digest="2",
)


def test_the_question_says_what_would_run_on_what_and_how_long_the_last_one_took(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    runs.start("continuous-training", {}, "earlier")
    bot.clock.move(3600)
    runs.set(State.SUCCEEDED, ended=bot.clock())
    runs.start("continuous-training", {}, "now")

    asked = bot.asks("/retrain train.epochs=3 preset=best")

    assert asked.channel == CHANNEL
    assert "<@U0ADA>" in asked.text
    assert "`train.epochs = 3`" in asked.text
    assert "`preset = best`" in asked.text
    assert "s3://images/mnist" in asked.text
    assert "took 1 h 0 min" in asked.text
    assert "continuous-training 2> runs already" in asked.text
    assert asked.buttons == ["Start training", "Not now"]
    assert len(runs.started) == 2


def test_a_run_is_followed_in_one_message_and_ends_with_the_verdict(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    asked = bot.asks("/retrain train.epochs=3")
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    (run,) = runs.started.values()
    assert run.parameters == {
        "store": bot.settings.store_uri,
        "settings": {"train": {"epochs": 3}},
        "started_by": "ada (U0ADA in Slack)",
    }
    assert asked.buttons == ["Open in Kubeflow", "Stop"]

    runs.set(State.RUNNING, ingest=State.RUNNING)
    bot.look(5)
    runs.set(State.RUNNING, ingest=State.SUCCEEDED, train=State.RUNNING)
    bot.look(60)
    (progress,) = [shown for shown in slack.messages if shown.thread == asked.ts]
    assert progress.text.splitlines() == [":white_check_mark: ingest", ":hourglass_flowing_sand: train"]
    assert "*Running*: train" in asked.text

    record = RunRecord(bot.store, run.id)
    record.save(verdict=HELD.model_dump(mode="json"), metrics={"accuracy": 0.97})
    save_confusion_matrix(record, PNG)
    finalize(record, "continuous-training", "SUCCEEDED", "")
    runs.set(State.SUCCEEDED, ended=bot.clock(), ingest=State.SUCCEEDED, train=State.SUCCEEDED)
    bot.look(5)

    verdict = slack.messages[-1]
    assert verdict.thread == asked.ts
    assert verdict.text.startswith(":no_entry: Held")
    assert "No release serves yet." in verdict.text
    assert "&lt;is worse&gt; &amp; beyond noise" in verdict.text
    assert "no worse             0.97      0.99    0.1  broken" in verdict.text
    assert "Accuracy 97.00%" in verdict.text
    assert "*Held* after" in asked.text
    assert asked.buttons == ["Open in Kubeflow"]
    (picture,) = slack.uploads
    assert (picture["data"], picture["channel"], picture["thread"]) == (PNG, CHANNEL, asked.ts)
    assert picture["alt_txt"]

    calls = list(slack.calls)
    bot.look(3600)
    assert slack.calls == calls, "nothing is said of a run that is over"


def test_what_the_bot_is_configured_to_stands_for_the_pipelines_defaults(
    slack: SlackServer, runs: MemoryRuns, tmp_path: Path
) -> None:
    bot = Bot(slack, runs, tmp_path, {"may_start": (ADA.id,)})
    ours = {"data": DataSettings(source="s3://images/ours", size_px=32), "index": IndexSettings(k=9)}
    bot.settings = bot.settings.model_copy(update=ours)
    bot.restart()
    asked = bot.asks("/retrain train.epochs=3")
    assert "s3://images/ours" in asked.text
    assert "*Changed settings*\n`train.epochs = 3`" in asked.text
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    (run,) = runs.started.values()
    assert run.parameters["store"] == bot.settings.store_uri
    assert run.parameters["source"] == "s3://images/ours"
    assert run.parameters["settings"] == {"data": {"size_px": 32}, "index": {"k": 9}, "train": {"epochs": 3}}
    assert "target" not in run.parameters, "this pipeline has no such parameter"


def test_a_message_is_edited_when_something_changed_and_not_too_often(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    bot.clicked(ADA, bot.asks(), "Start training")
    runs.set(State.RUNNING, step0=State.RUNNING) if runs.started else bot.look()
    edits = slack.calls.count("chat.update")
    for number in range(60):  # a step every second, a look every second: five minutes of them
        runs.set(State.RUNNING, **{f"step{number}": State.RUNNING})
        bot.look(5)
    every_s = bot.settings.slack.update_interval_s
    assert slack.calls.count("chat.update") - edits <= 2 * (300 / every_s + 1)
    for _ in range(60):
        bot.look(5)
    assert slack.calls.count("chat.update") - edits <= 2 * (300 / every_s + 1) + 2, "nothing changed any more"
    assert slack.calls.count("chat.postMessage") == 2


@pytest.mark.parametrize(
    ("state", "word"), [(State.FAILED, ":x: *Failed*"), (State.CANCELED, ":octagonal_sign: *Stopped*")]
)
def test_failed_and_canceled_runs_say_so(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, state: State, word: str
) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    run = runs.set(state, ended=bot.clock(), ingest=State.SUCCEEDED, train=state)
    bot.look(30)
    assert word in asked.text
    assert slack.messages[-1].thread == asked.ts
    assert ("train: failed" in slack.messages[-1].text) is (state is State.FAILED)
    assert run.id in slack.messages[-1].text


def test_a_run_that_somebody_paused_is_followed_on(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    runs.set(State.PAUSED, ingest=State.SUCCEEDED, train=State.PAUSED)
    bot.look(30)
    assert "*Paused*" in asked.text
    assert slack.messages[-1].text.endswith(" train")


def test_a_run_that_ends_without_an_outcome_is_not_called_promoted(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    runs.set(State.SUCCEEDED, ended=bot.clock(), ingest=State.SUCCEEDED)
    bot.look(5)
    assert slack.messages == [asked], "the outcome may be a moment late"
    bot.look(120)
    assert "Ended without a verdict" in slack.messages[-1].text


def test_a_run_whose_end_nobody_dates_is_told_nevertheless(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    runs.set(State.SUCCEEDED, ended=None, ingest=State.SUCCEEDED)
    bot.look(5)
    assert "Ended without a verdict" in slack.messages[-1].text


def test_not_now_starts_nothing(bot: Bot, runs: MemoryRuns) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Not now")
    bot.look()
    assert asked.text == "*Not started.* <@U0ADA> said no."
    assert asked.buttons == []
    assert runs.started == {}
    assert [(line["who"], line["what"]) for line in bot.audit()] == [("ada (U0ADA in Slack)", "decline")]


def test_a_question_expires_and_says_so(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    click = slack.button(asked, "Start training")
    bot.clock.move(4 * 3600 + 1)
    bot.receives(click.by(ADA))
    assert "expired" in slack.whispers[-1].text
    bot.look()
    bot.look()
    assert "Nobody answered" in asked.text
    bot.receives(click.by(ADA))
    assert ["expired" in whisper.text for whisper in slack.whispers] == [True, True]
    bot.look()
    assert runs.started == {}


def test_a_question_whose_end_cannot_be_written_down_does_not_pass_for_a_start(
    bot: Bot, slack: SlackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bot.asks()

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("The store takes nothing at present.")

    monkeypatch.setattr(Inbox, "change", refuse)
    bot.look(4 * 3600 + 1)
    assert asked.text.startswith("*Train again?*")
    monkeypatch.undo()
    bot.look(600)
    bot.look()
    assert "Nobody answered" in asked.text
    assert slack.whispers == []


def test_a_question_that_came_late_tells_when_it_expires(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    until = bot.clock() + timedelta(seconds=bot.settings.slack.prompt_timeout_s)
    runs.is_down = True
    bot.told(ADA, "/retrain")
    bot.look()
    runs.is_down = False
    bot.look(1800)
    assert f"{until:%Y-%m-%d %H:%M} UTC" in slack.messages[-1].text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch=3", "There is no parameter or setting 'epoch'; did you mean 'train.epochs'?"),
        ("train.epoch=3", "did you mean 'train.epochs'?"),
        ("train.epochs=many", "Invalid setting train.epochs = many: "),
        ("train.epochs=1.5", "Invalid setting train.epochs = 1.5: "),
        ("train.learning_rate=NaN", "Invalid setting train.learning_rate = NaN: "),
        ("train.learning_rate=1e999", "Invalid setting train.learning_rate = 1e999: "),
        ("train.epochs=" + "[" * 1900, "Invalid setting train.epochs = "),
        ("preset=bset", "No preset 'bset'; known: best"),
        ("settings={}", "'settings' cannot be set from here"),
        ("gate.accuracy_floor=0", "'gate.accuracy_floor' cannot be set from here; slack.parameters allows: preset"),
        ("data.size_px=28", "'data.size_px' cannot be set from here"),
        ("data.source=digits", "'data.source' cannot be set from here"),
        ("source=digits", "'source' cannot be set from here"),
        ("started_by=eve", "'started_by' cannot be set from here"),
        ("store=s3://mine", "'store' cannot be set from here"),
        ("quickly", "'quickly' has no '='"),
        ("preset='x", "a quote"),
        ("preset=x\\", "ends in a backslash"),
        ("x" * 3000, "more than 2000 characters"),
    ],
)
def test_parameters_are_checked_against_the_pipeline(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, text: str, sentence: str
) -> None:
    bot.told(ADA, f"/retrain {text}")
    bot.look()
    assert slack.messages == []
    (whisper,) = slack.whispers
    assert whisper.only_for == ADA.id
    assert sentence in whisper.text
    bot.look(600)
    assert len(slack.whispers) == 1


def test_curly_quotes_of_slack_are_quotes(bot: Bot) -> None:
    asked = bot.asks("/retrain index.search=\u201cnprobe=16, efSearch=64\u201d")
    assert "`index.search = nprobe=16, efSearch=64`" in asked.text


def test_a_channel_that_is_closed_to_the_bot_is_answered_directly(bot: Bot, slack: SlackServer) -> None:
    slack.closed_channels.add(CHANNEL)
    bot.told(ADA, "/retrain")
    bot.look()
    (direct,) = slack.messages
    assert direct.channel == "D0ADA"
    assert "/invite" in direct.text


def test_a_run_is_stopped_by_button_and_by_the_beginning_of_its_id(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    (run,) = runs.started.values()
    click = slack.button(asked, "Stop")
    assert click.button["confirm"]["title"]["text"] == "Stop this run?"
    bot.receives(click.by(BOB))
    bot.look()
    assert runs.stopped == []
    bot.receives(click.by(ADA))
    bot.receives(click.by(ADA))
    bot.look()
    assert runs.stopped == [run.id]
    assert slack.messages[-1].thread == asked.ts

    bot.told(ADA, f"/evernear stop {run.id[:8]}")
    bot.look()
    assert runs.stopped == [run.id, run.id]
    bot.told(ADA, "/evernear stop ffffffff")
    bot.look()
    assert "No run's id begins with" in slack.whispers[-1].text
    assert [line["what"] for line in bot.audit()].count("stop") == 3


def test_a_run_is_stopped_by_its_button_however_many_others_came_after_it(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    (run,) = runs.started.values()
    for number in range(60):
        runs.start("translation", {}, f"theirs {number}")
    bot.clicked(ADA, asked, "Stop")
    bot.look()
    assert runs.stopped == [run.id]
