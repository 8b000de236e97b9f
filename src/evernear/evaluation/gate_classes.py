"""The gate's rules for single classes. `evernear.evaluation.gate` explains them."""

from typing import NamedTuple

from evernear.evaluation import gate_sentences as sentences
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_limits import CLASSES_SHARE, LARGEST_DROP
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import CONFIDENCE, proportion
from evernear.evaluation.verdict import Rule, floor_setting
from evernear.settings import ClassSettings, GateSettings


class _Finding(NamedTuple):
    passed: bool
    could_fail: bool
    reason: str
    setting: str = ""


def class_recall_rule(evaluation: Evaluation, settings: GateSettings) -> Rule:
    candidate, champion = evaluation.candidate, evaluation.champion
    findings = [_above_floor(candidate, settings.class_recall_floor)]
    if champion is not None:
        findings.append(_no_drop(evaluation, champion, settings.significance * CLASSES_SHARE))
    failed = [finding for finding in findings if not finding.passed]
    return Rule(
        name="class_recall",
        passed=not failed,
        could_fail=any(finding.could_fail for finding in findings),
        candidate=min((share.value for share in candidate.class_label_right.values()), default=None),
        bound=settings.class_recall_floor,
        reason=" ".join(finding.reason for finding in failed or findings),
        setting=failed[0].setting if len(failed) == 1 else "",
    )


def _above_floor(candidate: Measurement, floor: float) -> _Finding:
    shares = candidate.class_label_right
    if not shares:
        return _Finding(False, True, sentences.NO_CLASS_FIGURES)
    fallen = {label: share for label, share in shares.items() if not share.high >= floor}
    if fallen:
        setting = floor_setting("gate.class_recall_floor", min(share.high for share in shares.values()))
        return _Finding(False, True, sentences.classes_below(fallen, floor), setting)
    undecided = [
        label
        for label, share in shares.items()
        if floor and proportion(0, share.total, CONFIDENCE, share.effective).high >= floor
    ]
    worst = min(shares, key=lambda label: (shares[label].value, shares[label].low))
    could_fail = len(undecided) < len(shares)
    return _Finding(True, could_fail, sentences.classes_above(candidate, floor, worst, undecided, could_fail))


def _no_drop(evaluation: Evaluation, champion: Measurement, level: float) -> _Finding:
    if evaluation.comparison is None or not evaluation.comparison.classes:
        return _Finding(False, True, sentences.NO_CLASS_COMPARISON)
    compared = evaluation.comparison.classes
    classes = {label: compared[label] for label in champion.known_labels if label in compared}
    if not classes:
        return _Finding(False, True, sentences.NO_KNOWN_CLASS)
    level /= len(classes)
    drops = {label: pairs.net_losses / pairs.queries for label, pairs in classes.items()}
    fallen = {
        label: drops[label]
        for label, pairs in classes.items()
        if drops[label] > LARGEST_DROP and pairs.p_worse <= level
    }
    if fallen:
        return _Finding(False, True, sentences.classes_fell(fallen))
    undecided = sum(not _could_drop(pairs, champion, label, level) for label, pairs in classes.items())
    largest = max(classes, key=lambda label: drops[label])
    could_fail = undecided < len(classes)
    reason = sentences.classes_did_not_fall(largest, drops[largest], undecided, could_fail)
    return _Finding(True, could_fail, reason)


def _could_drop(pairs: PairedCounts, champion: Measurement, label: str, level: float) -> bool:
    share = champion.class_label_right.get(label)
    return share is not None and pairs.least_p(share.count) <= level


def classes_kept_rule(candidate: Measurement, champion: Measurement, classes: ClassSettings) -> Rule:
    known, known_before = set(candidate.known_labels), set(champion.known_labels)
    missing = [label for label in champion.known_labels if label not in known]
    new = [label for label in candidate.known_labels if label not in known_before]
    return Rule(
        name="classes_kept",
        passed=not missing and bool(candidate.known_labels),
        candidate=len(candidate.known_labels),
        champion=len(champion.known_labels),
        reason=sentences.classes_kept(candidate, missing, new, classes),
    )
