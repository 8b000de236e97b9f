"""The gate's rules for unknown images: known images that are called unknown, and images of unseen
classes that are accepted as known.

One threshold moves both, in opposite directions. Each rule therefore compares with the champion, so
that a candidate cannot buy fewer refused known images with more accepted unseen images, or the
reverse. A threshold rests on few images and varies between equally good networks. The intervals
therefore include its spread, without which one of 13 equally good candidates trained on digits
was held, and an increase counts if it is significant and larger than `LARGEST_INCREASE`.
"""

from typing import NamedTuple

from evernear.evaluation import gate_sentences as sentences
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_limits import LARGEST_INCREASE, REFUSALS_LEVEL
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import CONFIDENCE, Proportion, is_higher, proportion
from evernear.evaluation.verdict import Rule, ceiling_setting
from evernear.index.description import MAX_DISTANCE
from evernear.settings import GateSettings


class _Increase(NamedTuple):
    passed: bool
    reason: str


def false_reject_rule(evaluation: Evaluation, settings: GateSettings) -> Rule:
    name, ceiling, rejected = "false_rejects", settings.false_reject_ceiling, evaluation.candidate.false_rejects
    if rejected is None:
        return Rule(name=name, passed=False, bound=ceiling, reason=sentences.NO_KNOWN_TEST_IMAGES)
    is_below = rejected.low <= ceiling
    could_fail = (
        ceiling == 1 or proportion(rejected.total, rejected.total, CONFIDENCE, rejected.effective).low > ceiling
    )
    if could_fail and evaluation.candidate.threshold >= MAX_DISTANCE:
        reason = evaluation.open_set.summary() or sentences.UNKNOWN_OFF
    else:
        reason = sentences.false_rejects(
            evaluation.candidate,
            rejected,
            ceiling,
            could_fail=could_fail,
            is_below=is_below,
            differ=_differ(evaluation.candidate, rejected),
        )
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
    if evaluation.champion is None or evaluation.open_set.is_reused:
        return None
    if now is None or before is None:
        reason = sentences.TOO_FEW_CLASSES if now is None else sentences.CHAMPION_STATES_NONE
        return Rule(name=name, passed=True, could_fail=False, bound=LARGEST_INCREASE, reason=reason)
    is_significant, increase = is_higher(now, before), now.value - before.value
    passed = not (is_significant and increase > LARGEST_INCREASE)
    return Rule(
        name=name,
        passed=passed,
        candidate=now.value,
        champion=before.value,
        bound=before.value + LARGEST_INCREASE,
        reason=sentences.false_accepts(now, before, is_significant, passed),
    )


def _increase(evaluation: Evaluation, champion: Measurement) -> _Increase:
    """Of the known test images that are called unknown."""
    known = [label for label in champion.known_labels if label in evaluation.candidate.known_labels]
    pairs = evaluation.refusals.within(known) if evaluation.refusals else None
    if pairs is None:
        return _Increase(False, sentences.REFUSALS_NOT_COMPARED)
    if not pairs.queries:
        return _Increase(True, "")
    increase, is_significant = pairs.net_losses / pairs.queries, pairs.p_worse <= REFUSALS_LEVEL
    passed = not (is_significant and increase > LARGEST_INCREASE)
    return _Increase(passed, sentences.refusals(pairs, is_significant, passed))


def _differ(candidate: Measurement, rejected: Proportion) -> bool:
    """Whether test images are called unknown significantly more often than query images.

    The threshold is calibrated on the query images, which come from the same files as the gallery
    images. If they are near-duplicates of these, images from a different place or time exceed it.
    """
    calibrated = candidate.calibration_rejects
    return calibrated is not None and not rejected.low <= calibrated.high
