"""The gate's rule for the anchor, a fixed earlier release, which limits the sum of small losses.

Each promoted candidate may have lost too little to be detected. The anchor does not move with the
champion, so these losses accumulate against it until the rule fails. The first promoted release is
the anchor until a user chooses another, or until it can no longer be compared with the candidate.
The champion then takes its place, and the reason says so. If the anchor is damaged or lost, the
rule fails instead, because a fault must not weaken the gate.

The rule has two parts: the test of `no_worse`, on the classes that both systems know, and a budget
for net losses (`evernear.evaluation.compare.net_loss_budget`), because on a small test split, no
test can detect a loss of several points. Their shares of the level, the budget and
`MAX_UNDETECTED_LOSS` were chosen by simulation (docs/decisions/0027-the-anchor.md).
"""

from dataclasses import dataclass

from evernear.common.output import quantity
from evernear.evaluation.compare import PairedCounts, detectable_loss, loss_beyond_budget, net_loss_budget
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.measure import Measurement
from evernear.evaluation.verdict import AnchorChoice, Rule
from evernear.settings import GateSettings

CLASSES_SHARE = 0.2
"""Share of ``gate.significance`` that `class_recall` uses."""
ANCHOR_SHARE = 0.4
"""Share of ``gate.significance`` that `no_worse_than_anchor` uses. `no_worse` spends the rest."""
POWER = 0.9
"""Probability with which the loss that a verdict states is detected."""
MAX_UNDETECTED_LOSS = 0.10
"""Largest loss that the gate may fail to detect, with a probability of more than 1 -
`POWER`, without a warning."""
TEST_OVERLAP_FLOOR = 0.9
"""Smallest share of a release's test images that the test split must still contain for a
comparison."""
_MOVE = "`evernear registry anchor VERSION --why REASON`"
_REMEDY = f" If this loss is intended, promote the release and make it the anchor with {_MOVE}."


@dataclass(frozen=True)
class Anchor:
    choice: AnchorChoice
    is_champion: bool
    measurement: Measurement | None
    pairs: PairedCounts | None
    """The comparison on the classes that both releases know. None if ``fault`` is set, or if the
    candidate was not compared with the champion."""
    errors: int = 0
    """On the compared queries."""
    fault: str = ""
    """Why the anchor cannot be measured, as a sentence."""


def choose_anchor(evaluation: Evaluation, champion: Measurement) -> Anchor:
    """The measured anchor if it can be compared, and otherwise the champion."""
    measured = evaluation.anchor
    if measured is None:
        return _of_champion(evaluation, champion, AnchorChoice(version=champion.name))
    if measured.fault:
        return Anchor(AnchorChoice(version=measured.name), False, None, None, fault=measured.fault)
    labels = _shared_labels(evaluation.candidate, measured.measurement)
    pairs = measured.comparison.within(labels) if measured.comparison else None
    if why := _why_incomparable(measured.difference, measured.test_overlap, pairs):
        return _of_champion(evaluation, champion, AnchorChoice(version=champion.name, former=measured.name, why=why))
    return Anchor(
        AnchorChoice(version=measured.name),
        False,
        measured.measurement,
        pairs,
        errors=_errors(measured.measurement, labels),
    )


def levels(anchor: Anchor, settings: GateSettings) -> tuple[float, float]:
    """Of `no_worse` and `no_worse_than_anchor`."""
    both = settings.significance * (1 - CLASSES_SHARE)
    of_anchor = 0.0 if anchor.is_champion else settings.significance * ANCHOR_SHARE
    return both - of_anchor, of_anchor


def no_worse_than_anchor_rule(anchor: Anchor, candidate: Measurement, settings: GateSettings) -> Rule | None:
    """None if nothing can be compared, in which case `no_worse` fails."""
    name, level = "no_worse_than_anchor", levels(anchor, settings)[1]
    if anchor.pairs is None or anchor.measurement is None:
        if anchor.is_champion:
            return None
        reason = (
            f"The anchor {anchor.choice.version} cannot be measured: {anchor.fault} {_MOVE} makes another release the "
            "anchor."
        )
        return Rule(name=name, passed=False, bound=level, reason=reason)
    pairs, budget = anchor.pairs, _budget(anchor, anchor.pairs, settings)
    used, right = pairs.independent.net_losses, pairs.queries - anchor.errors
    is_tested = not anchor.is_champion and pairs.least_p(right) <= level
    could_fail = is_tested or round(right * pairs.independent.queries / pairs.queries) > budget
    passed = used <= budget and (anchor.is_champion or pairs.p_worse > level)
    reasons = [_replaced(anchor)] if anchor.choice.former else []
    reasons += [] if could_fail else ["Too few images to tell whether the candidate is worse than the anchor."]
    reasons += [_tested(anchor.choice.version, anchor.measurement, pairs, level)] if is_tested else []
    reasons += [_spent(anchor, pairs, budget)]
    return Rule(
        name=name,
        passed=passed,
        could_fail=could_fail,
        candidate=float(used),
        bound=float(budget),
        reason=" ".join(reasons) + ("" if passed else _REMEDY),
    )


