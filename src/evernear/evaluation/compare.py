"""Paired test: whether the candidate is worse than the champion on the same queries."""

import math
from collections.abc import Iterable

import numpy as np
from pydantic import Field

from evernear.common.frozen import Frozen
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


def detectable_loss(pairs: PairedCounts, level: float, power: float = 0.9) -> float:
    """The smallest loss of accuracy that `mcnemar_worse` at ``level`` detects with probability ``power``: 0 to 1.

    The share of improvements is assumed to be (improvements + 1) / (queries + 2), because observing none may be luck.
    The result is 1 if the test detects no loss that often.
    """
    from scipy.optimize import root_scalar

    gained = (pairs.improvements + 1) / (pairs.queries + 2)
    largest = 1 - 2 * gained
    if largest <= 0 or _power(pairs.queries, gained, largest, level) < power:
        return 1.0
    excess = lambda loss: _power(pairs.queries, gained, loss, level) - power  # noqa: E731
    return float(root_scalar(excess, bracket=(0.0, largest), xtol=1e-5).root)


def _power(queries: int, gained: float, loss: float, level: float) -> float:
    """The probability of detecting a ``loss`` if a share ``gained`` of the queries improves.

    The normal approximation of Connor (1987, Biometrics 43:207), with the continuity correction of the exact test.
    """
    from scipy.special import ndtr, ndtri

    differing, counts = 2 * gained + loss, queries
    critical = -ndtri(level) * math.sqrt(counts * differing) + 1
    return float(ndtr((counts * loss - critical) / math.sqrt(counts * (differing - loss**2))))


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
