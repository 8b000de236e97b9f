"""Accuracy in life: intervals from labeled live queries, and a test for a loss that may be repeated at every label.

The test compares the labels, in the order of their arrival, with the accuracy on the test split. Its statistic is the
likelihood ratio of an accuracy that is `LOSS` less (Wald 1945, Ann. Math. Stat. 16:117). While the accuracy has not
fallen, the ratio is a nonnegative supermartingale, so that it ever exceeds ``1 / level`` with a probability of at most
``level``, however often one looks (Ville 1939).

The ratio since the release would need ever more labels to see a loss that comes later. It is therefore averaged with
the ratio since the beginning of the month, which has an expectation of at most 1 at that time. The level is spent anew
each month.

`expected_accuracy` allows for the test split's own uncertainty. ``benchmarks/live_accuracy.py`` measures coverage,
power and false alarms.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.evaluation.statistics import Proportion, exact_proportion

LOSS = 0.1
LEVEL = 0.02
"""Probability that a release without a loss is called worse in a month."""


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
    """The accuracy of one release on its live queries that were labeled in this month and the one before."""

    accuracy: Proportion
    expected: float | None
    """The accuracy to expect; None if the release was archived without it."""
    lost_at: datetime | None
    """The arrival of the label with which the loss was significant; None if it was not."""

    @property
    def loss(self) -> float:
        """The difference from the expected accuracy; 0 if nothing is lost or expected."""
        return max(0.0, (self.expected or 0.0) - self.accuracy.value)

    def __str__(self) -> str:
        figures = f"Accuracy on {quantity(self.accuracy.total, 'labeled live query', 'labeled live queries')}"
        if self.lost_at is None:
            return f"{figures}: {self.accuracy}, not significantly less than on the test split."
        return (
            f"{figures}: {self.accuracy}. Since {self.lost_at:%Y-%m-%d}, this is significantly less than the"
            f" {self.expected:.1%} that the test split lets expect."
        )


def assess(
    queries: Sequence[LabeledQuery], expected: float | None, now: datetime, confidence: float = 0.95
) -> Assessment | None:
    """Compare the labels of one release, in the order of their arrival; None without recent ones."""
    months = np.array([_month(query.labeled_at) for query in queries])
    recent = months >= _month(now) - 1
    if not recent.any():
        return None
    correct = np.array([query.correct for query in queries])
    lost = recent & is_loss(correct, months, expected) if expected and expected < 1 else np.zeros(len(recent), np.bool_)
    return Assessment(
        accuracy=exact_proportion(int(correct[recent].sum()), int(recent.sum()), confidence),
        expected=expected,
        lost_at=queries[int(lost.argmax())].labeled_at if lost.any() else None,
    )


def expected_accuracy(metrics: Mapping[str, float]) -> float | None:
    """The accuracy to expect in life: halfway from the value on the test split to the lower end of its interval.

    The value itself is as often too high as too low, and the lower end would hide losses. None without an interval.
    """
    value, low = metrics.get("accuracy"), metrics.get("accuracy_low")
    return None if value is None or low is None else (value + low) / 2


def accuracy_by_week(queries: Iterable[LabeledQuery], confidence: float = 0.95) -> list[LiveAccuracy]:
    """The accuracy of each release in each week, newest week first."""
    outcomes: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for query in queries:
        outcomes[_week(query.at), query.version].append(query.correct)
    return [
        LiveAccuracy(version=version, week=week, accuracy=exact_proportion(sum(correct), len(correct), confidence))
        for (week, version), correct in sorted(outcomes.items(), reverse=True)
    ]


def is_loss(
    correct: NDArray[np.bool_], months: NDArray[np.int_], expected: float, level: float = LEVEL
) -> NDArray[np.bool_]:
    """With which labels a loss is significant (N,).

    ``correct`` (N,) and ``months`` (N,), in ascending order, are in the order in which the labels arrived. ``expected``
    is more than 0 and less than 1.
    """
    lower = max(expected - LOSS, expected / 2)
    gain, cost = math.log((1 - lower) / (1 - expected)), math.log(lower / expected)
    since_release = np.where(correct, cost, gain).cumsum()
    first_of_month = np.searchsorted(months, months)
    before_month = np.concatenate([[0.0], since_release])[first_of_month]
    mean = np.logaddexp(since_release, since_release - before_month) - math.log(2)
    return mean >= -math.log(level)


def _month(at: datetime) -> int:
    """The number of the month, in UTC."""
    at = at.astimezone(UTC)
    return 12 * at.year + at.month


def _week(at: datetime) -> str:
    year, week, _ = at.isocalendar()
    return f"{year}-W{week:02}"