def smallest_detectable_loss(anchor: Anchor, pairs: PairedCounts, settings: GateSettings) -> float:
    """The smallest loss that at least one comparison detects with a probability of
    `POWER`, or 1 if none does. ``pairs`` is the comparison with the champion."""
    level, anchor_level = levels(anchor, settings)
    losses = [detectable_loss(pairs, level, POWER)]
    if anchor.pairs:
        losses.append(loss_beyond_budget(anchor.pairs, _budget(anchor, anchor.pairs, settings), POWER))
    if anchor.pairs and anchor_level:
        losses.append(detectable_loss(anchor.pairs, anchor_level, POWER))
    return min(losses)


def sensitivity(loss: float) -> str:
    stated = f"A loss of {100 * loss:.1f} points is detected" if loss < 1 else "No loss is detected"
    if loss <= MAX_UNDETECTED_LOSS:
        return f"{stated} with {POWER:.0%} probability."
    return (
        f"{stated} with {POWER:.0%} probability, and {100 * MAX_UNDETECTED_LOSS:g} points should be: the test split is "
        "too small to notice a smaller loss. Add labeled images, or compare the releases on images of your own."
    )


def _of_champion(evaluation: Evaluation, champion: Measurement, choice: AnchorChoice) -> Anchor:
    labels = _shared_labels(evaluation.candidate, champion)
    pairs = evaluation.comparison.within(labels) if evaluation.comparison else None
    return Anchor(choice, True, champion, pairs if pairs and pairs.queries else None, errors=_errors(champion, labels))


def _why_incomparable(difference: str, overlap: float | None, pairs: PairedCounts | None) -> str:
    """A sentence, or an empty string if the anchor can be compared."""
    if difference:
        return difference
    if overlap is None or not overlap >= TEST_OVERLAP_FLOOR:
        share = "none" if overlap is None else f"{overlap:.1%}"
        return f"The test split contains {share} of the images that it was tested on, below {TEST_OVERLAP_FLOOR:.0%}."
    if pairs is None or not pairs.queries:
        return "The test split contains no image of a class that it and the candidate know."
    return ""


def _replaced(anchor: Anchor) -> str:
    return (
        f"The champion takes the place of the anchor {anchor.choice.former}, which cannot be compared: "
        f"{anchor.choice.why}"
    )


def _tested(version: str, measurement: Measurement, pairs: PairedCounts, level: float) -> str:
    verb = "is not" if pairs.p_worse > level else "is"
    return (
        f"The candidate {verb} significantly worse than the anchor {version}, whose label right is "
        f"{measurement.label_right.value:.2%}: {pairs.changes()}, {pairs.p_in_words()}, level {level:g}."
    )


def _spent(anchor: Anchor, pairs: PairedCounts, budget: int) -> str:
    unit = "test image" if pairs.groups is None else "group of test images"
    units = "test images" if pairs.groups is None else "groups of test images"
    return (
        f"Against the anchor {anchor.choice.version}{', which is the champion,' if anchor.is_champion else ','} the "
        f"candidate uses {max(0, pairs.independent.net_losses):,} of a budget of "
        f"{quantity(budget, 'net loss', 'net losses')} on {quantity(pairs.independent.queries, unit, units)} "
        f"({pairs.changes()})."
    )


def _budget(anchor: Anchor, pairs: PairedCounts, settings: GateSettings) -> int:
    independent = pairs.independent.queries
    errors = round(anchor.errors * independent / max(1, pairs.queries))
    return net_loss_budget(errors, independent, settings.significance)


def _shared_labels(candidate: Measurement, earlier: Measurement | None) -> tuple[str, ...]:
    known = set(candidate.known_labels)
    return tuple(label for label in earlier.known_labels if label in known) if earlier else ()


def _errors(measurement: Measurement | None, labels: tuple[str, ...]) -> int:
    shares = measurement.class_label_right if measurement else {}
    return sum(shares[label].total - shares[label].count for label in labels if label in shares)
