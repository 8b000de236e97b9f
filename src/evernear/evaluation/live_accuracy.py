"""Accuracy in life: intervals from labeled live queries, and a test for a loss that may be repeated at every label.

The test compares the labels, in the order of their arrival, with the accuracy that the release was promoted with. Its
statistic is the likelihood ratio of an accuracy that is `LOSS` less (Wald 1945, Ann. Math. Stat. 16:117). If the
accuracy has not fallen, the ratio is a nonnegative supermartingale, so that it ever exceeds ``1 / level`` with a
probability of at most ``level``, however often one looks (Ville 1939).

A loss of ten points is found within 150 labels in 98% of cases at a promised accuracy of 97%, in 90% at 93%, in 80% at
88% and in 67% at 80% (1,000 simulations each).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.evaluation.statistics import Proportion, proportion

LOSS = 0.1
LEVEL = 0.02
"""Probability that a release without a loss is ever called worse."""


class LabeledQuery(Frozen):
    """A live query with the answer of the release ``version``, and its true label."""

    id: str
    at: AwareDatetime
    version: str
    pred: str
    unknown: bool
    label: str
    labeled_at: AwareDatetime

    @property
    def correct(self) -> bool:
        """Whether the prediction is correct, whether called unknown or not, as on the test split."""
        return self.pred == self.label


class LiveAccuracy(Frozen):
    """The accuracy of a release on its labeled live queries of one week."""

    version: str
    week: str
    """The ISO week of the queries, such as "2026-W07"."""
    accuracy: Proportion

    def __str__(self) -> str:
        return f"{self.week}: {self.accuracy} of {quantity(self.accuracy.total, 'label')}"


@dataclass(frozen=True)
class Assessment:
    """The accuracy of one release on all its labeled live queries, compared with its test split."""

    accuracy: Proportion
    promised: float | None
    """The lower end of the interval on the test split; None for a release that was archived without it."""
    loss_after: int | None
    """The number of labels after which the loss was significant; None if it is not."""

    @property
    def loss(self) -> float:
        """The difference from the promised accuracy; 0 if nothing is lost or promised."""
        return max(0.0, (self.promised or 0.0) - self.accuracy.value)

    def __str__(self) -> str:
        figures = f"Accuracy on {quantity(self.accuracy.total, 'labeled live query', 'labeled live queries')}"
        if self.loss_after is None:
            return f"{figures}: {self.accuracy}, not significantly less than on the test split."
        return (
            f"{figures}: {self.accuracy}. The loss is significant since label {self.loss_after:,}: at least"
            f" {self.promised:.2%} was measured on the test split."
        )


def assess(queries: Sequence[LabeledQuery], promised: float | None, confidence: float = 0.95) -> Assessment | None:
    """Compare the labels of one release, in the order of their arrival; None without labels."""
    if not queries:
        return None
    correct = [query.correct for query in queries]
    testable = promised if promised and promised < 1 else None
    return Assessment(
        accuracy=proportion(sum(correct), len(correct), confidence),
        promised=promised,
        loss_after=labels_until_loss(correct, testable) if testable else None,
    )


def accuracy_by_week(queries: Iterable[LabeledQuery], confidence: float = 0.95) -> list[LiveAccuracy]:
    """The accuracy of each release in each week, newest week first."""
    outcomes: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for query in queries:
        outcomes[_week(query.at), query.version].append(query.correct)
    return [
        LiveAccuracy(version=version, week=week, accuracy=proportion(sum(correct), len(correct), confidence))
        for (week, version), correct in sorted(outcomes.items(), reverse=True)
    ]


def labels_until_loss(correct: Sequence[bool] | NDArray[np.bool_], promised: float, level: float = LEVEL) -> int | None:
    """The number of labels after which a loss is significant; None if it is not.

    ``correct`` are the outcomes in the order in which their labels arrived. ``promised`` is the accuracy to compare
    with: the lower end of the interval of the test split, because the test does not know the uncertainty of a value.
    """
    if promised >= 1:
        raise ValueError("an accuracy of 1 is refuted by the first error")
    worse = promised - LOSS
    if worse <= 0 or not len(correct):
        return None
    gain, cost = math.log((1 - worse) / (1 - promised)), math.log(worse / promised)
    evidence = np.where(np.asarray(correct, np.bool_), cost, gain).cumsum()
    significant = np.flatnonzero(evidence >= -math.log(level))
    return int(significant[0]) + 1 if len(significant) else None


def _week(at: datetime) -> str:
    year, week, _ = at.isocalendar()
    return f"{year}-W{week:02}"
