"""The gate's rules for single classes. `evernear.evaluation.gate` explains them."""

from typing import NamedTuple

from evernear.common.output import named, quantity
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_anchor import CLASSES_SHARE
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import CONFIDENCE, proportion
from evernear.evaluation.verdict import Rule, floor_setting
from evernear.settings import ClassSettings, GateSettings

LARGEST_DROP = 0.05


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
        return _Finding(False, True, "Label right by class is missing.")
    fallen = [f"{label} ({share.value:.1%})" for label, share in shares.items() if not share.high >= floor]
    if fallen:
        setting = floor_setting("gate.class_recall_floor", min(share.high for share in shares.values()))
        return _Finding(
            False, True, f"Label right is significantly below the floor of {floor:.0%} for {named(fallen)}.", setting
        )
    undecided = [
        label
        for label, share in shares.items()
        if floor and proportion(0, share.total, CONFIDENCE, share.effective).high >= floor
    ]
    decided = [label for label in shares if label not in undecided]
    worst = min(decided or undecided, key=lambda label: shares[label].value)
    if decided:
        reason = (
            f"Label right is significantly below {floor:.0%} for no class; the worst is {worst} with {shares[worst]}."
        )
        reason += f" Too few images to tell for {named(undecided)}." if undecided else ""
    else:
        reason = (
            f"Too few images to tell whether label right is below {floor:.0%} for a class; the worst is {worst} with "
            f"{shares[worst]}."
        )
    if unmeasured := [label for label in candidate.known_labels if label not in shares]:
        reason += f" Without test images and therefore not measured: {named(unmeasured)}."
    return _Finding(True, bool(decided), reason)


def _no_drop(evaluation: Evaluation, champion: Measurement, level: float) -> _Finding:
    if evaluation.comparison is None or not evaluation.comparison.classes:
        return _Finding(False, True, "The comparison by class is missing.")
    compared = evaluation.comparison.classes
    classes = {label: compared[label] for label in champion.known_labels if label in compared}
    if not classes:
        return _Finding(False, True, "No class that the champion knows has a test image.")
    level /= len(classes)
    drops = {label: pairs.net_losses / pairs.queries for label, pairs in classes.items()}
    fallen = [
        f"{label} by {drops[label]:.1%}"
        for label, pairs in classes.items()
        if drops[label] > LARGEST_DROP and pairs.p_worse <= level
    ]
    if fallen:
        reason = f"Label right fell significantly and by more than {LARGEST_DROP:.1%} for {named(fallen)}."
        return _Finding(False, True, reason)
    decided = [label for label, pairs in classes.items() if _could_drop(pairs, champion, label, level)]
    largest = max(decided or classes, key=lambda label: drops[label])
    change = f"the worst change is {0.0 - drops[largest]:+.1%} for {largest}."
    if not decided:
        return _Finding(
            True,
            False,
            f"Too few images to tell whether label right fell by more than {LARGEST_DROP:.1%} for a class; {change}",
        )
    reason = f"Label right fell significantly and by more than {LARGEST_DROP:.1%} for no class; {change}"
    if others := len(classes) - len(decided):
        reason += f" Too few images to tell for {quantity(others, 'other class', 'other classes')}."
    return _Finding(True, True, reason)


def _could_drop(pairs: PairedCounts, champion: Measurement, label: str, level: float) -> bool:
    share = champion.class_label_right.get(label)
    return share is not None and pairs.least_p(share.count) <= level


def classes_kept_rule(candidate: Measurement, champion: Measurement, classes: ClassSettings) -> Rule:
    known, known_before = set(candidate.known_labels), set(champion.known_labels)
    missing = [label for label in champion.known_labels if label not in known]
    new = [_class_figures(label, candidate) for label in candidate.known_labels if label not in known_before]
    reason = "The candidate knows every class of the champion."
    if missing:
        reason = f"The candidate lacks classes of the champion: {named(missing)}."
    if new:
        reason += f" New: {named(new)}."
    if classes.retired:
        reason += f" Retired on purpose: {named([*classes.retired])}."
    if classes.renamed:
        reason += f" Renamed: {named([f'{old} to {new}' for old, new in classes.renamed.items()])}."
    return Rule(
        name="classes_kept",
        passed=not missing and bool(candidate.known_labels),
        candidate=len(candidate.known_labels),
        champion=len(champion.known_labels),
        reason=reason,
    )


def _class_figures(label: str, measurement: Measurement) -> str:
    answers = measurement.class_answers.get(label)
    if answers is None:
        return label
    shares = (each / answers.images for each in (answers.named_right, answers.named_wrong, answers.called_unknown))
    return "{} ({:.1%} named right, {:.1%} named wrong, {:.1%} called unknown)".format(label, *shares)
