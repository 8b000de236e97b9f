"""What the watcher proposes is asked in the channel, and answered by a click."""

import threading

import pytest
from bot import ADA, BOB, CHANNEL, Bot, MemoryRuns

from evernear.errors import StoreError
from evernear.kubeflow.runs import State
from evernear.triggers.proposals import Proposal, Proposals
from tests.loopback.slack import SlackServer
from tests.loopback.slack.server import Shown

REASONS = ("1,200 new training images, 8.1% of those trained on.", "Unknown answers rose from 2.0% to 6.5% <today>.")


@pytest.fixture
def proposals(bot: Bot) -> Proposals:
    return Proposals(bot.store)


def _propose(bot: Bot, proposals: Proposals, slack: SlackServer) -> tuple[Proposal, Shown]:
    proposal = Proposal(
        id="20261122-090000-1a2b3c4d", created=bot.clock(), pipeline="continuous-training", reasons=REASONS
    )
    proposals.open(proposal)
    bot.look()
    return proposal, slack.messages[-1]


def test_a_proposal_is_asked_once_with_its_numbers(bot: Bot, slack: SlackServer, proposals: Proposals) -> None:
    proposal, asked = _propose(bot, proposals, slack)
    bot.restart()
    bot.look(60)
    assert slack.messages == [asked]
    assert asked.channel == CHANNEL
    assert "8.1% of those trained on" in asked.text
    assert "&lt;today&gt;" in asked.text
    assert asked.buttons == ["Train", "Not now"]
    assert proposals.show(proposal.id).message == f"{CHANNEL}/{asked.ts}"


def test_train_starts_one_run_by_the_proposals_id_and_follows_it(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    proposal, asked = _propose(bot, proposals, slack)
    bot.clicked(BOB, asked, "Train")
    bot.look()
    assert runs.started == {}
    click = slack.button(asked, "Train").by(ADA)
    bot.receives(click)
    bot.receives(click)
    bot.restart()
    bot.look()
    assert list(runs.started) == [proposal.id]
    (run,) = runs.started.values()
    found = proposals.show(proposal.id)
    assert (found.state, found.run, found.answered_by) == ("accepted", run.id, "ada (U0ADA in Slack)")
    assert "the watcher" in asked.text
    runs.set(State.FAILED, ended=bot.clock(), train=State.FAILED)
    bot.look(60)
    assert "*Failed*" in asked.text
    assert slack.messages[-1].thread == asked.ts
    bot.look(8 * 24 * 3600)
    bot.look(8 * 24 * 3600)
    assert len(runs.started) == 1


def test_a_process_that_dies_between_answer_and_request_loses_neither(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    proposal, _ = _propose(bot, proposals, slack)
    held = proposals.show(proposal.id)
    proposals.change(held, state="accepted", answered_by="ada", answered=bot.clock())
    bot.look(3 * 24 * 3600)
    assert list(runs.started) == [proposal.id]


def test_a_process_that_dies_before_it_notes_the_run_in_the_proposal_notes_it_later(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the watcher would wait for a start for ever, and a new start come when the request is forgotten."""
    proposal, asked = _propose(bot, proposals, slack)
    bot.clicked(ADA, asked, "Train")

    def die(*_: object, **__: object) -> None:
        bot.store.is_down = True
        raise StoreError("The store cannot be reached.")

    monkeypatch.setattr(Proposals, "change", die)
    bot.look()
    monkeypatch.undo()
    bot.store.is_down = False
    bot.restart()
    bot.look()
    (run,) = runs.started.values()
    assert proposals.show(proposal.id).run == run.id


def test_kfp_down_while_a_proposals_run_is_followed_is_told_once(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    _, asked = _propose(bot, proposals, slack)
    bot.clicked(ADA, asked, "Train")
    bot.look()
    runs.is_down = True
    for _ in range(5):
        bot.look(300)
    assert [("lost sight" in shown.text) for shown in slack.messages] == [False, True]


def test_a_proposal_whose_run_was_given_up_is_not_started_weeks_later(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    proposal, asked = _propose(bot, proposals, slack)
    runs.is_down = True
    bot.clicked(ADA, asked, "Train")
    bot.look()
    bot.look(3601)
    assert "*Not started.*" in asked.text
    assert proposals.show(proposal.id).state == "expired"
    runs.is_down = False
    for _ in range(3):
        bot.look(8 * 24 * 3600)
    assert runs.started == {}


def test_not_now_closes_the_question(bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals) -> None:
    proposal, asked = _propose(bot, proposals, slack)
    bot.clicked(ADA, asked, "Not now")
    bot.look()
    assert proposals.show(proposal.id).state == "declined"
    assert "*Not now*, says ada" in asked.text
    assert asked.buttons == []
    assert runs.started == {}
    assert [(line["what"], line["request"]) for line in bot.audit()] == [("decline", proposal.id)]


def test_who_says_no_at_the_moment_of_anothers_yes_is_told_so(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    bot.restart(may_start=(ADA.id, BOB.id))
    _, asked = _propose(bot, proposals, slack)
    yes, no = slack.button(asked, "Train").by(BOB), slack.button(asked, "Not now").by(ADA)
    find, overtaken = Proposals.find, threading.Event()

    def find_and_be_overtaken(there: Proposals, proposal_id: str) -> Proposal | None:
        found = find(there, proposal_id)
        if not overtaken.is_set():
            overtaken.set()
            bot.receives(yes)
        return found

    monkeypatch.setattr(Proposals, "find", find_and_be_overtaken)
    bot.receives(no)
    monkeypatch.undo()
    assert "That proposal was accepted before your click." in slack.whispers[-1].text
    bot.look()
    assert len(runs.started) == 1
    assert [line["what"] for line in bot.audit()] == ["start"]


def test_an_expired_proposal_says_so_and_takes_no_click(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    proposal, asked = _propose(bot, proposals, slack)
    click = slack.button(asked, "Train").by(ADA)
    proposals.change(proposals.show(proposal.id), state="expired")
    bot.receives(click)
    assert "That proposal was expired before your click." in slack.whispers[-1].text
    bot.look()
    assert "*Expired:*" in asked.text
    versions = len(asked.versions)
    bot.restart()
    bot.look(60)
    assert len(asked.versions) == versions
    assert runs.started == {}


def test_a_run_that_the_watcher_started_by_itself_is_told_in_the_channel(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    run = runs.start("reindex", {}, "20261122-2")
    proposals.open(
        Proposal(
            id="20261122-2",
            created=bot.clock(),
            pipeline="reindex",
            reasons=REASONS,
            state="accepted",
            answered=bot.clock(),
            run=run.id,
        )
    )
    bot.look()
    assert len(runs.started) == 1
    (told,) = slack.messages
    assert told.channel == CHANNEL
    assert run.id in told.text


def test_without_a_channel_proposals_are_left_to_others(
    bot: Bot, slack: SlackServer, runs: MemoryRuns, proposals: Proposals
) -> None:
    bot.restart(channel="")
    proposals.open(Proposal(id="1", created=bot.clock(), pipeline="reindex", reasons=REASONS, state="accepted"))
    bot.look()
    assert (slack.messages, runs.started) == ([], {})
