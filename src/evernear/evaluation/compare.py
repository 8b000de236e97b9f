"""Paired test: whether the candidate is worse than the champion on the same queries."""

import math
from collections.abc import Callable, Iterable

import numpy as np
from pydantic import Field

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.errors import IntegrityError
from evernear.evaluation.measure import Outcomes


class PairedCounts(Frozen):
    """Counts of queries that one system answers correctly and the other, champion or baseline, does not.

    Queries that both or neither answer correctly carry no information about which is better.
    """

    queries: int = Field(ge=0)
    regressions: int = Field(ge=0)
    """Queries that only the other system answers correctly."""
    improvements: int = Field(ge=0)
    """Queries that only the candidate answers correctly."""

    @property
    def p_worse(self) -> float:
        """Probability of at least this number of regressions if both are equally good; see `mcnemar_worse`."""
        return mcnemar_worse(self.regressions, self.improvements)

    @property
    def p_better(self) -> float:
        """Probability of at least this number of improvements if both are equally good."""
        return mcnemar_worse(self.improvements, self.regressions)

    @property
    def net_losses(self) -> int:
        """Regressions minus improvements; negative for a candidate that gained queries."""
        return self.regressions - self.improvements

    def changes(self) -> str:
        """Both counts in words."""
        improvements = quantity(self.improvements, "improvement")
        return f"{improvements} and {quantity(self.regressions, 'regression')}"

    def p_in_words(self, p: float | None = None) -> str:
        """``p`` (default: `p_worse`) in words; a tiny one is not printed as 0."""
        p = self.p_worse if p is None else p
        return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


class Comparison(Frozen):
    """Candidate against champion, over all queries and within each class that has queries."""

    overall: PairedCounts
    classes: dict[str, PairedCounts]

    def within(self, labels: Iterable[str]) -> PairedCounts:
        """The sum over the classes ``labels``."""
        chosen = [self.classes[label] for label in labels if label in self.classes]
        return PairedCounts(
            queries=sum(pairs.queries for pairs in chosen),
            regressions=sum(pairs.regressions for pairs in chosen),
            improvements=sum(pairs.improvements for pairs in chosen),
        )


def mcnemar_worse(regressions: int, improvements: int) -> float:
    """p-value of the exact one-sided McNemar test (McNemar 1947, Psychometrika 12:153).

    Where two equally good systems differ, each is correct with probability 1/2. The number of regressions among the
    n = ``regressions + improvements`` such queries is therefore Binomial(n, 1/2), and p is the probability of at least
    this number. Unlike the mid-p and chi-squared forms, the exact test never exceeds its level, for any number of
    queries.
    """
    from scipy.special import bdtrc

    if regressions == 0:
        return 1.0
    return float(bdtrc(regressions - 1, regressions + improvements, 0.5))


def net_loss_budget(errors: int, queries: int, significance: float) -> int:
    """The net losses that a candidate may have against a system with ``errors`` on ``queries``.

    Two systems that err independently, both at this rate, exceed it with a probability of about half of
    ``significance``. Retrainings repeat most of each other's errors, so they exceed it less often. The error rate is
    assumed to be (errors + 1) / (queries + 2), because observing none may be luck.
    """
    from scipy.special import ndtri

    rate = (errors + 1) / (queries + 2)
    return math.floor(-float(ndtri(significance / 2)) * math.sqrt(2 * queries * rate * (1 - rate)))


def detectable_loss(pairs: PairedCounts, level: float, power: float = 0.9) -> float:
    """The smallest loss of accuracy that `mcnemar_worse` at ``level`` detects with probability ``power``: 0 to 1.

    The share of improvements is assumed to be (improvements + 1) / (queries + 2), because observing none may be luck.
    The result is 1 if the test detects no loss that often.
    """
    from scipy.special import ndtri

    def critical(differing: float) -> float:
        # With the continuity correction of the exact test.
        return -float(ndtri(level)) * math.sqrt(pairs.queries * differing) + 1

    return _smallest_loss(pairs, critical, power)


def loss_beyond_budget(pairs: PairedCounts, budget: int, power: float = 0.9) -> float:
    """The smallest loss of accuracy with which the net losses exceed ``budget`` with probability ``power``.

    As `detectable_loss`; 1 if no loss does.
    """
    return _smallest_loss(pairs, lambda _: budget + 0.5, power)


def _smallest_loss(pairs: PairedCounts, critical: Callable[[float], float], power: float) -> float:
    """The smallest loss with which the net losses exceed ``critical`` with probability ``power``, else 1.

    ``critical`` is a function of the share of queries on which the systems differ. The net losses are approximately
    normal (Connor 1987, Biometrics 43:207).
    """
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
    """Compare two outcomes of the same queries. Their label indices index ``labels``.

    Raises:
        IntegrityError: the queries differ.
    """
    truth = candidate.labels
    if not np.array_equal(truth, champion.labels):
        raise IntegrityError("Candidate and champion were measured on different queries; run the evaluate step again.")
    regressed, improved = champion.correct & ~candidate.correct, candidate.correct & ~champion.correct
    totals, lost, won = (
        np.bincount(numbers, minlength=len(labels)).tolist() for numbers in (truth, truth[regressed], truth[improved])
    )
    return Comparison(
        overall=PairedCounts(queries=len(truth), regressions=int(regressed.sum()), improvements=int(improved.sum())),
        classes={
            label: PairedCounts(queries=total, regressions=regressions, improvements=improvements)
            for label, total, regressions, improvements in zip(labels, totals, lost, won, strict=True)
            if total
        },
    )
