"""The gate's rules for single classes and for unknown images. `evernear.evaluation.gate` explains
them."""

from typing import NamedTuple

from evernear.common.output import named, quantity
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_anchor import CLASSES_SHARE
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import CONFIDENCE, Proportion, proportion
from evernear.evaluation.verdict import Rule, ceiling_setting, floor_setting
from evernear.index.description import MAX_DISTANCE
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
        candidate=min((recall.value for recall in candidate.class_recall.values()), default=None),
        bound=settings.class_recall_floor,
        reason=" ".join(finding.reason for finding in failed or findings),
        setting=failed[0].setting if len(failed) == 1 else "",
    )


def _above_floor(candidate: Measurement, floor: float) -> _Finding:
    recalls = candidate.class_recall
    if not recalls:
        return _Finding(False, True, "Recall by class is missing.")
    fallen = [f"{label} ({recall.value:.1%})" for label, recall in recalls.items() if not recall.high >= floor]
    if fallen:
        setting = floor_setting("gate.class_recall_floor", min(recall.high for recall in recalls.values()))
        return _Finding(
            False, True, f"Recall is significantly below the floor of {floor:.0%} for {named(fallen)}.", setting
        )
    undecided = [
        label
        for label, recall in recalls.items()
        if floor and proportion(0, recall.total, CONFIDENCE, recall.effective).high >= floor
    ]
    decided = [label for label in recalls if label not in undecided]
    worst = min(decided or undecided, key=lambda label: recalls[label].value)
    if decided:
        reason = f"No class has a recall significantly below {floor:.0%}; the worst is {worst} with {recalls[worst]}."
        reason += f" Too few images to tell for {named(undecided)}." if undecided else ""
    else:
        reason = (
            f"Too few images to tell whether the recall of a class is below {floor:.0%}; the worst is {worst} with "
            f"{recalls[worst]}."
        )
    if unmeasured := [label for label in candidate.known_labels if label not in recalls]:
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
        reason = f"Recall fell significantly and by more than {LARGEST_DROP:.1%} for {named(fallen)}."
        return _Finding(False, True, reason)
    decided = [label for label, pairs in classes.items() if _could_drop(pairs, champion, label, level)]
    largest = max(decided or classes, key=lambda label: drops[label])
    change = f"the worst change is {0.0 - drops[largest]:+.1%} for {largest}."
    if not decided:
        return _Finding(
            True,
            False,
            f"Too few images to tell whether the recall of a class fell by more than {LARGEST_DROP:.1%}; {change}",
        )
    reason = f"No class has a significant recall drop of more than {LARGEST_DROP:.1%}; {change}"
    if others := len(classes) - len(decided):
        reason += f" Too few images to tell for {quantity(others, 'other class', 'other classes')}."
    return _Finding(True, True, reason)


def _could_drop(pairs: PairedCounts, champion: Measurement, label: str, level: float) -> bool:
    recall = champion.class_recall.get(label)
    return recall is not None and pairs.least_p(recall.count) <= level


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
    figures = [("recall", measurement.class_recall), ("called unknown", measurement.class_rejects)]
    text = ", ".join(f"{name} {shares[label].value:.1%}" for name, shares in figures if label in shares)
    return f"{label} ({text})" if text else label


def false_reject_rule(evaluation: Evaluation, settings: GateSettings) -> Rule:
    name, ceiling, rejected = "false_rejects", settings.false_reject_ceiling, evaluation.candidate.false_rejects
    if rejected is None:
        reason = "No test image is of a class that the candidate knows, so false rejects were not measured."
        return Rule(name=name, passed=False, bound=ceiling, reason=reason)
    passed = rejected.low <= ceiling
    could_fail = (
        ceiling == 1 or proportion(rejected.total, rejected.total, CONFIDENCE, rejected.effective).low > ceiling
    )
    if not could_fail:
        reason = (
            f"Too few images to tell whether more than {ceiling:.0%} of known images are called unknown: "
            f"{rejected} of the known test images are."
        )
    elif evaluation.candidate.threshold >= MAX_DISTANCE:
        reason = evaluation.open_set.summary() or "Unknown is switched off: every image counts as known."
    else:
        reason = (
            f"{rejected} of the known test images are called unknown, "
            f"{'not ' if passed else ''}significantly more than {ceiling:.0%}."
        )
        reason += _different_test_images(evaluation.candidate, rejected)
    setting = "" if passed else ceiling_setting("gate.false_reject_ceiling", rejected.low)
    return Rule(
        name=name,
        passed=passed,
        could_fail=could_fail,
        candidate=rejected.value,
        bound=ceiling,
        reason=reason,
        setting=setting,
    )


def _different_test_images(candidate: Measurement, rejected: Proportion) -> str:
    """A sentence if test images are called unknown significantly more often than query images, or
    an empty string otherwise.

    The threshold is calibrated on the query images, which come from the same files as the gallery
    images. If they are near-duplicates of these, images from a different place or time exceed it.
    """
    calibrated = candidate.calibration_rejects
    if calibrated is None or rejected.low <= calibrated.high:
        return ""
    advice = "Add images like the test images to the training images"
    if not candidate.groups:
        advice += (
            ", or, if the images show scenes, shops or persons several times, ingest them into a new store with "
            "data.group, so that whole groups that the gallery lacks set the threshold"
        )
    return (
        f" Your test images look different from your gallery: of the {quantity(calibrated.total, 'query image')}, "
        f"which come from the same files as the gallery and set the threshold, {calibrated.value:.2%} are called "
        f"unknown. {advice}."
    )
