"""What became of named images: the classes that the live release does not contain, the gate rules
that block these classes, and the live release's answers about images that are in its gallery."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from evernear.common.run_record import OUTCOME, RUNS, RunRecord
from evernear.common.store import Store
from evernear.data.image_file import inspect
from evernear.data.preprocess import decode_inspected
from evernear.errors import IntegrityError
from evernear.evaluation.verdict import Rule
from evernear.release.manifest import ReleaseManifest
from evernear.reporting.notify import RunOutcome, load_rules
from evernear.review.answers import Answer
from evernear.serving.gallery_images import GalleryImages
from evernear.serving.responses import Neighbor, Prediction
from evernear.settings.section import MAX_PIXELS

_CLASS_RULES = ("class_recall", "classes_kept")
"""Rules whose reasons mention classes."""
_MORE_IMAGES_HELP = ("class_recall", "false_rejects", "accuracy_floor", "no_worse")


class Hold(NamedTuple):
    """The last run that ended, if it was held or failed, and its failed gate rules."""

    outcome: RunOutcome
    begun: datetime
    rules: tuple[Rule, ...]


class NamedClass(NamedTuple):
    """A class that users assigned to images, and the failed rules whose reasons mention the
    class."""

    label: str
    images: int
    is_new: bool
    is_held: bool
    """Whether the last run was held or failed and began after the latest answer about the class."""
    rules: tuple[Rule, ...]


class Named(NamedTuple):
    """The classes whose newly labeled images are not in a release yet. ``hold`` is None if no class
    is held. ``rules`` are the failed rules that mention none of the ``classes``."""

    classes: tuple[NamedClass, ...]
    hold: Hold | None
    rules: tuple[Rule, ...]


def last_hold(store: Store) -> Hold | None:
    """The last run that ended, or None if that run was neither held nor failed."""
    begun: dict[str, datetime] = {}
    ended: dict[str, datetime] = {}
    for info in store.list(RUNS):
        run, _, name = info.key.removeprefix(RUNS).partition("/")
        begun[run] = min(info.modified, begun.get(run, info.modified))
        if name == f"{OUTCOME}.json":
            ended[run] = info.modified
    last = max(ended, key=ended.__getitem__, default="")
    outcome = None
    with suppress(IntegrityError):  # `evernear store check` reports it
        outcome = RunRecord(store, last).find(OUTCOME, RunOutcome) if last else None
    if outcome is None or outcome.state not in ("held", "failed"):
        return None
    return Hold(outcome, begun[last], tuple(rule for rule in load_rules(store, last) if not rule.passed))


def named_since(answers: Iterable[Answer], known: Sequence[str], hold: Hold | None) -> Named:
    """The classes in ``answers``, whose images are not in the live release. ``known`` are the live
    release's classes."""
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
    """List the user's options for a failed rule in one sentence."""
    ways: list[str] = []
    if rule.name in _MORE_IMAGES_HELP:
        ways.append(f"name more images of {label}" if label else "name more images")
    if rule.setting:
        ways.append(f"run with --set {rule.setting}, with which this rule passes")
    ways.append("promote it anyway on Releases")
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _named_class(label: str, images: int, is_new: bool, hold: Hold | None) -> NamedClass:
    rules = tuple(rule for rule in hold.rules if _names(rule, label)) if hold else ()
    return NamedClass(label, images, is_new, hold is not None, rules)


def _names(rule: Rule, label: str) -> bool:
    """Whether the reason for ``rule`` mentions the class as a whole word, not as part of a longer
    name or a number."""
    return (
        rule.name in _CLASS_RULES
        and re.search(rf"(?<![\w.%]){re.escape(label)}(?![\w%]|\.\d)", rule.reason) is not None
    )


class AnswerOfOthers(NamedTuple):
    """The label that the other gallery images give to an image, and whether it is unknown."""

    label: str
    unknown: bool


def answer_of_others(
    prediction: Prediction, image: bytes, gallery: GalleryImages, release: ReleaseManifest
) -> AnswerOfOthers | None:
    """Leave ``image`` out of its own neighbors, because a gallery recognizes each of its own
    images. None if the prediction lists no other (``index.k=1``)."""
    itself = decode_inspected(inspect(image, MAX_PIXELS), release.preprocessing.bit_depth).digest().hex()
    others = [near for near in prediction.neighbors if not _shows(near, itself, release.version, gallery)]
    if not others:
        return None
    return AnswerOfOthers(others[0].label, others[0].dist > release.threshold)


def _shows(near: Neighbor, digest: str, version: str, gallery: GalleryImages) -> bool:
    found = gallery.find(version, near.row)
    return found is not None and found.digest == digest
