"""Estimate live accuracy with confidence intervals from labeled live queries, and test for a loss.

The labels for a release are tested in blocks of fixed size, in the order in which they arrive: does
the block contain more wrong predictions than the accuracy on the test split explains? Their number
never decreases, so each label may be checked on arrival, and the test is as powerful as a single
check of the complete block (curtailed inspection; Girshick, Mosteller and Savage 1946, Ann Math
Stat 17:13). A test without a fixed end needs more labels to detect the same loss. The limit is a
quantile of the beta-binomial distribution, which accounts for the size of the test split.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime

from evernear.common.frozen import Document, Frozen
from evernear.evaluation.headline import AnswerCounts
from evernear.evaluation.statistics import CONFIDENCE, Proportion, deviations, exact_proportion

LEVEL = 0.02
"""Probability that the test reports a loss in a given month although the release has no loss."""
BLOCK = 150
"""Number of labels in the first block of a month. Each later block has twice the size of the
previous one."""
_LATER = 1 / 8
"""Ratio of a block's level to that of the previous block. All blocks in a month together use up
`LEVEL`."""
_PARTS = ((1.0, 0.8), (1 / 3, 0.15), (0.1, 0.05))
"""Fractions of a block that have separate limits, with their shares of its level. The early limits
detect a severe loss sooner."""


LIVE_QUERIES = ("labeled live query", "labeled live queries")


class LabeledQuery(Document):
    """A live query with its true label and the prediction of the release ``version``."""

    id: str
    at: AwareDatetime
    version: str
    pred: str
    unknown: bool
    dist: float
    log: str
    """The key of the log file with the query's image, which is deleted after some time. Empty if
    the query was logged without its image."""
    label: str
    labeled_at: AwareDatetime
    first_label: str = ""
    """The label before a user who saw the answer corrected or kept it. Empty if nobody did."""

    @property
    def label_right(self) -> bool:
        """As on the test split, a right label also counts if the query is called unknown."""
        return self.pred == self.label

    @property
    def is_corrected(self) -> bool:
        return self.first_label not in ("", self.label)


class LiveAccuracy(Frozen):
    version: str
    week: str
    """The ISO week in which the queries arrived, such as "2026-W07"."""
    answers: AnswerCounts
    label_right: Proportion
    corrected: AnswerCounts | None = None
    """The answers to queries whose label a user corrected with the answer in view."""

    @property
    def counts(self) -> str:
        """The answers in words, also without the queries whose label was corrected."""
        others = self.answers.without(self.corrected)
        without = f"; without the corrected labels, {others.sentence(*LIVE_QUERIES)}" if others else ""
        return f"{self.answers.sentence(*LIVE_QUERIES)}{without}"

    def __str__(self) -> str:
        return f"{self.week}: {self.counts}; label right {self.label_right}"


@dataclass(frozen=True)
class ExpectedAccuracy:
    value: float
    images: float
    """Effective number of independent images in the test split."""


@dataclass(frozen=True)
class Assessment:
    """The answers of one release to the live queries that were labeled in the current or previous
    month."""

    answers: AnswerCounts
    label_right: Proportion
    expected: float | None
    """Label right on the test split, or None if the archived release does not contain it."""
    lost_at: datetime | None
    """When the label arrived with which the loss became significant, or None if it is not."""
    can_tell: bool
    """Whether a loss could be significant if all answers were wrong."""

    @property
    def loss(self) -> float:
        """The decrease from the expected share of right labels, at least 0, and 0 if none is
        known."""
        return max(0.0, (self.expected or 0.0) - self.label_right.value)

    def __str__(self) -> str:
        counts = self.answers.sentence(*LIVE_QUERIES)
        figures = f"{counts[0].upper()}{counts[1:]}. Label right is {self.label_right}"
        if self.expected is None:
            return f"{figures}. On the test split, it is unknown."
        if self.lost_at is None:
            finding = "not significantly less than" if self.can_tell else "too few labels to compare it with"
            return f"{figures}, {finding} the {self.expected:.1%} on the test split."
        return (
            f"{figures}. Since {self.lost_at:%Y-%m-%d}, this is significantly less than the"
            f" {self.expected:.1%} on the test split."
        )


def assess(queries: Sequence[LabeledQuery], expected: ExpectedAccuracy | None, now: datetime) -> Assessment | None:
    """Compare the labels for one release, in order of arrival, with the expected share of right
    labels. Return None without recent labels."""
    months = np.array([_month(query.labeled_at) for query in queries])
    recent = months >= _month(now) - 1
    if not recent.any():
        return None
    correct = np.array([query.label_right for query in queries])
    nothing = np.zeros(len(recent), np.bool_)
    lost = recent & is_loss(correct, months, expected) if expected else nothing
    return Assessment(
        answers=_count([query for query, is_recent in zip(queries, recent, strict=True) if is_recent]),
        label_right=exact_proportion(int(correct[recent].sum()), int(recent.sum()), CONFIDENCE),
        expected=expected.value if expected else None,
        lost_at=queries[int(lost.argmax())].labeled_at if lost.any() else None,
        can_tell=expected is not None and bool(is_loss(nothing, months, expected).any()),
    )


def expected_accuracy(metrics: Mapping[str, float]) -> ExpectedAccuracy | None:
    """Label right on the test split, or None if ``metrics`` do not contain its confidence
    interval. The effective number of images is computed from it with Wilson's formula."""
    value, low = metrics.get("label_right"), metrics.get("label_right_low")
    if value is None or low is None or not low < value:
        return None
    images = deviations(CONFIDENCE) ** 2 * low * (1 - low) / (value - low) ** 2
    return ExpectedAccuracy(value, images)


