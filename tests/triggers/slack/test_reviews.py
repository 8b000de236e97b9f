"""Live queries in Slack: images with a class picker,
and answers handled as on the review page.
"""

import base64
import time
from pathlib import Path

import pytest

from evernear.review.answers import Answers
from evernear.review.label_target import open_label_target
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.loopback.slack import Click, Person, SlackServer
from tests.loopback.slack.server import PostedMessage
from tests.triggers.slack.bot import ADA, BOB, CHANNEL, Bot, MemoryRuns

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


@pytest.fixture
def source(bot: Bot, tmp_path: Path) -> Path:
    """A source with two classes, and one uncertain query in the log."""
    for label in ("cat", "d<o>g"):
        (tmp_path / "images" / label).mkdir(parents=True)
        (tmp_path / "images" / label / "a.png").write_bytes(PIXEL)
    data = bot.settings.data.model_copy(update={"source": f"folder:{tmp_path / 'images'}"})
    bot.settings = bot.settings.model_copy(update={"data": data})
    bot.restart()
    at = bot.clock()
    rows = [
        Period(version="v", since=at, until=at, queries=1, unknown=1),
        LoggedQuery(
            at=at,
            pred="cat",
            dist=0.5,
            unknown=True,
            image=base64.b64encode(PIXEL).decode(),
            candidates=("d<o>g", "cat"),
        ),
    ]
    lines = "".join(row.model_dump_json() + "\n" for row in rows)
    bot.store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-v-host-1-0.jsonl", lines.encode())
    return tmp_path / "images"


def posted_review(bot: Bot, slack: SlackServer) -> PostedMessage:
    """The message that follows the command; it is posted after the acknowledgement."""
    count, until_s = len(slack.messages), time.monotonic() + 10
    bot.command(ADA, "/evernear review")
    while len(slack.messages) == count and time.monotonic() < until_s:
        time.sleep(0.01)
    return slack.messages[count]


def picks(bot: Bot, slack: SlackServer, person: Person, posted: PostedMessage, label: str) -> None:
    """``person`` chooses ``label`` in the first picker."""
    elements = [e for block in posted.versions[-1]["blocks"] if block["type"] == "actions" for e in block["elements"]]
    menu = next(element for element in elements if element["type"] == "static_select")
    option = next(option for option in menu["options"] if option["text"]["text"] == label)
    url = slack.response_url(posted.channel)
    click = Click(posted.channel, posted.ts, menu | {"selected_option": option}, url)
    bot.deliver(click.by(person))


def test_picked_class_is_an_image_of_the_source_and_undo_removes_it(bot: Bot, slack: SlackServer, source: Path) -> None:
    slack.file_delays = 1
    posted = posted_review(bot, slack)
    assert slack.file_delays == 0
    (upload,) = slack.uploads
    assert (upload["data"], upload["channel"]) == (PIXEL, None)
    blocks = posted.versions[-1]["blocks"]
    assert [block["slack_file"] for block in blocks if block["type"] == "image"] == [{"id": "F0"}]
    menu = next(block for block in blocks if block["type"] == "actions")["elements"][0]
    assert [option["text"]["text"] for option in menu["options"]] == ["d<o>g", "cat"], "the nearest class comes first"

    picks(bot, slack, ADA, posted, "d<o>g")
    bot.poll()
    reply = slack.messages[-1]
    assert (reply.channel, reply.thread) == (CHANNEL, posted.ts)
    assert "labeled `d&lt;o&gt;g` by <@U0ADA>" in reply.text
    (labeled,) = (source / "d<o>g").glob("review-*.png")
    assert labeled.read_bytes() == PIXEL
    (answer,) = Answers(bot.store, open_label_target(f"folder:{source}")).latest().values()
    assert (answer.label, answer.who) == ("d<o>g", "ada (U0ADA in Slack)")
    assert bot.audit()[-1]["what"] == "label"

    picks(bot, slack, ADA, posted, "cat")
    bot.poll()
    assert "was answered in the meantime" in slack.ephemeral[-1].text

    bot.click(ADA, reply, "Undo")
    bot.poll()
    assert "back in the queue" in slack.messages[-1].text
    assert not labeled.exists()


def test_review_needs_a_permission(bot: Bot, slack: SlackServer, runs: MemoryRuns, source: Path) -> None:
    assert "you may not label images" in bot.query(BOB, "/evernear review").text
    assert slack.uploads == []
    posted = posted_review(bot, slack)
    picks(bot, slack, BOB, posted, "cat")
    bot.poll()
    assert "you may not label images" in slack.ephemeral[-1].text
    assert Answers(bot.store, open_label_target(f"folder:{source}")).latest() == {}
    assert bot.audit()[-1]["result"] == "refused"


def test_skipped_query_leaves_the_queue(bot: Bot, slack: SlackServer, source: Path) -> None:
    posted = posted_review(bot, slack)
    bot.click(ADA, posted, "Not valid, skip")
    bot.poll()
    assert "skipped" in slack.messages[-1].text
    assert "queue is empty" in bot.query(ADA, "/evernear review").text
