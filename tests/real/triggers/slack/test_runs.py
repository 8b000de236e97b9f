"""A run from the prompt to the verdict, as seen in the channel."""

from pathlib import Path

import pytest

from evernear.common.run_record import RunRecord
from evernear.errors import StoreError
from evernear.evaluation.verdict import Rule, System, Verdict
from evernear.kubeflow.runs import State
from evernear.reporting.notify import CONFUSION_MATRIX, finalize
from evernear.settings import DataSettings, IndexSettings
from evernear.triggers.requests import RequestStore
from evernear.triggers.slack.prompts import PROMPT_TIMEOUT
from evernear.triggers.slack.runs import UPDATE_INTERVAL
from tests.loopback.slack import SlackServer
from tests.real.triggers.slack.bot import ADA, BOB, CHANNEL, Bot, MemoryRuns

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 64
HELD = Verdict.of(
    [
        Rule(name="accuracy_floor", passed=True, candidate=0.97, bound=0.95, reason="Label right: 97%."),
        Rule(
            name="no_worse",
            passed=False,
            candidate=0.97,
            champion=0.99,
            bound=0.1,
            reason="Label right 97.00% against the champion's 99.00% <is worse> & beyond noise.",
        ),
    ],
    candidate=System(name="", network_sha256="0" * 64, index_digest="1"),
    champion=None,
    dataset_digest="2",
)


def test_prompt_shows_settings_data_last_duration_and_active_runs(bot: Bot) -> None:
    bot.runs.start("continuous-training", {}, "earlier")
    bot.clock.move(3600)
    bot.runs.set(State.SUCCEEDED, ended=bot.clock())
    bot.runs.start("continuous-training", {}, "now")

    prompt = bot.prompt("/retrain train.epochs=3 preset=best")

    assert prompt.channel == CHANNEL
    assert "<@U0ADA>" in prompt.text
    assert "`train.epochs = 3`" in prompt.text
    assert "`preset = best`" in prompt.text
    assert "s3://images/mnist" in prompt.text
    assert "took 1 h 0 min" in prompt.text
    assert "Already active: <https://kubeflow.example/#/runs/details/2|continuous-training 2>" in prompt.text
    assert prompt.buttons == ["Start training", "Not now"]
    assert len(bot.runs.started) == 2


def test_run_is_followed_in_one_message_and_ends_with_the_verdict(bot: Bot) -> None:
    prompt = bot.start("/retrain train.epochs=3")
    (run,) = bot.runs.started.values()
    assert run.parameters == {
        "store": bot.settings.store_uri,
        "settings": {"train": {"epochs": 3}},
        "started_by": "ada (U0ADA in Slack)",
    }
    assert prompt.buttons == ["Open in Kubeflow", "Stop"]

    bot.runs.set(State.RUNNING, ingest=State.RUNNING)
    bot.poll(5)
    bot.runs.set(State.RUNNING, ingest=State.SUCCEEDED, train=State.RUNNING)
    bot.poll(60)
    (progress,) = [posted for posted in bot.slack.messages if posted.thread == prompt.ts]
    assert progress.text.splitlines() == [":white_check_mark: ingest", ":hourglass_flowing_sand: train"]
    assert "*Running*: train" in prompt.text

    record = RunRecord(bot.store, run.id)
    record.save(
        verdict=HELD.model_dump(mode="json"), metrics={"named_right": 14, "named_wrong": 2, "called_unknown": 4}
    )
    record.put(CONFUSION_MATRIX, PNG)
    finalize(record, "continuous-training", "SUCCEEDED", "")
    bot.runs.set(State.SUCCEEDED, ended=bot.clock(), ingest=State.SUCCEEDED, train=State.SUCCEEDED)
    bot.poll(5)

    verdict = bot.slack.messages[-1]
    assert verdict.thread == prompt.ts
    assert verdict.text.startswith(":no_entry: Held")
    assert "No release is live yet." in verdict.text
    assert "&lt;is worse&gt; &amp; beyond noise" in verdict.text
    assert "no worse             0.97      0.99    0.1  broken" in verdict.text
    assert "of 20 test images: 14 named right, 2 named wrong, 4 called unknown" in verdict.text
    assert f"evernear report {run.id}" in verdict.text
    assert "*Held* after" in prompt.text
    assert prompt.buttons == ["Open in Kubeflow"]
    (picture,) = bot.slack.uploads
    assert (picture["data"], picture["channel"], picture["thread"]) == (PNG, CHANNEL, prompt.ts)
    assert picture["alt_txt"]

    calls = list(bot.slack.calls)
    bot.poll(3600)
    assert bot.slack.calls == calls, "a run that has ended is not updated again"


