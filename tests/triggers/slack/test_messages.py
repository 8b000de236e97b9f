"""Every message, with names that people chose to be read as something else."""

import inspect
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from evernear.evaluation.verdict import Rule
from evernear.kubeflow.runs import Run, State, Step
from evernear.release.registry import Champion, Promotion, Record
from evernear.reporting.notify import Outcome
from evernear.triggers.proposals import Proposal
from evernear.triggers.slack import messages
from evernear.triggers.slack.inbox import Person, Request
from evernear.triggers.slack.web import Message
from tests.loopback.slack import block_kit

HOSTILE = "<!channel> <@U0EVE> & &lt;!here&gt; <http://evil.example|status>| `*_```\n\u202e\x1b[31m\x00"
NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)

REQUEST = {
    "id": HOSTILE,
    "created": NOW,
    "channel": HOSTILE,
    "pipeline": HOSTILE,
    "release": HOSTILE,
    "run": HOSTILE,
    "answered": NOW,
}
ADA, NAMED, STRANGE = Person(id="U0ADA", name=HOSTILE), Person(id="", name=HOSTILE), Person(id=HOSTILE, name=HOSTILE)
RULE = Rule(name=HOSTILE, passed=False, candidate=0.5, champion=None, bound=1.0, reason=HOSTILE)


def request(kind: str = "retrain", state: str = "asked", by: Person = ADA) -> Request:
    return Request.model_construct(kind=kind, state=state, asked_by=by, answered_by=NAMED, **REQUEST)


def run(state: State, url: str = f"https://kfp.example/{HOSTILE}") -> Run:
    texts = dict.fromkeys(("id", "name", "pipeline", "pipeline_version", "error"), HOSTILE)
    steps = tuple(Step(name=HOSTILE, state=each, error=HOSTILE, started=NOW, ended=NOW) for each in State)
    return Run(state=state, created=NOW, ended=NOW, steps=steps, url=url, **texts)


def outcome(state: str) -> Outcome:
    texts = {"run": HOSTILE, "release": HOSTILE, "candidate": HOSTILE, "reasons": (HOSTILE,)}
    return Outcome(state=state, metrics={"accuracy": 0.5}, **texts)


def champion() -> Champion:
    texts = dict.fromkeys(("version", "previous", "how", "by", "why"), HOSTILE)
    promotion = Promotion.model_construct(since=NOW, number=1, **texts)
    return cast("Champion", SimpleNamespace(version=HOSTILE, previous=HOSTILE, promotion=promotion))


def proposal(pipeline: str, state: str) -> Proposal:
    texts = {"id": HOSTILE, "reasons": (HOSTILE,), "answered_by": HOSTILE}
    return Proposal.model_construct(created=NOW, pipeline=pipeline, state=state, **texts)


def all_messages() -> Iterator[tuple[str, Message]]:
    """The name of each function that makes a message, and messages that it makes."""
    parameters, defaults = {HOSTILE: HOSTILE, "data": {"source": HOSTILE, HOSTILE: 1}}, {"data": {HOSTILE: 2}}
    runs = [run(state) for state in State] + [run(State.RUNNING, url="")]
    record = cast("Record", SimpleNamespace(manifest=SimpleNamespace(metrics={}, labels=(HOSTILE,))))
    yield "line", messages.line(HOSTILE)
    for person in (ADA, NAMED, STRANGE):
        asked = request(by=person)
        yield "question", messages.question(asked, parameters, defaults, runs[0], runs, NOW)
        yield "starting", messages.starting(asked, HOSTILE)
        yield "not_started", messages.not_started(asked, HOSTILE)
        for state in ("declined", "expired"):
            yield "answered", messages.answered(request(state=state, by=person))
        for kind in ("promote", "roll_back"):
            yield "moved", messages.moved(request(kind, by=person), champion().promotion)
            yield "not_moved", messages.not_moved(request(kind, by=person), HOSTILE)
    for each in runs:
        for came_to in (None, *(outcome(state) for state in ("promoted", "held", "rolled back", "failed"))):
            yield "headline", messages.headline(request(), each, came_to, can_stop=True)
            yield "verdict", messages.verdict(request(), each, came_to, [RULE], champion(), True, True)
        yield "progress", messages.progress(each)
        yield "stopping", messages.stopping(request(), each)
    for pipeline in ("continuous-training", "reindex", HOSTILE):
        for state in ("open", "declined", "expired"):
            yield "proposal", messages.proposal(proposal(pipeline, state), state == "open")
    yield "runs", messages.runs(runs, NOW + timedelta(hours=1))
    yield "champion", messages.champion(champion(), record)
    yield "roll_back_question", messages.roll_back_question(champion())
    yield "status", messages.status(champion(), runs, 1, f"on by {HOSTILE}", NOW)


def texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text that is shown, with its type; the others, values and addresses of buttons, are not."""
    match tree:
        case {"type": "plain_text" | "mrkdwn" as kind, "text": str() as text}:
            yield kind, text
        case dict():
            for name, inner in tree.items():
                yield from texts(inner, name)
        case list() | tuple():
            for inner in tree:
                yield from texts(inner, key)


OURS = re.compile(
    r"<@U0ADA>|<!date\^\d+\^\{date_short_pretty\} \{time\}\|[^<>]*>|<https://kfp\.example/[^<>|]*\|[^<>|]*>"
)


def test_no_text_becomes_a_mention_a_link_or_a_command() -> None:
    for name, message in all_messages():
        parsed = [("mrkdwn", message.text), *texts(message.blocks)]
        for kind, text in parsed:
            assert all(line.isprintable() for line in text.split("\n")), name
            rest = OURS.sub("", text) if kind == "mrkdwn" else ""  # in a plain text Slack parses nothing
            assert not re.search(r"[<>]|&(?!(amp|lt|gt);)", rest), (name, text)
        assert block_kit.faults(list(message.blocks)) == [], name


def test_all_functions_that_make_messages_are_among_them() -> None:
    made = {
        name
        for name, function in inspect.getmembers(messages, inspect.isfunction)
        if inspect.signature(function).return_annotation is Message and function.__module__ == messages.__name__
    }
    assert made == {name for name, _ in all_messages()}
