"""The gate's rules for unknown images: known images that are called unknown, and images of unseen
classes that are accepted as known.

One threshold moves both, in opposite directions. Each rule therefore compares with the champion, so
that a candidate cannot buy fewer refused known images with more accepted unseen images, or the
reverse. A threshold rests on few images and varies between equally good networks, so an increase
counts if it is significant and larger than `LARGEST_INCREASE`.
"""

from typing import NamedTuple

from evernear.common.output import quantity
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import CONFIDENCE, Proportion, is_higher, proportion
from evernear.evaluation.verdict import Rule, ceiling_setting
from evernear.index.description import MAX_DISTANCE
from evernear.settings import GateSettings

LARGEST_INCREASE = 0.05
LEVEL = (1 - CONFIDENCE) / 2
"""Of the one-sided test whether more known images are called unknown."""
_REMEDY = " If this is intended, promote the release."


class _Increase(NamedTuple):
    passed: bool
    reason: str


def false_reject_rule(evaluation: Evaluation, settings: GateSettings) -> Rule:
    name, ceiling, rejected = "false_rejects", settings.false_reject_ceiling, evaluation.candidate.false_rejects
    if rejected is None:
        reason = "No test image is of a class that the candidate knows, so false rejects were not measured."
        return Rule(name=name, passed=False, bound=ceiling, reason=reason)
    is_below = rejected.low <= ceiling
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
            f"{'not ' if is_below else ''}significantly more than {ceiling:.0%}."
        )
        reason += _different_test_images(evaluation.candidate, rejected)
    champion = evaluation.champion
    increase = _increase(evaluation, champion) if champion else _Increase(True, "")
    before = champion.false_rejects if champion else None
    return Rule(
        name=name,
        passed=is_below and increase.passed,
        could_fail=could_fail or not increase.passed,
        candidate=rejected.value,
        champion=before.value if before else None,
        bound=ceiling,
        reason=f"{reason} {increase.reason}".strip(),
        setting=ceiling_setting("gate.false_reject_ceiling", rejected.low) if increase.passed and not is_below else "",
    )


def false_accept_rule(evaluation: Evaluation) -> Rule | None:
    """None without a champion, or if the candidate reuses its network and its threshold."""
    name, now, before = "false_accepts", evaluation.open_set.false_accepts, evaluation.champion_false_accepts
    if evaluation.champion is None or evaluation.open_set.threshold is not None:
        return None
    if now is None or before is None:
        reason = (
            "Too few classes to hold one out, so it is not known how many images of unseen classes are accepted."
            if now is None
            else "The champion does not state how many images of unseen classes it accepts, so nothing can be compared."
        )
        return Rule(name=name, passed=True, could_fail=False, bound=LARGEST_INCREASE, reason=reason)
    is_significant, increase = is_higher(now, before), now.value - before.value
    passed = not (is_significant and increase > LARGEST_INCREASE)
    reason = (
        f"Of images of unseen classes, {now} are accepted as known, {'' if is_significant else 'not '}significantly "
        f"more than the champion's {before}."
    )
    if is_significant and passed:
        reason += f" The increase is at most {LARGEST_INCREASE:.0%}."
    return Rule(
        name=name,
        passed=passed,
        candidate=now.value,
        champion=before.value,
        bound=before.value + LARGEST_INCREASE,
        reason=reason if passed else reason + _REMEDY,
    )


def _increase(evaluation: Evaluation, champion: Measurement) -> _Increase:
    """Of the known test images that are called unknown."""
    known = [label for label in champion.known_labels if label in evaluation.candidate.known_labels]
    pairs = evaluation.refusals.within(known) if evaluation.refusals else None
    if pairs is None:
        return _Increase(False, "The images that are called unknown were not compared with the champion's.")
    if not pairs.queries:
        return _Increase(True, "")
    increase, is_significant = pairs.net_losses / pairs.queries, pairs.p_worse <= LEVEL
    passed = not (is_significant and increase > LARGEST_INCREASE)
    reason = (
        f"Of those that the champion names, the candidate calls {pairs.regressions:,} unknown, and it names "
        f"{pairs.improvements:,} of those that the champion calls unknown"
    )
    if increase > LARGEST_INCREASE:
        reason += (
            f", {increase:.1%} {'' if is_significant else 'but not significantly '}more"
            f" ({pairs.p_in_words()}, level {LEVEL:g})"
        )
    return _Increase(passed, f"{reason}.{'' if passed else _REMEDY}")


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