def accuracy_by_week(queries: Iterable[LabeledQuery]) -> list[LiveAccuracy]:
    """Newest week first."""
    weeks: defaultdict[tuple[str, str], list[LabeledQuery]] = defaultdict(list)
    for query in queries:
        weeks[_week(query.at), query.version].append(query)
    return [
        LiveAccuracy(
            version=version,
            week=week,
            answers=_count(answered),
            label_right=exact_proportion(sum(query.label_right for query in answered), len(answered), CONFIDENCE),
            corrected=_count(corrected) if (corrected := [each for each in answered if each.is_corrected]) else None,
        )
        for (week, version), answered in sorted(weeks.items(), reverse=True)
    ]


def _count(queries: Sequence[LabeledQuery]) -> AnswerCounts:
    unknown = sum(query.unknown for query in queries)
    right = sum(query.label_right and not query.unknown for query in queries)
    return AnswerCounts(named_right=right, named_wrong=len(queries) - right - unknown, called_unknown=unknown)


def is_loss(correct: NDArray[np.bool_], months: NDArray[np.int_], expected: ExpectedAccuracy) -> NDArray[np.bool_]:
    """For each label, whether the loss is significant after it (N,). ``correct`` (N,) and
    ``months`` (N,) are in order of arrival, so ``months`` is ascending."""
    lost = np.zeros(len(correct), np.bool_)
    for start, end, size, level in _blocks(months):
        wrong = (~correct[start:end]).cumsum()
        for share, spent in _PARTS:
            labels = round(share * size)
            too_many = wrong[:labels] > _limit(expected, labels, spent * level)
            lost[start : start + len(too_many)] |= too_many
    return lost


def _blocks(months: NDArray[np.int_]) -> Iterator[tuple[int, int, int, float]]:
    """Yield the start, the end, the full size and the level of each block. A block ends when it
    reaches its full size or, with at least `BLOCK` labels, at the end of a month."""
    start, size, level = 0, BLOCK, LEVEL * (1 - _LATER)
    while start < len(months):
        next_month = int(np.searchsorted(months, months[start], side="right"))
        end = min(start + size, max(start + BLOCK, next_month), len(months))
        yield start, end, size, level
        is_same_month = end < next_month
        size, level = (2 * size, _LATER * level) if is_same_month else (BLOCK, LEVEL * (1 - _LATER))
        start = end


@lru_cache
def _limit(expected: ExpectedAccuracy, labels: int, level: float) -> int:
    """The largest number of wrong predictions among ``labels`` queries that the test split explains
    with a probability of more than ``level``."""
    from scipy.stats import betabinom

    right = expected.value * expected.images
    return int(betabinom.isf(level, labels, expected.images - right + 0.5, right + 0.5))  # Jeffreys' prior


def _month(at: datetime) -> int:
    at = at.astimezone(UTC)
    return 12 * at.year + at.month


def _week(at: datetime) -> str:
    year, week, _ = at.isocalendar()
    return f"{year}-W{week:02}"
