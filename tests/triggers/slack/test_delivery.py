"""What was acknowledged happens, and happens once: copies, double clicks, restarts, outages."""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from bot import ADA, BOB, Bot, MemoryRuns
from slack_bolt import BoltRequest

from evernear.kubeflow.runs import Parameter, Run, State
from evernear.triggers.slack.inbox import Inbox, Request
from tests.loopback.slack import SlackServer, signed
from tests.loopback.slack.server import SIGNING_SECRET, Fault


def test_a_wrong_signature_and_an_old_one_are_refused(bot: Bot, slack: SlackServer) -> None:
    payload = ADA.types("/retrain", "C0TRAINING", slack.response_url("C0TRAINING"))
    assert bot.receives(payload, secret="another secret").status == 401
    assert bot.receives(payload, at_s=time.time() - 301).status == 401
    assert bot.receives(payload, at_s=time.time() + 301).status == 401
    body, headers = signed(payload, SIGNING_SECRET)
    changed = BoltRequest(body=body.replace("U0ADA", "U0BOB"), headers={name: [each] for name, each in headers.items()})
    assert bot.app.dispatch(changed).status == 401
    bot.look()
    assert slack.messages == []
    assert bot.receives(payload).status == 200


def test_an_acknowledged_request_is_in_the_store_already(bot: Bot, runs: MemoryRuns) -> None:
    runs.is_down = True  # whatever KFP does, Slack waits three seconds and no longer
    started_s = time.monotonic()
    assert bot.told(ADA, "/retrain").status == 200
    assert time.monotonic() - started_s < 3
    assert len(list(bot.store.list("triggers/slack/requests/"))) == 1


def test_what_the_store_did_not_take_is_not_acknowledged_as_taken(
    bot: Bot, slack: SlackServer, runs: MemoryRuns
) -> None:
    asked = bot.asks()
    bot.store.is_down = True
    told = bot.told(ADA, "/retrain")
    assert "The store cannot be reached. Nothing was done; try again." in told.body
    bot.clicked(ADA, asked, "Start training")
    assert "Nothing was done" in slack.whispers[-1].text
    mention = slack.mentions(ADA, "<@U0BOT>", "C0TRAINING")
    assert bot.receives(mention).status == 500, "Slack delivers an event again"
    bot.look()

    bot.store.is_down = False
    bot.receives(mention)
    bot.look(60)
    assert runs.started == {}
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    assert len(runs.started) == 1


def test_copies_of_a_command_ask_once(bot: Bot, slack: SlackServer) -> None:
    payload = ADA.types("/retrain", "C0TRAINING", slack.response_url("C0TRAINING"))
    for wait_s in (0, 60, 300):
        assert bot.receives(payload).status == 200
        bot.look(wait_s)
        bot.restart()
    assert len(slack.messages) == 1


def test_a_retry_is_not_dropped_where_the_first_was_lost(bot: Bot, slack: SlackServer) -> None:
    payload = ADA.mentions("<@U0BOT> hello", "C0TRAINING")
    payload["event"]["thread_ts"] = bot.asks().ts
    body, headers = signed(payload, SIGNING_SECRET)
    retry = {**{name: [each] for name, each in headers.items()}, "x-slack-retry-num": ["1"]}
    for _ in range(2):
        assert bot.app.dispatch(BoltRequest(body=body, headers=retry)).status == 200
        bot.look()
    helped = [shown for shown in slack.messages if "/retrain [name=value ...]" in shown.text]
    assert [shown.thread for shown in helped] == [payload["event"]["thread_ts"]]