def test_settings_of_the_bot_replace_the_defaults_of_the_pipeline(
    slack: SlackServer, runs: MemoryRuns, tmp_path: Path
) -> None:
    bot = Bot(slack, runs, tmp_path, start=(ADA.id,))
    overrides = {"data": DataSettings(source="s3://images/ours", size_px=32), "index": IndexSettings(k=9)}
    bot.settings = bot.settings.model_copy(update=overrides)
    bot.restart()
    prompt = bot.prompt("/retrain train.epochs=3")
    assert "s3://images/ours" in prompt.text
    assert "*Changed settings*\n`train.epochs = 3`" in prompt.text
    bot.click(ADA, prompt, "Start training")
    bot.poll()
    (run,) = runs.started.values()
    assert run.parameters["store"] == bot.settings.store_uri
    assert run.parameters["source"] == "s3://images/ours"
    assert run.parameters["settings"] == {"data": {"size_px": 32}, "index": {"k": 9}, "train": {"epochs": 3}}
    assert "target" not in run.parameters, "this pipeline has no such parameter"


def test_message_is_edited_only_after_changes_and_within_the_rate_limit(bot: Bot) -> None:
    bot.click(ADA, bot.prompt(), "Start training")
    bot.runs.set(State.RUNNING, step0=State.RUNNING) if bot.runs.started else bot.poll()
    edits = bot.slack.calls.count("chat.update")
    for number in range(60):  # five minutes with a new step at every poll
        bot.runs.set(State.RUNNING, **{f"step{number}": State.RUNNING})
        bot.poll(5)
    every_s = UPDATE_INTERVAL.total_seconds()
    assert bot.slack.calls.count("chat.update") - edits <= 2 * (300 / every_s + 1)
    for _ in range(60):
        bot.poll(5)
    assert bot.slack.calls.count("chat.update") - edits <= 2 * (300 / every_s + 1) + 2, "nothing changed since"
    assert bot.slack.calls.count("chat.postMessage") == 2


@pytest.mark.parametrize(
    ("state", "word"), [(State.FAILED, ":x: *Failed*"), (State.CANCELED, ":octagonal_sign: *Stopped*")]
)
def test_failed_and_canceled_runs_are_reported(bot: Bot, state: State, word: str) -> None:
    prompt = bot.start()
    run = bot.runs.set(state, ended=bot.clock(), ingest=State.SUCCEEDED, train=state)
    bot.poll(30)
    assert word in prompt.text
    assert bot.slack.messages[-1].thread == prompt.ts
    assert ("train: failed" in bot.slack.messages[-1].text) is (state is State.FAILED)
    assert run.id in bot.slack.messages[-1].text


