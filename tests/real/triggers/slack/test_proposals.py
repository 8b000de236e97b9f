"""Proposals of the watcher: prompts in the channel, answered by a click."""

from datetime import timedelta

import pytest

from evernear.kubeflow.runs import State
from evernear.triggers.requests import POLICY, WATCHER, Person, Request
from tests.loopback.slack import SlackServer
from tests.loopback.slack.server import PostedMessage
from tests.real.triggers.slack.bot import ADA, BOB, CHANNEL, Bot, MemoryRuns

REASONS = ("1,200 new training images, 8.1% of those trained on.", "Unknown answers rose from 2.0% to 6.5% <today>.")
ID = "000001-1a2b3c4d"


def make_request(bot: Bot, **fields: object) -> Request:
    """A request of the watcher, stored."""
    values = {
        "id": ID,
        "state": "pending",
        "created": bot.clock(),
        "expires": bot.clock() + timedelta(hours=6),
        "asked_by": WATCHER,
        "reasons": REASONS,
        **fields,
    }
    request = Request.model_validate(values)
    bot.requests.add(request)
    return request


def stored(bot: Bot) -> Request:
    request = bot.requests.find(ID)
    assert request is not None
    return request


def prompted(bot: Bot, slack: SlackServer) -> PostedMessage:
    """The prompt of a new proposal."""
    make_request(bot)
    bot.poll()
    return slack.messages[-1]


def test_proposal_is_prompted_once_with_its_reasons(bot: Bot, slack: SlackServer) -> None:
    prompt = prompted(bot, slack)
    bot.restart()
    bot.poll(60)
    assert slack.messages == [prompt]
    assert prompt.channel == CHANNEL
    assert "8.1% of those trained on" in prompt.text
    assert "&lt;today&gt;" in prompt.text
    assert prompt.buttons == ["Train", "Not now"]
    assert stored(bot).message == f"{CHANNEL}/{prompt.ts}"


def test_prompt_of_a_proposal_that_has_grown_shows_its_new_reasons_once(bot: Bot, slack: SlackServer) -> None:
    prompt = prompted(bot, slack)
    versions = len(prompt.versions)
    bot.requests.change(stored(bot), grown=1, reasons=("2,400 new training images.",))
    bot.poll()
    bot.restart()
    bot.poll()
    assert slack.messages == [prompt], "no second prompt"
    assert len(prompt.versions) == versions + 1
    assert "2,400 new training images." in prompt.text
    assert prompt.buttons == ["Train", "Not now"]


def test_accepted_proposal_trains_on_the_source_that_the_watcher_saw(bot: Bot) -> None:
    make_request(bot, parameters={"source": "s3://champion/images"})
    bot.poll()
    bot.click(ADA, bot.slack.messages[-1], "Train")
    bot.poll()
    (run,) = bot.runs.started.values()
    assert run.parameters["source"] == "s3://champion/images"


