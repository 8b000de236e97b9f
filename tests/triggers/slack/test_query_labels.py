"""Random live queries in Slack: posted without their answers, labeled in a picker,
and counted.
"""

import base64
import time

import pytest

from evernear.release.registry import Registry
from evernear.review.live_labels import labeled_queries
from evernear.review.random_queries import RandomQuery, Week
from evernear.serving.query_log_files import LoggedQuery, Period
from evernear.triggers.slack.random_queries import labels_message
from tests.loopback.slack import Click, Person, SlackServer
from tests.loopback.slack.server import PostedMessage
from tests.releases import MakeRelease
from tests.triggers.slack.bot import ADA, BOB, CHANNEL, Bot
from tests.triggers.slack.test_reviews import PIXEL


@pytest.fixture
def queries(bot: Bot, make_release: MakeRelease) -> list[str]:
    """A champion, and 14 queries of the uniform sample that it answered this week."""
    registry = Registry(bot.store)
    version = registry.publish(make_release().archive).manifest.version
    registry.set_champion(version, None)
    at = bot.clock()
    ids = [f"{number:08}-7b1c-4c8e-9d8e-0a3c8f0d9f1a" for number in range(14)]
    file = base64.b64encode(PIXEL).decode()
    rows = [LoggedQuery(at=at, pred="7", dist=0.125, unknown=False, id=each, file=file) for each in ids]
    period = Period(version=version, since=at, until=at, queries=99, unknown=0)
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    bot.store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{version}-host-1-0.jsonl", lines.encode())
    return ids


def posted(bot: Bot, slack: SlackServer) -> PostedMessage:
    count, until_s = len(slack.messages), time.monotonic() + 10
    bot.command(ADA, "/evernear labels")
    while len(slack.messages) == count and time.monotonic() < until_s:
        time.sleep(0.01)
    return slack.messages[count]


def pickers(message: PostedMessage) -> list[dict]:
    blocks = message.versions[-1]["blocks"]
    return [element for block in blocks if block["type"] == "actions" for element in block["elements"]]


def pick(bot: Bot, slack: SlackServer, person: Person, message: PostedMessage, menu: dict, label: str) -> None:
    option = next(option for option in menu["options"] if option["text"]["text"] == label)
    chosen = Click(message.channel, message.ts, menu | {"selected_option": option}, slack.response_url(message.channel))
    bot.deliver(chosen.by(person))
    bot.poll()


def test_picked_class_is_a_label_of_the_query_and_another_one_replaces_it(
    bot: Bot, slack: SlackServer, queries: list[str]
) -> None:
    message = posted(bot, slack)
    assert len(slack.uploads) == len(pickers(message)) == 8
    assert "0 of 12 labeled this week" in str(message.versions[-1]["blocks"])
    assert "0.12" not in str(message.versions[-1]["blocks"]), "the answer would suggest a label"
    pick(bot, slack, ADA, message, pickers(message)[0], "7")
    reply = slack.messages[-1]
    assert (reply.channel, reply.thread) == (CHANNEL, message.ts)
    assert "labeled `7` by <@U0ADA>" in reply.text
    (query,) = labeled_queries(bot.store).queries
    assert query.id in queries
    assert (query.label, query.correct) == ("7", True)
    assert bot.audit()[-1]["what"] == "label"
    bot.clock.move(1)
    pick(bot, slack, ADA, message, pickers(message)[0], "8")
    (query,) = labeled_queries(bot.store).queries
    assert (query.label, query.correct) == ("8", False)
    again = posted(bot, slack)
    assert "1 of 12 labeled this week" in str(again.versions[-1]["blocks"])
    assert query.id not in str(again.versions[-1]["blocks"])


def test_enough_labels_are_said(bot: Bot, slack: SlackServer, queries: list[str]) -> None:
    for _ in range(12):
        message = posted(bot, slack)
        pick(bot, slack, ADA, message, pickers(message)[0], "7")
    assert len(labeled_queries(bot.store).queries) == 12
    assert "12 random queries have labels this week" in bot.query(ADA, "/evernear labels").text


def test_labels_need_a_permission_and_a_logged_query(bot: Bot, slack: SlackServer, queries: list[str]) -> None:
    assert "you may not label images" in bot.query(BOB, "/evernear labels").text
    message = posted(bot, slack)
    pick(bot, slack, BOB, message, pickers(message)[0], "7")
    assert labeled_queries(bot.store).queries == []
    for info in list(bot.store.list("queries/")):
        bot.store.delete(info.key)
    pick(bot, slack, ADA, message, pickers(message)[0], "7")
    assert "no longer in the log" in slack.ephemeral[-1].text
    assert "No random query is waiting" in bot.query(ADA, "/evernear labels").text


def test_without_a_release_nothing_is_asked(bot: Bot) -> None:
    assert bot.query(ADA, "/evernear labels").text == "No release is live."


def test_every_option_fits_into_a_picker() -> None:
    """An id has up to 128 characters, and a value at most 150:
    a class that does not fit is left to the console.
    """
    long = RandomQuery("x" * 128, PIXEL)
    message = labels_message(Week({}, [long]), [long], ["F0"], ["a" * 30, "b"])
    (menu,) = [block["elements"][0] for block in message.blocks if block["type"] == "actions"]
    assert [option["value"] for option in menu["options"]] == [f"{'x' * 128} b"]
    unlabeled = labels_message(Week({}, [long]), [long], ["F0"], ["a" * 30])
    assert "actions" not in {block["type"] for block in unlabeled.blocks}
