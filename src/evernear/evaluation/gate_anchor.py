"""The gate's rules for the anchor, a fixed earlier release. The rules limit the sum of
small losses.

Every candidate is compared with the champion. A promoted candidate may have a loss that
is too small to detect. The next candidate may lose as much again. The anchor does not
move with the champion, so the losses against the anchor accumulate until a rule fails.
The anchor and the candidate are measured in the same run on the same images.

The first release that is promoted in a store becomes the anchor. The anchor remains the
same until a user chooses a different anchor (`evernear registry anchor`), or until the
anchor can no longer be compared with the candidate. An anchor can no longer be compared
if it takes images of a different shape, if fewer than ``gate.test_overlap_floor`` of
its test images are left, or if none of its classes are left. The champion then becomes
the anchor, and the reason of the rule states the change. If the anchor is damaged or
lost, the rule fails instead, because a fault must not weaken the gate.

Paired test (`no_worse_than_anchor`)
    The same test as in `no_worse`, on the classes that both the anchor and the
    candidate know. This test and `no_worse` use the same share of
    ``gate.significance``. If the champion is the anchor, `no_worse` uses both shares.

Budget (`anchor_budget`)
    On a small test split, no test can detect a loss of several percentage points. The
    regressions minus the improvements must therefore not exceed a budget, which depends
    only on the size of the test split and the number of the anchor's errors
    (`evernear.evaluation.compare.net_loss_budget`).

Sensitivity (`detectable_loss`)
    The smallest loss that at least one of these rules detects with a probability of
    90%. If this loss is above ``gate.max_undetected_loss``, the verdict states the
    loss. With ``gate.on_undetected_loss = hold``, the rule also fails. Runs that the
    watcher starts use this setting.

The shares, the budget and the bound were chosen by simulation
(docs/decisions/0027-the-anchor.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from evernear.common.output import quantity
from evernear.evaluation.compare import PairedCounts, detectable_loss, loss_beyond_budget, net_loss_budget
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.measure import Measurement
from evernear.evaluation.verdict import AnchorChoice, Rule
from evernear.settings import GateSettings

CLASSES_SHARE = 0.2
"""Share of ``gate.significance`` that `class_recall_drop` uses."""
ANCHOR_SHARE = 0.4
"""Share of ``gate.significance`` that `no_worse_than_anchor` uses. `no_worse` spends
the remaining share.
"""
POWER = 0.9
"""Probability with which the loss that a verdict states is detected."""
_MOVE = "`evernear registry anchor VERSION --why REASON`"
_REMEDY = f" If this accuracy is intended, promote the release and make it the anchor with {_MOVE}."


@dataclass(frozen=True)
class Anchor:
    """The anchor and its comparison with the candidate."""

    choice: AnchorChoice
    is_champion: bool
    measurement: Measurement | None
    pairs: PairedCounts | None
    """The comparison on the classes that both releases know. None if ``fault`` is set,
    or if the candidate was not compared with the champion.
    """
    errors: int = 0
    """Number of the anchor's errors on the compared queries."""
    fault: str = ""
    """The reason why the anchor cannot be measured, as a sentence."""


def choose_anchor(evaluation: Evaluation, champion: Measurement, settings: GateSettings) -> Anchor:
    """The anchor of an evaluation.

    Return the measured anchor if it can be compared, and otherwise the champion.
    """
    measured = evaluation.anchor
    if measured is None:
        return _of_champion(evaluation, champion, AnchorChoice(version=champion.name))
    if measured.fault:
        return Anchor(AnchorChoice(version=measured.name), False, None, None, fault=measured.fault)
    labels = _shared_labels(evaluation.candidate, measured.measurement)
    pairs = measured.comparison.within(labels) if measured.comparison else None
    if why := _why_incomparable(measured.difference, measured.test_overlap, pairs, settings):
        return _of_champion(evaluation, champion, AnchorChoice(version=champion.name, former=measured.name, why=why))
    return Anchor(
        AnchorChoice(version=measured.name),
        False,
        measured.measurement,
        pairs,
        errors=_errors(measured.measurement, labels),
    )


def levels(anchor: Anchor, settings: GateSettings) -> tuple[float, float]:
    """The significance levels of `no_worse` and `no_worse_than_anchor`."""
    both = settings.significance * (1 - CLASSES_SHARE)
    of_anchor = 0.0 if anchor.is_champion else settings.significance * ANCHOR_SHARE
    return both - of_anchor, of_anchor


def anchor_rules(anchor: Anchor, candidate: Measurement, settings: GateSettings) -> Iterator[Rule]:
    """The rules that compare the candidate with the anchor."""
    if not anchor.is_champion:
        yield _no_worse_than_anchor(anchor, candidate, settings)
    if anchor.pairs:
        yield _anchor_budget(anchor, anchor.pairs, settings)