def test_the_same_click_twice_starts_one_run(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    click = slack.button(asked, "Start training").by(ADA)
    assert bot.receives(click).status == 200
    assert bot.receives(click).status == 200
    bot.look()
    assert bot.receives(click).status == 200
    bot.look(300)
    assert len(runs.started) == 1
    assert slack.whispers == []


def test_clicks_at_once_start_one_run(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    clicks = [slack.button(asked, "Start training").by(ADA) for _ in range(8)]
    together = threading.Barrier(len(clicks))

    def deliver(click: dict[str, Any]) -> None:
        together.wait()
        bot.receives(click)

    threads = [threading.Thread(target=deliver, args=(click,)) for click in clicks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bot.look()
    assert len(runs.started) == 1


def test_who_clicks_twice_is_not_told_that_nothing_was_done(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two handlers that both found the question open: the one whose write loses must not say that nothing happens."""
    asked = bot.asks()
    click = slack.button(asked, "Start training").by(ADA)
    find, overtaken = Inbox.find, threading.Event()

    def find_and_be_overtaken(inbox: Inbox, request_id: str) -> Request | None:
        found = find(inbox, request_id)
        if not overtaken.is_set():
            overtaken.set()
            bot.receives(click)
        return found

    monkeypatch.setattr(Inbox, "find", find_and_be_overtaken)
    bot.receives(click)
    monkeypatch.undo()
    bot.look()
    assert slack.whispers == []
    assert len(runs.started) == 1


def test_what_evernear_itself_fails_on_is_told_and_given_up(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    monkeypatch.setattr(runs, "start", lambda *_: 1 / 0)
    bot.look()
    assert "I failed at it myself (ZeroDivisionError); my log tells more. Your request is kept" in asked.text
    bot.look(3601)
    assert "*Not started.* I failed at it myself" in asked.text
    monkeypatch.undo()
    bot.look(600)
    assert runs.started == {}


def test_the_second_of_two_people_is_told_who_was_quicker(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.restart(may_start=(ADA.id, BOB.id))
    asked = bot.asks()
    click = slack.button(asked, "Start training")
    bot.receives(click.by(BOB))
    bot.receives(click.by(ADA))
    bot.look()
    assert len(runs.started) == 1
    assert "bob" in slack.whispers[-1].text
    assert [line["who"] for line in bot.audit()] == ["bob (U0BOB in Slack)"]


def test_a_restart_forgets_neither_question_nor_answer_nor_run(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.told(ADA, "/retrain train.epochs=3")
    bot.restart()
    bot.look()
    (asked,) = slack.messages
    bot.restart()
    bot.clicked(ADA, asked, "Start training")
    bot.restart()
    bot.look()
    (run,) = runs.started.values()
    assert run.parameters["settings"] == {"train": {"epochs": 3}}
    runs.set(State.RUNNING, ingest=State.RUNNING)
    bot.restart()
    bot.look()
    runs.set(State.FAILED, ended=bot.clock(), ingest=State.FAILED)
    bot.restart()
    bot.look()
    bot.restart()
    bot.look()
    assert "*Failed*" in asked.text
    assert [shown.thread for shown in slack.messages] == [None, asked.ts, asked.ts]


def test_a_process_that_dies_between_start_and_note_starts_no_second_run(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    start = runs.start

    def start_and_die(*arguments: Any) -> Run:
        start(*arguments)
        bot.store.is_down = True  # the last thing that this process could do
        return next(iter(runs.started.values()))

    monkeypatch.setattr(runs, "start", start_and_die)
    bot.look()
    monkeypatch.undo()
    bot.store.is_down = False
    bot.restart()
    bot.look()
    assert len(runs.started) == 1
    assert "*Pending*" in asked.text


def test_kfp_down_at_the_click_and_back_later(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    runs.is_down = True
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    assert "cannot be reached. Your request is kept" in asked.text
    bot.look(600)
    bot.restart()
    bot.look(600)
    assert runs.started == {}
    runs.is_down = False
    bot.look(600)
    assert len(runs.started) == 1
    assert "*Pending*" in asked.text


def test_kfp_down_for_too_long_is_given_up_and_told(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    runs.is_down = True
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    bot.look(3601)
    assert "Given up after 1 h 0 min; ask again." in asked.text
    runs.is_down = False
    bot.look(600)
    assert runs.started == {}, "a run that nobody expects any longer is not started"
    assert bot.audit()[-1]["result"] == "failed"


def test_kfp_is_asked_less_and_less_often(bot: Bot, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = bot.asks()
    runs.is_down = True
    bot.clicked(ADA, asked, "Start training")
    tries: list[float] = []
    ask = runs.parameters

    def count(pipeline: str) -> Sequence[Parameter]:
        tries.append(bot.clock().timestamp())
        return ask(pipeline)

    monkeypatch.setattr(runs, "parameters", count)
    for _ in range(360):
        bot.look(5)
    waits = [round(later - earlier) for earlier, later in itertools.pairwise(tries)]
    assert waits[:6] == [5, 10, 20, 40, 80, 160]
    assert set(waits[6:]) == {300}


def test_kfp_down_while_a_run_is_followed_is_told_once(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look()
    runs.is_down = True
    for _ in range(5):
        bot.look(300)
    assert [("lost sight" in shown.text) for shown in slack.messages] == [False, True]
    runs.is_down = False
    runs.set(State.FAILED, ended=bot.clock(), train=State.FAILED)
    bot.look(300)
    assert "*Failed*" in asked.text


def test_slack_down_loses_nothing(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.told(ADA, "/retrain")
    slack.is_down = True
    bot.look()
    bot.look(5)
    slack.is_down = False
    bot.look(600)
    (asked,) = slack.messages
    click = slack.button(asked, "Start training").by(ADA)
    slack.is_down = True
    bot.receives(click)
    bot.look()
    assert len(runs.started) == 1, "the run does not wait for Slack"
    runs.set(State.FAILED, ended=bot.clock(), train=State.FAILED)
    bot.look(60)
    slack.is_down = False
    bot.look(600)
    assert "*Failed*" in asked.text


def test_slack_that_limits_is_left_alone_for_as_long_as_it_says(bot: Bot, slack: SlackServer) -> None:
    slack.faults["chat.postMessage"] = Fault("ratelimited", 429, retry_after_s=90)
    bot.told(ADA, "/retrain")
    bot.look()
    for _ in range(8):
        bot.look(10)
    assert slack.calls.count("chat.postMessage") == 1
    bot.look(10)
    assert slack.calls.count("chat.postMessage") == 2
    assert len(slack.messages) == 1


def test_one_damaged_request_does_not_hold_up_the_others(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, caplog: pytest.LogCaptureFixture
) -> None:
    bot.store.put("triggers/slack/requests/damaged.json", b'{"id": "damaged"')
    asked = bot.asks()
    bot.clicked(ADA, asked, "Start training")
    bot.look(5)
    assert len(runs.started) == 1
    assert "triggers/slack/requests/damaged.json in" in caplog.text


def test_old_requests_are_forgotten_and_open_ones_kept(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.restart(prompt_timeout_s=10**8)
    first, second = bot.asks(), bot.asks()
    bot.clicked(ADA, first, "Not now")
    bot.look()
    bot.look(8 * 24 * 3600)
    assert len(list(bot.store.list("triggers/slack/requests/"))) == 1
    bot.clicked(ADA, second, "Start training")
    bot.look()
    assert len(runs.started) == 1
