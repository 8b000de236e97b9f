"""The gate's rule for known images that the candidate calls unknown."""

from evernear.common.output import quantity
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import CONFIDENCE, Proportion, proportion
from evernear.evaluation.verdict import Rule, ceiling_setting
from evernear.index.description import MAX_DISTANCE
from evernear.settings import GateSettings


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
