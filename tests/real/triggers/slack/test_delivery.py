"""An acknowledged request is carried out once: copies, double clicks, restarts, outages."""

import itertools
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slack_bolt import BoltRequest
from slack_sdk.http_retry import builtin_handlers

from evernear.common.frozen import FORMAT, stamp
from evernear.errors import SlackError
from evernear.kubeflow.runs import Parameter, Run, State
from evernear.triggers.slack import prompts
from evernear.triggers.slack.blocks import Message
from evernear.triggers.slack.client import SlackClient
from tests.loopback.slack import SlackServer, signed
from tests.loopback.slack.server import SIGNING_SECRET, Fault
from tests.real.triggers.slack.bot import ADA, BOB, Bot, MemoryRuns

REQUEST = stamp() | {"id": "1", "kind": "run", "created": "2026-11-22T09:00:00Z", "asked_by": {"id": "U0ADA"}}


def test_acknowledged_request_is_stored(bot: Bot, runs: MemoryRuns) -> None:
    runs.is_down = True  # Slack waits three seconds and no longer, so the acknowledgment does not need KFP
    assert bot.command(ADA, "/retrain").status == 200
    assert len(list(bot.store.list("triggers/requests/"))) == 1


def test_request_that_cannot_be_stored_is_refused(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.prompt()
    bot.store.is_down = True
    response = bot.command(ADA, "/retrain")
    assert "The store cannot be reached. Nothing was done; try again." in response.body
    bot.click(ADA, prompt, "Start training")
    assert "Nothing was done" in slack.ephemeral[-1].text
    mention = slack.mentions(ADA, "<@U0BOT>", "C0TRAINING")
    assert bot.deliver(mention).status == 500, "Slack delivers an event again"
    bot.poll()

    bot.store.is_down = False
    bot.deliver(mention)
    bot.poll(60)
    assert runs.started == {}
    bot.click(ADA, prompt, "Start training")
    bot.poll()
    assert len(runs.started) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/gone", "", "expired"])
def test_refusal_that_cannot_be_told_is_not_acknowledged(
    bot: Bot, slack: SlackServer, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """So that Slack shows the failed click. A response URL expires."""
    click = slack.button(bot.prompt(), "Start training").by(ADA)
    bot.store.is_down = True
    click["response_url"] = f"{slack.url}/expired" if url == "expired" else url
    assert bot.deliver(click).status == 500
    (line,) = [record for record in caplog.records if record.name.startswith("evernear.triggers")][-1:]
    assert "Slack did not accept a response" in line.getMessage()
    assert not any(record.exc_info for record in caplog.records)


def test_copies_of_a_command_prompt_once(bot: Bot, slack: SlackServer) -> None:
    payload = ADA.types("/retrain", "C0TRAINING", slack.response_url("C0TRAINING"))
    for wait_s in (0, 60, 300):
        assert bot.deliver(payload).status == 200
        bot.poll(wait_s)
        bot.restart()
    assert len(slack.messages) == 1


def test_retry_counts_if_the_first_delivery_was_lost(bot: Bot, slack: SlackServer) -> None:
    payload = ADA.mentions("<@U0BOT> hello", "C0TRAINING")
    payload["event"]["thread_ts"] = bot.prompt().ts
    body, headers = signed(payload, SIGNING_SECRET)
    retry = {**{name: [value] for name, value in headers.items()}, "x-slack-retry-num": ["1"]}
    for _ in range(2):
        assert bot.app.dispatch(BoltRequest(body=body, headers=retry)).status == 200
        bot.poll()
    help_messages = [posted for posted in slack.messages if "/retrain [name=value ...]" in posted.text]
    assert [posted.thread for posted in help_messages] == [payload["event"]["thread_ts"]]


@pytest.mark.parametrize("is_response_lost", [False, True], ids=["recorded late", "never recorded"])
@pytest.mark.parametrize(("button", "result"), [("Start training", "*Pending*"), ("Not now", "Declined by <@U0ADA>")])
def test_click_before_the_prompt_is_recorded_counts(
    bot: Bot,
    slack: SlackServer,
    runs: MemoryRuns,
    monkeypatch: pytest.MonkeyPatch,
    button: str,
    result: str,
    is_response_lost: bool,
) -> None:
    post = SlackClient.post

    def post_and_be_clicked(client: SlackClient, channel: str, message: Message, thread: str = "") -> str:
        address = post(client, channel, message, thread)
        monkeypatch.undo()
        bot.click(ADA, slack.messages[-1], button)
        if is_response_lost:
            raise SlackError("The response is lost.", "unavailable")
        return address

    bot.command(ADA, "/retrain train.epochs=3")
    monkeypatch.setattr(SlackClient, "post", post_and_be_clicked)
    bot.poll()
    bot.restart()
    bot.poll()
    (prompt,) = slack.messages
    assert result in prompt.text
    assert "Not now" not in prompt.buttons
    assert slack.ephemeral == []
    assert [run.parameters["settings"] for run in runs.started.values()] == (
        [{"train": {"epochs": 3}}] if button == "Start training" else []
    )


def test_crash_before_the_prompt_is_recorded_leaves_two_prompts_for_one_run(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = SlackClient.post

    def post_and_die(client: SlackClient, channel: str, message: Message, thread: str = "") -> str:
        post(client, channel, message, thread)
        raise SlackError("The process died before the response.", "unavailable")

    bot.command(ADA, "/retrain")
    monkeypatch.setattr(SlackClient, "post", post_and_die)
    bot.poll()
    monkeypatch.undo()
    bot.restart()
    bot.poll()
    first, second = slack.messages
    bot.click(ADA, first, "Start training")
    bot.click(ADA, second, "Start training")
    bot.poll()
    assert "*Pending*" in first.text, "the run is followed where the person clicked"
    assert len(runs.started) == 1


def test_double_click_is_not_reported_as_refused(bot: Bot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two handlers both read the prompt as pending:
    the one whose write loses must not report that nothing happened."""
    prompt = bot.prompt()
    click = bot.slack.button(prompt, "Start training").by(ADA)
    bot.deliver_during(click, click, monkeypatch)
    bot.poll()
    assert bot.slack.ephemeral == []
    assert len(bot.runs.started) == 1


def test_second_person_is_told_who_answered_first(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.restart(start=(ADA.id, BOB.id))
    prompt = bot.prompt()
    click = slack.button(prompt, "Start training")
    bot.deliver(click.by(BOB))
    bot.deliver(click.by(ADA))
    bot.poll()
    assert len(runs.started) == 1
    assert "bob" in slack.ephemeral[-1].text
    assert [line["who"] for line in bot.audit()] == ["bob (U0BOB in Slack)"]


def test_restart_continues_prompt_answer_and_run(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.command(ADA, "/retrain train.epochs=3")
    bot.restart()
    bot.poll()
    (prompt,) = slack.messages
    bot.restart()
    bot.click(ADA, prompt, "Start training")
    bot.restart()
    bot.poll()
    (run,) = runs.started.values()
    assert run.parameters["settings"] == {"train": {"epochs": 3}}
    runs.set(State.RUNNING, ingest=State.RUNNING)
    bot.restart()
    bot.poll()
    runs.set(State.FAILED, ended=bot.clock(), ingest=State.FAILED)
    bot.restart()
    bot.poll()
    bot.restart()
    bot.poll()
    assert "*Failed*" in prompt.text
    assert [posted.thread for posted in slack.messages] == [None, prompt.ts, prompt.ts]


def test_crash_after_the_start_does_not_start_a_second_run(bot: Bot, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = bot.prompt()
    bot.click(ADA, prompt, "Start training")
    start = bot.runs.start

    def start_and_die(*arguments: Any) -> Run:
        start(*arguments)
        bot.store.is_down = True  # as if the process had died right after the start
        return next(iter(bot.runs.started.values()))

    monkeypatch.setattr(bot.runs, "start", start_and_die)
    bot.poll()
    monkeypatch.undo()
    bot.store.is_down = False
    bot.restart()
    bot.poll()
    assert len(bot.runs.started) == 1
    assert "*Pending*" in prompt.text


def test_start_is_retried_until_kfp_is_back(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.prompt()
    runs.is_down = True
    bot.click(ADA, prompt, "Start training")
    bot.poll()
    assert "cannot be reached. The request is stored" in prompt.text
    bot.poll(600)
    bot.restart()
    bot.poll(600)
    assert runs.started == {}
    runs.is_down = False
    bot.poll(600)
    assert len(runs.started) == 1
    assert "*Pending*" in prompt.text


def test_start_is_abandoned_after_the_timeout(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.prompt()
    runs.is_down = True
    bot.click(ADA, prompt, "Start training")
    bot.poll()
    bot.poll(3601)
    assert "Given up after 1 h 0 min; repeat the command." in prompt.text
    runs.is_down = False
    bot.poll(600)
    assert runs.started == {}, "an outdated request starts no run"
    assert bot.audit()[-1]["result"] == "failed"


def test_retries_back_off(bot: Bot, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = bot.prompt()
    runs.is_down = True
    bot.click(ADA, prompt, "Start training")
    tries: list[float] = []
    ask = runs.parameters

    def count(pipeline: str) -> Sequence[Parameter]:
        tries.append(bot.clock().timestamp())
        return ask(pipeline)

    monkeypatch.setattr(runs, "parameters", count)
    for _ in range(360):
        bot.poll(5)
    waits = [round(later - earlier) for earlier, later in itertools.pairwise(tries)]
    assert waits[:6] == [5, 10, 20, 40, 80, 160]
    assert set(waits[6:]) == {300}


def test_kfp_outage_during_a_run_is_reported_once(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = bot.start()
    runs.is_down = True
    for _ in range(5):
        bot.poll(300)
    assert [("status of the run is unknown" in posted.text) for posted in slack.messages] == [False, True]
    runs.is_down = False
    runs.set(State.FAILED, ended=bot.clock(), train=State.FAILED)
    bot.poll(300)
    assert "*Failed*" in prompt.text


@pytest.mark.slow
def test_slack_outage_loses_nothing(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.command(ADA, "/retrain")
    slack.is_down = True
    bot.poll()
    bot.poll(5)
    slack.is_down = False
    bot.poll(600)
    (prompt,) = slack.messages
    click = slack.button(prompt, "Start training").by(ADA)
    slack.is_down = True
    bot.deliver(click)
    bot.poll()
    assert len(runs.started) == 1, "the run does not wait for Slack"
    runs.set(State.FAILED, ended=bot.clock(), train=State.FAILED)
    bot.poll(60)
    slack.is_down = False
    bot.poll(600)
    assert "*Failed*" in prompt.text


def test_rate_limit_is_respected(bot: Bot, slack: SlackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(builtin_handlers, "time", SimpleNamespace(sleep=waits_s.append))
    slack.faults["chat.postMessage"] = Fault("ratelimited", 429, retry_after_s=90)
    bot.command(ADA, "/retrain")
    bot.poll()
    (wait_s,) = waits_s
    assert 90 <= wait_s <= 91
    assert slack.calls.count("chat.postMessage") == 2
    assert len(slack.messages) == 1


def test_only_calls_after_the_acknowledgement_are_retried(slack: SlackServer, runs: MemoryRuns, tmp_path: Path) -> None:
    bot = Bot(slack, runs, tmp_path, start=("S0TRAINERS", ADA.id))
    slack.groups["S0TRAINERS"] = []
    slack.faults["usergroups.users.list"] = Fault("internal_error", 503)
    assert "could not look up the members of S0TRAINERS" in bot.command(BOB, "/retrain").body
    assert slack.calls.count("usergroups.users.list") == 1
    slack.faults["chat.postMessage"] = Fault("internal_error", 503)
    bot.prompt()
    assert slack.calls.count("chat.postMessage") == 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"id": "damaged"', "is not a valid request"),
        (json.dumps(REQUEST | {"kind": "dance"}).encode(), "is not a valid request"),
        (json.dumps(REQUEST | {"new_field": 1}).encode(), "is not a valid request"),
        (json.dumps(REQUEST | {"format": FORMAT + 1}).encode(), "is of another version of evernear"),
    ],
    ids=["damaged", "unknown kind", "unknown field", "another version"],
)
def test_unreadable_request_is_logged_once_and_does_not_affect_others(
    bot: Bot, runs: MemoryRuns, caplog: pytest.LogCaptureFixture, data: bytes, sentence: str
) -> None:
    bot.store.put("triggers/requests/1.json", data)
    bot.click(ADA, bot.prompt(), "Start training")
    bot.poll(5)
    assert len(runs.started) == 1
    assert caplog.text.count(f"triggers/requests/1.json {sentence}") == 1
    assert "Open prompts" in bot.query(ADA, "/evernear status").text


def test_old_requests_are_removed_and_open_ones_stay(bot: Bot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "PROMPT_TIMEOUT", timedelta(days=1000))
    first, second = bot.prompt(), bot.prompt()
    bot.click(ADA, first, "Not now")
    bot.poll()
    bot.poll(8 * 24 * 3600)
    assert len(list(bot.store.list("triggers/requests/"))) == 1
    bot.click(ADA, second, "Start training")
    bot.poll()
    assert len(bot.runs.started) == 1
