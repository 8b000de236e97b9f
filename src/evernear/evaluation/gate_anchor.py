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

from evernear.evaluation import gate_sentences as sentences
from evernear.evaluation.compare import PairedCounts, detectable_loss, loss_beyond_budget, net_loss_budget
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_limits import ANCHOR_SHARE, CLASSES_SHARE, POWER, TEST_OVERLAP_FLOOR
from evernear.evaluation.measure import Measurement
from evernear.evaluation.verdict import AnchorChoice, Rule
from evernear.settings import GateSettings


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
        reason = sentences.anchor_not_measured(anchor.choice.version, anchor.fault)
        return Rule(name=name, passed=False, bound=level, reason=reason)
    pairs, budget = anchor.pairs, _budget(anchor, anchor.pairs, settings)
    used, right = pairs.independent.net_losses, pairs.queries - anchor.errors
    is_tested = not anchor.is_champion and pairs.least_p(right) <= level
    could_fail = is_tested or round(right * pairs.independent.queries / pairs.queries) > budget
    passed = used <= budget and (anchor.is_champion or pairs.p_worse > level)
    return Rule(
        name=name,
        passed=passed,
        could_fail=could_fail,
        candidate=float(used),
        bound=float(budget),
        reason=sentences.anchor(
            anchor.choice,
            pairs,
            right=right,
            queries=candidate.label_right.total,
            is_champion=anchor.is_champion,
            budget=budget,
            level=level,
            is_tested=is_tested,
            could_fail=could_fail,
            passed=passed,
        ),
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


def _of_champion(evaluation: Evaluation, champion: Measurement, choice: AnchorChoice) -> Anchor:
    labels = _shared_labels(evaluation.candidate, champion)
    pairs = evaluation.comparison.within(labels) if evaluation.comparison else None
    return Anchor(choice, True, champion, pairs if pairs and pairs.queries else None, errors=_errors(champion, labels))


def _why_incomparable(difference: str, overlap: float | None, pairs: PairedCounts | None) -> str:
    """A sentence, or an empty string if the anchor can be compared."""
    if difference:
        return difference
    if overlap is None or not overlap >= TEST_OVERLAP_FLOOR:
        return sentences.anchor_overlap(overlap)
    return "" if pairs and pairs.queries else sentences.NO_SHARED_IMAGES


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
