"""A paired test of whether the candidate is worse than the champion on the same queries."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.errors import IntegrityError
from evernear.evaluation.measure import Outcomes
from evernear.evaluation.statistics import Clusters, sign_flip_worse


class PairedCounts(Frozen):
    """A regression is a query that only the other system answers correctly, an earlier release or a
    baseline. An improvement is one that only the candidate does."""

    queries: int = Field(ge=0)
    regressions: int = Field(ge=0)
    improvements: int = Field(ge=0)
    groups: int | None = None
    """Number of groups among the queries, or None if the queries are independent."""
    nets: dict[int, int] = {}
    """Regressions minus improvements, keyed by group number, where not 0."""

    @property
    def p_worse(self) -> float:
        """Probability of at least this number of regressions if both systems are equally good."""
        if self.groups is None:
            return mcnemar_worse(self.regressions, self.improvements)
        return sign_flip_worse(self.nets.values())

    @property
    def p_better(self) -> float:
        """Probability of at least this number of improvements if both systems are equally good."""
        if self.groups is None:
            return mcnemar_worse(self.improvements, self.regressions)
        return sign_flip_worse(-net for net in self.nets.values())

    def least_p(self, right_before: int) -> float:
        """The smallest possible `p_worse` if the other system is right on ``right_before`` queries
        and the candidate on none. Groups in which the other system has no correct answer are not
        known, so the value may be too small for groups."""
        return 0.5 ** min(right_before, self.queries if self.groups is None else self.groups)

    @property
    def independent(self) -> "PairedCounts":
        """Counts for independent queries with about as much information. Each group counts as one
        query. The shares of regressions and improvements do not change."""
        if not self.groups:
            return self
        share = self.groups / max(1, self.queries)
        return PairedCounts(
            queries=self.groups,
            regressions=round(share * self.regressions),
            improvements=round(share * self.improvements),
        )

    @property
    def net_losses(self) -> int:
        return self.regressions - self.improvements

    def changes(self) -> str:
        improvements = quantity(self.improvements, "improvement")
        return f"{improvements} and {quantity(self.regressions, 'regression')}"

    def p_in_words(self, p: float | None = None) -> str:
        """``p`` defaults to `p_worse`. A very small p-value is not printed as 0."""
        p = self.p_worse if p is None else p
        return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


class Comparison(Frozen):
    """The comparison of the candidate with an earlier release, over all queries and within each
    class that has queries."""

    overall: PairedCounts
    classes: dict[str, PairedCounts]

    def within(self, labels: Iterable[str]) -> PairedCounts:
        """The sum of the counts for the classes in ``labels``."""
        chosen = [self.classes[label] for label in labels if label in self.classes]
        nets: Counter[int] = Counter()
        for pairs in chosen:  # a group may have images of several classes
            nets.update(pairs.nets)
        of_all = self.overall.groups
        return PairedCounts(
            queries=sum(pairs.queries for pairs in chosen),
            regressions=sum(pairs.regressions for pairs in chosen),
            improvements=sum(pairs.improvements for pairs in chosen),
            groups=None if of_all is None else min(of_all, sum(pairs.groups or 0 for pairs in chosen)),
            nets={group: net for group, net in sorted(nets.items()) if net},
        )


def mcnemar_worse(regressions: int, improvements: int) -> float:
    """p-value of the exact one-sided McNemar test (McNemar 1947, Psychometrika 12:153).

    Of the queries on which two equally good systems differ, the number of regressions has the
    distribution Binomial(n, 1/2). Unlike the mid-p test and the chi-squared test, the exact test
    never exceeds its level.
    """
    from scipy.special import bdtrc

    if regressions == 0:
        return 1.0
    return float(bdtrc(regressions - 1, regressions + improvements, 0.5))


def net_loss_budget(errors: int, queries: int, significance: float) -> int:
    """The number of net losses that a candidate may have against a system with ``errors`` on
    ``queries``.

    If two systems err independently and equally often, the net losses exceed the budget with a
    probability of about half of ``significance``. The error rate is assumed to be (errors + 1) /
    (queries + 2), because a result without errors may be luck.
    """
    from scipy.special import ndtri

    rate = (errors + 1) / (queries + 2)
    return math.floor(-float(ndtri(significance / 2)) * math.sqrt(2 * queries * rate * (1 - rate)))


def detectable_loss(pairs: PairedCounts, level: float, power: float = 0.9) -> float:
    """The smallest loss of right labels, between 0 and 1, that `mcnemar_worse` at ``level`` detects
    with probability ``power``. If no loss is detectable, the result is 1.

    The share of improvements is assumed to be (improvements + 1) / (queries + 2), because a result
    without improvements may be luck. A group counts as one query.
    """
    from scipy.special import ndtri

    pairs = pairs.independent

    def critical(differing: float) -> float:
        # includes the continuity correction of the exact test
        return -float(ndtri(level)) * math.sqrt(pairs.queries * differing) + 1

    return _smallest_loss(pairs, critical, power)


def loss_beyond_budget(pairs: PairedCounts, budget: int, power: float = 0.9) -> float:
    """The smallest loss of right labels for which the net losses exceed ``budget`` with probability
    ``power``, or 1 if no loss does. The assumptions are the same as in `detectable_loss`."""
    return _smallest_loss(pairs.independent, lambda _: budget + 0.5, power)


def _smallest_loss(pairs: PairedCounts, critical: Callable[[float], float], power: float) -> float:
    """The smallest loss of right labels for which the net losses exceed ``critical`` with
    probability ``power``, or 1 if no loss does. ``critical`` is a function of the share of queries
    on which the systems differ. The net losses are approximately normal (Connor 1987, Biometrics
    43:207)."""
    from scipy.optimize import root_scalar
    from scipy.special import ndtr

    gained = (pairs.improvements + 1) / (pairs.queries + 2)

    def excess(loss: float) -> float:
        differing = 2 * gained + loss
        deviation = math.sqrt(pairs.queries * (differing - loss**2))
        return float(ndtr((pairs.queries * loss - critical(differing)) / deviation)) - power

    largest = 1 - 2 * gained
    if largest <= 0 or excess(largest) < 0:
        return 1.0
    return float(root_scalar(excess, bracket=(0.0, largest), xtol=1e-5).root)


def compare(candidate: Outcomes, champion: Outcomes, labels: tuple[str, ...]) -> Comparison:
    """Compare two systems on the same queries. Label indices refer to ``labels``."""
    truth, groups = candidate.labels, candidate.groups
    if not np.array_equal(truth, champion.labels):
        raise IntegrityError("Candidate and champion were measured on different queries; run the evaluate step again.")
    changes = champion.correct.astype(np.int8) - candidate.correct
    by_class = _paired(changes, truth, groups)
    return Comparison(
        overall=_paired(changes, np.zeros_like(truth), groups).get(
            0, PairedCounts(queries=0, regressions=0, improvements=0)
        ),
        classes={label: by_class[number] for number, label in enumerate(labels) if number in by_class},
    )


def compare_refusals(candidate: Outcomes, champion: Outcomes, labels: tuple[str, ...]) -> Comparison:
    """As `compare`, where a regression is a query that only the candidate calls unknown."""
    named, named_before = (replace(system, correct=system.named) for system in (candidate, champion))
    return compare(named, named_before, labels)


def paired_counts(candidate: Outcomes, correct: NDArray[np.bool_]) -> PairedCounts:
    """Compare the candidate with a system on the same N queries, at least 1. ``correct`` (N,)
    states which of its answers are correct."""
    changes = correct.astype(np.int8) - candidate.correct
    return _paired(changes, np.zeros_like(candidate.labels), candidate.groups)[0]


def _paired(changes: NDArray[np.int8], strata: NDArray[np.int32], groups: Clusters | None) -> dict[int, PairedCounts]:
    """The counts for each stratum that has queries. A change is 1 for a regression and -1 for an
    improvement."""
    size = int(strata.max(initial=0)) + 1
    totals, lost, won = (
        np.bincount(chosen, minlength=size).tolist() for chosen in (strata, strata[changes > 0], strata[changes < 0])
    )
    numbers, nets = (None, {}) if groups is None else _nets(changes, strata, groups)
    return {
        stratum: PairedCounts(
            queries=total,
            regressions=lost[stratum],
            improvements=won[stratum],
            groups=numbers[stratum] if numbers else None,
            nets=nets.get(stratum, {}),
        )
        for stratum, total in enumerate(totals)
        if total
    }


def _nets(
    changes: NDArray[np.int8], strata: NDArray[np.int32], groups: Clusters
) -> tuple[list[int], dict[int, dict[int, int]]]:
    """The number of groups in each stratum, and their nonzero net changes, keyed by stratum."""
    pairs, rows = np.unique(np.stack([strata, groups]), axis=1, return_inverse=True)
    net = np.bincount(rows.ravel(), weights=changes).astype(np.int64)
    nets: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for (stratum, group), value in zip(pairs.T[net != 0].tolist(), net[net != 0].tolist(), strict=True):
        nets[stratum][group] = value
    return np.bincount(pairs[0]).tolist(), nets