def smallest_detectable_loss(anchor: Anchor, pairs: PairedCounts, settings: GateSettings) -> float:
    """The smallest loss of accuracy that at least one comparison detects with a
    probability of `POWER`.

    ``pairs`` is the comparison with the champion.
    The result is 1 if no comparison detects any loss.
    """
    level, anchor_level = levels(anchor, settings)
    losses = [detectable_loss(pairs, level, POWER)]
    if anchor.pairs:
        losses.append(loss_beyond_budget(anchor.pairs, _budget(anchor, anchor.pairs, settings), POWER))
    if anchor.pairs and anchor_level:
        losses.append(detectable_loss(anchor.pairs, anchor_level, POWER))
    return min(losses)


def detectable_loss_rule(loss: float, settings: GateSettings) -> Rule:
    """The rule for the smallest loss that the gate can detect."""
    bound = settings.max_undetected_loss
    is_small = loss <= bound
    stated = f"A loss of {100 * loss:.1f} points is detected" if loss < 1 else "No loss is detected"
    reason = f"{stated} with {POWER:.0%} probability"
    if is_small:
        reason += "."
    else:
        reason += (
            f", and gate.max_undetected_loss allows {100 * bound:g} points: the test split is too small to notice a "
            "smaller loss. Add labeled images, or compare the releases on images of your own."
        )
    passed = is_small or settings.on_undetected_loss == "warn"
    if not passed:
        reason += " The run promotes nothing without a person (gate.on_undetected_loss = hold)."
    setting = "" if passed else f"gate.max_undetected_loss={math.ceil(loss * 100) / 100:g}"
    return Rule(name="detectable_loss", passed=passed, candidate=loss, bound=bound, reason=reason, setting=setting)


def _of_champion(evaluation: Evaluation, champion: Measurement, choice: AnchorChoice) -> Anchor:
    labels = _shared_labels(evaluation.candidate, champion)
    pairs = evaluation.comparison.within(labels) if evaluation.comparison else None
    return Anchor(choice, True, champion, pairs if pairs and pairs.queries else None, errors=_errors(champion, labels))


def _why_incomparable(
    difference: str, overlap: float | None, pairs: PairedCounts | None, settings: GateSettings
) -> str:
    """The reason why the anchor cannot be compared, as a sentence, or an empty string
    if the anchor can be compared.
    """
    if difference:
        return difference
    if overlap is None or not overlap >= settings.test_overlap_floor:
        share = "none" if overlap is None else f"{overlap:.1%}"
        return (
            f"The test split contains {share} of the images that it was tested on, below "
            f"{settings.test_overlap_floor:.0%}."
        )
    if pairs is None or not pairs.queries:
        return "The test split contains no image of a class that it and the candidate know."
    return ""


def _no_worse_than_anchor(anchor: Anchor, candidate: Measurement, settings: GateSettings) -> Rule:
    name, level, version = "no_worse_than_anchor", levels(anchor, settings)[1], anchor.choice.version
    if anchor.pairs is None or anchor.measurement is None:
        reason = f"The anchor {version} cannot be measured: {anchor.fault} {_MOVE} makes another release the anchor."
        return Rule(name=name, passed=False, bound=level, reason=reason)
    p_worse = anchor.pairs.p_worse
    passed = p_worse > level
    reason = (
        f"The candidate is {'not ' if passed else ''}significantly worse than the anchor {version}, whose accuracy is "
        f"{anchor.measurement.accuracy.value:.2%}: {anchor.pairs.changes()}, {anchor.pairs.p_in_words()}, level "
        f"{level:g}."
    )
    if not passed:
        reason += _REMEDY
    return Rule(name=name, passed=passed, candidate=candidate.accuracy.value, bound=level, reason=reason)


def _anchor_budget(anchor: Anchor, pairs: PairedCounts, settings: GateSettings) -> Rule:
    budget, used = _budget(anchor, pairs, settings), pairs.independent.net_losses
    passed = used <= budget
    unit = "test image" if pairs.groups is None else "group of test images"
    units = "test images" if pairs.groups is None else "groups of test images"
    reason = (
        f"Against the anchor {anchor.choice.version}{', which is the champion,' if anchor.is_champion else ','} the "
        f"candidate uses {max(0, used):,} of a budget of {quantity(budget, 'net loss', 'net losses')} on "
        f"{quantity(pairs.independent.queries, unit, units)} ({pairs.changes()})."
    )
    if anchor.choice.former:
        reason = (
            f"The champion takes the place of the anchor {anchor.choice.former}, which cannot be compared: "
            f"{anchor.choice.why} {reason}"
        )
    if not passed:
        reason += _REMEDY
    return Rule(name="anchor_budget", passed=passed, candidate=float(used), bound=float(budget), reason=reason)


def _budget(anchor: Anchor, pairs: PairedCounts, settings: GateSettings) -> int:
    independent = pairs.independent.queries
    errors = round(anchor.errors * independent / max(1, pairs.queries))
    return net_loss_budget(errors, independent, settings.significance)


def _shared_labels(candidate: Measurement, earlier: Measurement | None) -> tuple[str, ...]:
    known = set(candidate.known_labels)
    return tuple(label for label in earlier.known_labels if label in known) if earlier else ()


def _errors(measurement: Measurement | None, labels: tuple[str, ...]) -> int:
    recalls = measurement.class_recall if measurement else {}
    return sum(recalls[label].total - recalls[label].count for label in labels if label in recalls)
