"""Escaping: every message, made of hostile texts."""

import inspect
import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from evernear.evaluation.verdict import Rule
from evernear.kubeflow.runs import KfpStep, Run, State
from evernear.release.promotions import Champion, Promotion
from evernear.release.records import Record
from evernear.reporting.notify import RunOutcome
from evernear.triggers.requests import WATCHER, Person, Request
from evernear.triggers.slack import blocks, commands, promotions, prompts, runs
from evernear.triggers.slack.blocks import Message
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


def request(kind: str = "run", state: str = "pending", by: Person = ADA, pipeline: str = HOSTILE) -> Request:
    fields = REQUEST | {"pipeline": pipeline, "reasons": (HOSTILE,)}
    return Request.model_construct(kind=kind, state=state, asked_by=by, answered_by=NAMED, **fields)


def run(state: State, url: str = f"https://kfp.example/{HOSTILE}") -> Run:
    texts = dict.fromkeys(("id", "name", "pipeline", "pipeline_version", "error"), HOSTILE)
    steps = tuple(
        KfpStep(name=HOSTILE, state=step_state, error=HOSTILE, started=NOW, ended=NOW) for step_state in State
    )
    return Run(state=state, created=NOW, ended=NOW, steps=steps, url=url, **texts)


def outcome(state: str) -> RunOutcome:
    texts = {"run": HOSTILE, "release": HOSTILE, "candidate": HOSTILE, "reasons": (HOSTILE,)}
    return RunOutcome(state=state, metrics={"label_right": 0.5}, caution=HOSTILE, **texts)


def champion() -> Champion:
    texts = dict.fromkeys(("version", "previous", "how", "by", "why"), HOSTILE)
    promotion = Promotion.model_construct(since=NOW, number=1, **texts)
    return cast("Champion", SimpleNamespace(version=HOSTILE, previous=HOSTILE, promotion=promotion))


def all_messages() -> Iterator[tuple[str, Message]]:
    """Each function that makes a message, and messages that it makes."""
    parameters, defaults = {HOSTILE: HOSTILE, "data": {"source": HOSTILE, HOSTILE: 1}}, {"data": {HOSTILE: 2}}
    all_runs = [run(state) for state in State] + [run(State.RUNNING, url="")]
    record = cast("Record", SimpleNamespace(manifest=SimpleNamespace(metrics={}, labels=(HOSTILE,))))
    buttons = [promotions.promote_button(HOSTILE, champion()), *promotions.roll_back_buttons(champion())]
    yield "line", blocks.line(HOSTILE)
    for pipeline, person in itertools.product(("continuous-training", "reindex", HOSTILE), (ADA, NAMED, STRANGE)):
        pending = request(by=person, pipeline=pipeline)
        yield "prompt", prompts.prompt(pending, parameters, defaults, all_runs)
        yield "starting", runs.starting(pending, HOSTILE)
        yield "not_started", runs.not_started(pending, HOSTILE)
        yield "proposal", prompts.proposal(request(by=WATCHER, pipeline=pipeline))
        for state, asked_by in itertools.product(("declined", "expired"), (person, WATCHER)):
            yield "closed_prompt", prompts.closed_prompt(request(state=state, by=asked_by, pipeline=pipeline))
        for kind in ("promote", "roll_back"):
            yield "moved_message", promotions.moved_message(request(kind, by=person), champion().promotion)
            yield "not_moved_message", promotions.not_moved_message(request(kind, by=person), HOSTILE)
    for started_run in all_runs:
        for result in (None, *(outcome(state) for state in ("promoted", "held", "rolled back", "failed"))):
            yield "status", runs.status(request(), started_run, result, can_stop=True)
            yield "verdict", runs.verdict(request(), started_run, result, [RULE], champion(), buttons)
        yield "progress", runs.progress(started_run)
        yield "stopping", runs.stopping(request(), started_run)
    yield "help_message", commands.help_message()
    yield "runs_message", commands.runs_message(all_runs, NOW + timedelta(hours=1))
    yield "champion_message", commands.champion_message(champion().promotion, record)
    yield "rollback_message", commands.rollback_message(champion())
    yield "status_message", commands.status_message(champion().promotion, all_runs, 1, f"on by {HOSTILE}", NOW)


def dicts(message: Message) -> list[dict[str, Any]]:
    return [block.to_dict() for block in message.blocks]


def texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The visible texts, with their type; values and URLs of buttons are not visible."""
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


def test_text_from_outside_becomes_no_mention_or_link() -> None:
    for name, message in all_messages():
        parsed = [("mrkdwn", message.text), *texts(dicts(message))]
        for kind, text in parsed:
            assert all(line.isprintable() for line in text.split("\n")), name
            rest = OURS.sub("", text) if kind == "mrkdwn" else ""  # in a plain text Slack parses nothing
            assert not re.search(r"[<>]|&(?!(amp|lt|gt);)", rest), (name, text)
        assert block_kit.faults(dicts(message)) == [], name


def test_all_messages_are_tested() -> None:
    """A handler of a Slack command must pass text only to these functions or to `blocks.line`,
    which escape it."""
    makers = {
        name
        for module in (blocks, commands, promotions, prompts, runs)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if inspect.signature(function).return_annotation is Message
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and name != "paragraph"  # its text is escaped
        and "call" not in inspect.signature(function).parameters
    }
    assert makers == {name for name, _ in all_messages()}


def test_help_lists_every_command() -> None:
    (block,) = dicts(commands.help_message())
    assert all(f"`{name}" in block["text"]["text"] for name in commands.COMMANDS)


def test_promotion_says_which_loss_it_would_not_have_detected() -> None:
    caution = "A loss of 15 points is detected with 90% probability, and 10 points should be."
    for warned, expected in ((caution, [f":warning: {caution}"]), ("", [])):
        result = outcome("promoted").model_copy(update={"caution": warned})
        message = runs.verdict(request(), run(State.SUCCEEDED), result, [RULE], champion(), [])
        texts = [block.get("text", {}).get("text", "") for block in dicts(message)]
        assert [text for text in texts if text.startswith(":warning:")] == expected


def test_verdict_counts_the_answers_and_says_how_many_classes_were_tested() -> None:
    metrics = {"named_right": 20.0, "named_wrong": 0.0, "called_unknown": 4.0, "label_right": 1.0}
    metrics |= {"champion_label_right": 0.75, "classes": 10.0, "tested_classes": 8.0}
    result = RunOutcome(run="run-1", state="held", metrics=metrics)
    message = runs.verdict(request(), run(State.SUCCEEDED), result, [], champion(), [])
    assert (
        "of 24 test images: 20 named right, 0 named wrong, 4 called unknown (8 of 10 classes tested); label right "
        "100.00%, the champion's 75.00%"
    ) in str(dicts(message))
    manifest = SimpleNamespace(metrics=metrics, labels=tuple("abcdefghij"))
    record = cast("Record", SimpleNamespace(manifest=manifest))
    assert "8 of 10 classes tested" in str(dicts(commands.champion_message(champion().promotion, record)))
