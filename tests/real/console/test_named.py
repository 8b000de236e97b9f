"""What people named since the live release, and what holds it back, in its place on Review."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.console.named import Hold, named_since, remedy
from evernear.console.runs import LocalRuns
from evernear.data.ingest import ingest_source
from evernear.evaluation.verdict import Rule
from evernear.release.registry import Registry
from evernear.reporting.notify import RunOutcome
from evernear.review.answers import ANSWERS, Answer
from evernear.settings import DataSettings, load
from tests.consoles import TOKEN, console_client
from tests.releases import MakeRelease

NOW = datetime.now(UTC)
RECALL = Rule(
    name="class_recall",
    passed=False,
    candidate=0.2,
    bound=0.5,
    reason="Recall is significantly below the floor of 50% for 7 (20.5%), cat (7.5%).",
    setting="gate.class_recall_floor=0.2",
)
REJECTS = Rule(name="false_rejects", passed=False, reason="7 of 70 known test images are called unknown.")


def named(label: str, number: int, age: timedelta = timedelta(0), action: str = "label") -> Answer:
    fields = {"image": f"{number:064x}", "action": action, "label": label, "who": "ann", "at": NOW - age}
    return Answer.model_validate(fields)


def held(*rules: Rule, begun: datetime = NOW + timedelta(minutes=1), state: str = "held") -> Hold:
    outcome = RunOutcome.model_validate({"run": "run-1", "state": state, "candidate": "v"})
    return Hold(outcome, begun, rules)


def test_rule_that_names_a_class_is_shown_at_the_class_and_others_below() -> None:
    answers = [named("7", 1), named("7", 2), named("", 3, action="skip"), named("dog", 4)]
    waiting = named_since(answers, ["cat", "dog"], held(RECALL, REJECTS))
    assert [(each.label, each.images, each.is_new, each.rules) for each in waiting.classes] == [
        ("7", 2, True, (RECALL,)),
        ("dog", 1, False, ()),
    ]
    assert waiting.rules == (REJECTS,), "a number in a sentence is not the class 7"


@pytest.mark.parametrize("label", ["at", "ca", "5", "20", "50"])
def test_part_of_a_name_or_number_is_no_class(label: str) -> None:
    (each,) = named_since([named(label, 1)], [], held(RECALL)).classes
    assert each.rules == (), label


@pytest.mark.parametrize("label", ["a.b", "x (y)", "c++", "7"])
def test_names_with_punctuation_are_recognized(label: str) -> None:
    rule = RECALL.model_copy(update={"reason": f"Recall is below 50% for {label} (20.5%)."})
    (each,) = named_since([named(label, 1)], [], held(rule)).classes
    assert each.rules == (rule,)


def test_class_that_was_named_after_the_run_began_waits_for_the_next() -> None:
    answers = [named("7", 1, timedelta(hours=2)), named("dog", 2)]
    waiting = named_since(answers, [], held(RECALL, begun=NOW - timedelta(hours=1)))
    assert [(each.label, each.is_held) for each in waiting.classes] == [("7", True), ("dog", False)]
    waiting = named_since(answers[1:], [], held(RECALL, begun=NOW - timedelta(hours=1)))
    assert (waiting.hold, waiting.rules) == (None, ())


def test_remedy_says_all_that_would_satisfy_a_rule() -> None:
    assert remedy(RECALL, "7") == (
        "Name more images of 7, or run with --set gate.class_recall_floor=0.2, with which this rule passes, or promote "
        "it anyway on Releases."
    )
    assert remedy(Rule(name="parity", passed=False, reason="")) == "Promote it anyway on Releases."


def test_review_shows_what_the_live_release_lacks(store: Store, source: Path, make_release: MakeRelease) -> None:
    registry = Registry(store)
    version = registry.publish(make_release().archive).manifest.version
    registry.set_champion(version, None)
    answers = [named("7", 1, -timedelta(hours=1)), named("7", 2, timedelta(days=9999))]
    store.put(ANSWERS, b"".join(each.model_dump_json().encode() + b"\n" for each in answers))
    overrides = [f"store={store.uri}", f"data.source=folder:{source}", "validation.min_class_images=1"]
    settings = load(overrides=overrides, environment={})
    client = console_client(settings, store, LocalRuns(settings, ()))
    page = " ".join(client.get(f"/review?token={TOKEN}").text.split())
    assert '<b><bdi>7</bdi></b>: 1 image <span class="dim">for the next reindex</span>' in page, (
        "the other is older than the release"
    )


@pytest.mark.parametrize(("minimum", "shown"), [(10, "<b><bdi>7</bdi></b> (1 of 10)"), (1, "")])
def test_class_that_waits_is_shown_on_review_and_data(store: Store, source: Path, minimum: int, shown: str) -> None:
    ingest_source(DataSettings(source=f"folder:{source}"), store.uri)
    store.put(ANSWERS, named("7", 1).model_dump_json().encode() + b"\n")
    overrides = [f"store={store.uri}", f"data.source=folder:{source}", f"validation.min_class_images={minimum}"]
    settings = load(overrides=overrides, environment={})
    client = console_client(settings, store, LocalRuns(settings, ()))
    assert (f"1 of {minimum}</b>" in client.get(f"/review?token={TOKEN}").text) == bool(shown)
    assert ("left out until a class has" in client.get("/data").text) == bool(shown)
    assert shown in client.get("/data").text


@pytest.mark.parametrize(("state", "shown"), [("held", "The gate held release"), ("failed", "The run failed at embed")])
def test_review_shows_why(store: Store, source: Path, state: str, shown: str) -> None:
    answer = named("7", 1, timedelta(hours=1))
    store.put(ANSWERS, answer.model_dump_json().encode() + b"\n")
    record = RunRecord(store, "run-1")
    outcome = {"run": "run-1", "state": state, "candidate": "v", "step": "embed", "reasons": ["Out of memory."]}
    rules = [RECALL.model_dump(mode="json"), REJECTS.model_dump(mode="json")] if state == "held" else []
    record.save(outcome=RunOutcome.model_validate(outcome).model_dump(mode="json"), verdict={"rules": rules})
    settings = load(overrides=[f"store={store.uri}", f"data.source=folder:{source}"], environment={})
    client = console_client(settings, store, LocalRuns(settings, ()))
    client.get(f"/?token={TOKEN}")
    page = client.get("/review/named").text
    assert shown in page
    assert all(text in page for text in ([RECALL.reason, REJECTS.reason] if rules else ["Out of memory."]))
    assert ("Name more images of 7" in page) == bool(rules)
