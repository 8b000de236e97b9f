"""Accuracy in life: coverage of the intervals, power of the test for a loss, and its false alarms."""

from datetime import UTC, datetime

import numpy as np
import pytest

from evernear.evaluation.live_accuracy import LabeledQuery, accuracy_by_week, assess, labels_until_loss
from evernear.evaluation.statistics import proportion

RNG_SEED = 7


def labeled(at: datetime, version: str, *, correct: bool) -> LabeledQuery:
    return LabeledQuery(
        id="1", at=at, version=version, pred="a", unknown=False, label="a" if correct else "b", labeled_at=at
    )


def test_accuracy_is_counted_by_release_and_iso_week() -> None:
    december, january = datetime(2026, 12, 31, tzinfo=UTC), datetime(2027, 1, 4, tzinfo=UTC)
    queries = [labeled(december, "old", correct=True), labeled(december, "new", correct=False)]
    queries += [labeled(january, "new", correct=number > 0) for number in range(4)]
    weeks = [(each.week, each.version, each.accuracy.count, each.accuracy.total) for each in accuracy_by_week(queries)]
    assert weeks == [("2027-W01", "new", 3, 4), ("2026-W53", "old", 1, 1), ("2026-W53", "new", 0, 1)]


@pytest.mark.parametrize("truth", [0.7, 0.85, 0.9, 0.95, 0.97])
def test_interval_of_100_labels_covers_the_truth(truth: float) -> None:
    counts = np.random.default_rng(RNG_SEED).binomial(100, truth, 1000)
    intervals = [proportion(int(count), 100, 0.95) for count in counts]
    assert np.mean([each.low <= truth <= each.high for each in intervals]) >= 0.93


@pytest.mark.parametrize(("promised", "power"), [(0.97, 0.95), (0.95, 0.9), (0.88, 0.75), (0.8, 0.6)])
def test_loss_of_ten_points_is_found_within_150_labels(promised: float, power: float) -> None:
    outcomes = np.random.default_rng(RNG_SEED).random((500, 150)) < promised - 0.1
    assert np.mean([labels_until_loss(row, promised) is not None for row in outcomes]) >= power


@pytest.mark.parametrize("promised", [0.7, 0.9, 0.97, 0.995])
def test_no_loss_is_seldom_called_one_at_any_of_2000_labels(promised: float) -> None:
    outcomes = np.random.default_rng(RNG_SEED).random((1000, 2000)) < promised
    alarms = sum(labels_until_loss(row, promised) is not None for row in outcomes)
    assert alarms <= 30, "2% are 20 with a standard deviation of 4.4"


def test_loss_is_said_with_its_interval_and_what_was_promised() -> None:
    now = datetime(2027, 1, 4, tzinfo=UTC)
    worse = [labeled(now, "v", correct=number % 4 > 0) for number in range(100)]
    found = assess(worse, 0.931)
    assert found is not None
    assert found.loss == pytest.approx(0.181)
    assert found.loss_after is not None
    assert f"The loss is significant since label {found.loss_after}: at least 93.10% was measured" in str(found)
    equal = assess(worse, 0.74)
    assert equal is not None
    assert (equal.loss, equal.loss_after) == (0.0, None)
    assert "75.00% (65.70% to 82.45%), not significantly less" in str(equal)
    assert assess([], 0.9) is None
    for unknown in (None, 1.0):
        unpromised = assess(worse, unknown)
        assert unpromised is not None
        assert unpromised.loss_after is None


def test_few_errors_at_a_high_accuracy_are_no_loss_and_no_labels_are_none() -> None:
    assert labels_until_loss([], 0.9) is None
    assert labels_until_loss([False], 0.9) is None
    assert labels_until_loss([False] * 20, 0.9) is not None
    with pytest.raises(ValueError, match="accuracy of 1"):
        labels_until_loss([False], 1.0)