def test_run_without_an_outcome_is_not_called_promoted(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.start()
    runs.set(State.SUCCEEDED, ended=bot.clock(), ingest=State.SUCCEEDED)
    bot.poll(5)
    assert slack.messages == [prompt], "the outcome may appear a moment later"
    bot.poll(120)
    assert "Ended without a verdict" in slack.messages[-1].text


def test_run_without_an_end_time_is_reported(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.start()
    runs.set(State.SUCCEEDED, ended=None, ingest=State.SUCCEEDED)
    bot.poll(5)
    assert "Ended without a verdict" in slack.messages[-1].text


def test_prompt_expires(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.prompt()
    click = slack.button(prompt, "Start training")
    bot.clock.move(4 * 3600 + 1)
    bot.deliver(click.by(ADA))
    assert "expired" in slack.ephemeral[-1].text
    bot.poll()
    bot.poll()
    assert "Nobody answered" in prompt.text
    bot.deliver(click.by(ADA))
    assert ["expired" in posted.text for posted in slack.ephemeral] == [True, True]
    bot.poll()
    assert runs.started == {}


def test_prompt_whose_expiry_cannot_be_stored_stays_unchanged(bot: Bot, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = bot.prompt()

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("The store accepts no writes at the moment.")

    monkeypatch.setattr(RequestStore, "change", refuse)
    bot.poll(4 * 3600 + 1)
    assert prompt.text.startswith("*Train again?*")
    monkeypatch.undo()
    bot.poll(600)
    bot.poll()
    assert "Nobody answered" in prompt.text
    assert bot.slack.ephemeral == []


def test_delayed_prompt_shows_its_expiry(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    until = bot.clock() + PROMPT_TIMEOUT
    runs.is_down = True
    bot.command(ADA, "/retrain")
    bot.poll()
    runs.is_down = False
    bot.poll(1800)
    assert f"{until:%Y-%m-%d %H:%M} UTC" in slack.messages[-1].text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch=3", "No parameter or setting 'epoch'; did you mean 'train.epochs'?"),
        ("train.epochs=many", "Invalid setting train.epochs = many: "),
        ("train.learning_rate=NaN", "Invalid setting train.learning_rate = NaN: "),
        ("train.epochs=" + "[" * 1900, "Invalid setting train.epochs = "),
        ("preset=bset", "No preset 'bset'; known: best"),
        ("settings={}", "'settings' cannot be set from here"),
        ("gate.accuracy_floor=0", "'gate.accuracy_floor' cannot be set from here; these can: preset"),
        ("source=digits", "'source' cannot be set from here"),
        ("started_by=eve", "'started_by' cannot be set from here"),
        ("quickly", "'quickly' has no '='"),
        ("preset='x", "a quote"),
        ("x" * 3000, "more than 2000 characters"),
    ],
)
def test_invalid_parameters_are_refused(bot: Bot, text: str, sentence: str) -> None:
    bot.command(ADA, f"/retrain {text}")
    bot.poll()
    assert bot.slack.messages == []
    (posted,) = bot.slack.ephemeral
    assert posted.visible_to == ADA.id
    assert sentence in posted.text
    bot.poll(600)
    assert len(bot.slack.ephemeral) == 1


def test_curly_quotes_are_quotes(bot: Bot) -> None:
    prompt = bot.prompt("/retrain index.search=\u201cnprobe=16, efSearch=64\u201d")
    assert "`index.search = nprobe=16, efSearch=64`" in prompt.text


def test_prompt_in_a_closed_channel_is_answered_by_direct_message(bot: Bot, slack: SlackServer) -> None:
    slack.closed_channels.add(CHANNEL)
    bot.command(ADA, "/retrain")
    bot.poll()
    (direct,) = slack.messages
    assert direct.channel == "D0ADA"
    assert "/invite" in direct.text


def test_run_is_stopped_by_button_and_by_id_prefix(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.start()
    (run,) = runs.started.values()
    click = slack.button(prompt, "Stop")
    assert click.button["confirm"]["title"]["text"] == "Stop this run?"
    bot.deliver(click.by(BOB))
    bot.poll()
    assert runs.stopped == []
    bot.deliver(click.by(ADA))
    bot.deliver(click.by(ADA))
    bot.poll()
    assert runs.stopped == [run.id]
    assert slack.messages[-1].thread == prompt.ts

    bot.command(ADA, f"/evernear stop {run.id[:8]}")
    bot.poll()
    assert runs.stopped == [run.id, run.id]
    bot.command(ADA, "/evernear stop ffffffff")
    bot.poll()
    assert "No run's id begins with" in slack.ephemeral[-1].text
    audited = [(line["what"], line["result"]) for line in bot.audit()]
    assert audited.count(("stop", "done")) == 2
    assert audited.count(("run.stop", "refused")) == 1


def test_button_stops_a_run_older_than_the_newest_fifty(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.start()
    (run,) = runs.started.values()
    for number in range(60):
        runs.start("translation", {}, f"theirs {number}")
    bot.click(ADA, prompt, "Stop")
    bot.poll()
    assert runs.stopped == [run.id]