def test_accepted_proposal_starts_one_run_with_its_id_as_key(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = prompted(bot, slack)
    bot.click(BOB, prompt, "Train")
    bot.poll()
    assert runs.started == {}
    click = slack.button(prompt, "Train").by(ADA)
    bot.deliver(click)
    bot.deliver(click)
    bot.restart()
    bot.poll()
    assert list(runs.started) == [ID]
    (run,) = runs.started.values()
    assert run.parameters["started_by"] == "the watcher, accepted by ada (U0ADA in Slack)"
    assert (stored(bot).state, stored(bot).run, str(stored(bot).answered_by)) == (
        "started",
        run.id,
        "ada (U0ADA in Slack)",
    )
    assert "the watcher" in prompt.text
    runs.set(State.FAILED, ended=bot.clock(), train=State.FAILED)
    bot.poll(60)
    assert "*Failed*" in prompt.text
    assert slack.messages[-1].thread == prompt.ts
    for _ in range(2):
        bot.poll(8 * 24 * 3600)
    assert len(runs.started) == 1
    assert stored(bot).state == "failed", "requests of the watcher are its memory and stay"


def test_slack_outage_does_not_give_up_a_pending_proposal(bot: Bot, slack: SlackServer) -> None:
    slack.closed_channels.add(CHANNEL)
    make_request(bot)
    for _ in range(5):
        bot.poll(3600)
    slack.closed_channels.clear()
    bot.poll(600)
    assert slack.messages[-1].buttons == ["Train", "Not now"]


def test_declined_proposal_closes_its_prompt(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    prompt = prompted(bot, slack)
    bot.click(ADA, prompt, "Not now")
    bot.poll()
    assert stored(bot).state == "declined"
    assert "*Declined* by <@U0ADA>" in prompt.text
    assert prompt.buttons == []
    assert runs.started == {}
    assert [(line["what"], line["request"]) for line in bot.audit()] == [("decline", ID)]


def test_person_who_declines_during_anothers_acceptance_is_told(bot: Bot, monkeypatch: pytest.MonkeyPatch) -> None:
    bot.restart(start=(ADA.id, BOB.id))
    prompt = prompted(bot, bot.slack)
    accept, decline = bot.slack.button(prompt, "Train").by(BOB), bot.slack.button(prompt, "Not now").by(ADA)
    bot.deliver_during(decline, accept, monkeypatch)
    assert "bob (U0BOB in Slack) has already accepted this." in bot.slack.ephemeral[-1].text
    bot.poll()
    assert len(bot.runs.started) == 1
    assert [line["what"] for line in bot.audit()] == ["start"]


@pytest.mark.parametrize("by_watcher", [True, False])
def test_expired_proposal_closes_its_prompt_and_refuses_clicks(bot: Bot, by_watcher: bool) -> None:
    prompt = prompted(bot, bot.slack)
    click = bot.slack.button(prompt, "Train").by(ADA)
    if by_watcher:
        bot.requests.change(stored(bot), state="expired")
    else:
        bot.clock.move(6 * 3600)
    bot.deliver(click)
    assert "This prompt has expired" in bot.slack.ephemeral[-1].text
    bot.poll()
    bot.poll()
    assert "*Expired:*" in prompt.text
    versions = len(prompt.versions)
    bot.restart()
    bot.poll(60)
    assert len(prompt.versions) == versions
    assert bot.runs.started == {}


def test_run_started_by_the_watcher_is_reported_in_the_channel(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    run = runs.start("reindex", {}, ID)
    make_request(bot, state="started", answered_by=POLICY, answered=bot.clock(), run=run.id, pipeline="reindex")
    bot.poll()
    assert len(runs.started) == 1
    (message,) = slack.messages
    assert message.channel == CHANNEL
    assert run.id in message.text
    assert "the watcher's policy" in message.text
    runs.set(State.SUCCEEDED, ended=bot.clock() - timedelta(hours=1))
    bot.poll(60)
    assert stored(bot).state == "ended"


def test_old_run_of_the_watcher_is_not_reported(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    run = runs.start("reindex", {}, ID)
    make_request(bot, state="started", answered_by=POLICY, answered=bot.clock(), run=run.id, pipeline="reindex")
    bot.poll(25 * 3600)
    assert slack.messages == []


def test_run_accepted_by_the_policy_is_left_to_the_watcher(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    make_request(bot, state="accepted", answered_by=POLICY, answered=bot.clock())
    bot.poll()
    assert (slack.messages, runs.started) == ([], {})


def test_accepted_proposal_without_a_prompt_is_started_days_later(bot: Bot, runs: MemoryRuns) -> None:
    make_request(bot, state="accepted", answered_by=Person(id="U0ADA"), answered=bot.clock())
    bot.poll(3 * 24 * 3600)
    assert list(runs.started) == [ID]


def test_proposals_are_not_prompted_without_a_channel(bot: Bot, slack: SlackServer, runs: MemoryRuns) -> None:
    bot.settings = bot.settings.model_copy(update={"slack": bot.settings.slack.model_copy(update={"channel": ""})})
    bot.restart()
    make_request(bot)
    bot.poll()
    assert (slack.messages, runs.started) == ([], {})
