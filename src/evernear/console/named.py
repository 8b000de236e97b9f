"""The classes that users have named since the live release, and the rules that hold
these classes back."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from evernear.common.store import Store
from evernear.console.run_records import RunRecords
from evernear.evaluation.verdict import Rule
from evernear.reporting.notify import RunOutcome, load_rules
from evernear.review.answers import Answer

_CLASS_RULES = ("class_recall_floor", "class_recall_drop", "classes_kept")
"""Rules whose reasons name classes."""
_MORE_IMAGES_HELP = ("class_recall_floor", "class_recall_drop", "false_rejects", "accuracy_floor", "no_worse")


class Hold(NamedTuple):
    """The last run, which was held or failed, with the gate rules that did not pass."""

    outcome: RunOutcome
    begun: datetime
    rules: tuple[Rule, ...]


class NamedClass(NamedTuple):
    """A class that users gave to images, with the failed rules that name the class."""

    label: str
    images: int
    is_new: bool
    """Whether the live release does not know the class."""
    is_held: bool
    """Whether the last run began after all answers about the class,
    and was held or failed."""
    rules: tuple[Rule, ...]


class Named(NamedTuple):
    """The named classes that wait for a release. ``hold`` is None if no class is held.
    ``rules`` are failed rules that name none of the ``classes``."""

    classes: tuple[NamedClass, ...]
    hold: Hold | None
    rules: tuple[Rule, ...]


def last_hold(store: Store, records: RunRecords) -> Hold | None:
    """The last run that ended, if it was held or failed."""
    entry = next((entry for entry in records.entries() if entry.ended), None)
    outcome = records.outcome(entry.run) if entry else None
    if entry is None or outcome is None or outcome.state not in ("held", "failed"):
        return None
    return Hold(outcome, entry.begun, tuple(rule for rule in load_rules(store, entry.run) if not rule.passed))


def named_since(answers: Iterable[Answer], known: Sequence[str], hold: Hold | None) -> Named:
    """The classes in ``answers``, which users gave after a release with the classes
    ``known`` became live."""
    labeled = [answer for answer in answers if answer.action == "label"]
    newest = {answer.label: answer.at for answer in sorted(labeled, key=lambda answer: answer.at)}
    classes = [
        _named_class(label, images, label not in known, hold if hold and hold.begun > newest[label] else None)
        for label, images in Counter(answer.label for answer in labeled).items()
    ]
    if hold is None or not any(each.is_held for each in classes):
        return Named(tuple(classes), None, ())
    shown = {rule.name for each in classes for rule in each.rules}
    return Named(tuple(classes), hold, tuple(rule for rule in hold.rules if rule.name not in shown))


def remedy(rule: Rule, label: str = "") -> str:
    """The actions that would satisfy a failed rule."""
    ways: list[str] = []
    if rule.name in _MORE_IMAGES_HELP:
        ways.append(f"name more images of {label}" if label else "name more images")
    if rule.setting:
        ways.append(f"run with --set {rule.setting}, with which this rule passes")
    ways.append("promote it anyway on Runs and releases")
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _named_class(label: str, images: int, is_new: bool, hold: Hold | None) -> NamedClass:
    rules = tuple(rule for rule in hold.rules if _names(rule, label)) if hold else ()
    return NamedClass(label, images, is_new, hold is not None, rules)


def _names(rule: Rule, label: str) -> bool:
    """Whether the reason of ``rule`` names the class,
    and not just as part of a longer name or a number."""
    return (
        rule.name in _CLASS_RULES
        and re.search(rf"(?<![\w.%]){re.escape(label)}(?![\w%]|\.\d)", rule.reason) is not None
    )
