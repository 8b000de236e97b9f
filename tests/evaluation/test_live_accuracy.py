"""Accuracy in life: coverage of the intervals, power of the test for a loss, and its false alarms."""

from datetime import UTC, datetime

import numpy as np
import pytest

from evernear.evaluation.live_accuracy import LabeledQuery, accuracy_by_week, assess, expected_accuracy, is_loss
from evernear.evaluation.statistics import exact_proportion

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


@pytest.mark.parametrize("truth", [0.7, 0.85, 0.9, 0.95, 0.97, 0.99])
def test_interval_of_100_labels_covers_the_truth(truth: float) -> None:
    counts = np.random.default_rng(RNG_SEED).binomial(100, truth, 1000)
    intervals = [exact_proportion(int(count), 100, 0.95) for count in counts]
    assert np.mean([each.low <= truth <= each.high for each in intervals]) >= 0.93


@pytest.mark.parametrize(("expected", "power"), [(0.97, 0.95), (0.95, 0.9), (0.88, 0.75), (0.8, 0.6)])
@pytest.mark.parametrize("labels_before", [0, 3000])
def test_loss_of_ten_points_is_found_within_150_labels(expected: float, power: float, labels_before: int) -> None:
    rng = np.random.default_rng(RNG_SEED)
    months = np.repeat([0, 12], [labels_before, 150])
    accuracy = np.where(months == 0, expected, expected - 0.1) if labels_before else np.full(150, expected - 0.1)
    found = [is_loss(rng.random(len(months)) < accuracy, months, expected)[labels_before:].any() for _ in range(500)]
    assert np.mean(found) >= power - 0.1 * (labels_before > 0)


@pytest.mark.parametrize("expected", [0.7, 0.9, 0.97, 0.995])
def test_no_loss_is_seldom_called_one_in_any_month(expected: float) -> None:
    rng = np.random.default_rng(RNG_SEED)
    months = np.repeat(np.arange(12), 433)
    lost = [is_loss(rng.random(len(months)) < expected, months, expected) for _ in range(500)]
    monthly = np.array(lost).reshape(500, 12, 433).any(axis=2)
    assert monthly.mean(axis=0).max() <= 0.04, "2% are 10 with a standard deviation of 3.1"
    assert monthly.mean() <= 0.02


def test_loss_is_said_with_its_interval_and_what_was_expected() -> None:
    now = datetime(2027, 1, 4, tzinfo=UTC)
    worse = [labeled(now, "v", correct=number % 4 > 0) for number in range(100)]
    found = assess(worse, 0.931, now)
    assert found is not None
    assert found.loss == pytest.approx(0.181)
    assert "75.00% (65.34% to 83.12%). Since 2027-01-04, this is significantly less than the 93.1%" in str(found)
    equal = assess(worse, 0.74, now)
    assert equal is not None
    assert (equal.loss, equal.lost_at) == (0.0, None)
    assert "75.00% (65.34% to 83.12%), not significantly less" in str(equal)
    assert assess([], 0.9, now) is None
    for unknown in (None, 1.0):
        unexpected = assess(worse, unknown, now)
        assert unexpected is not None
        assert unexpected.lost_at is None


def test_assessment_is_of_this_month_and_the_one_before() -> None:
    bad, good = datetime(2026, 11, 30, tzinfo=UTC), datetime(2027, 1, 4, tzinfo=UTC)
    queries = [labeled(bad, "v", correct=False)] * 50 + [labeled(good, "v", correct=True)] * 10
    assert assess(queries[:50], 0.9, good) is None
    december, january = assess(queries, 0.9, datetime(2026, 12, 31, 23, tzinfo=UTC)), assess(queries, 0.9, good)
    assert december is not None
    assert january is not None
    assert december.lost_at == bad
    assert december.accuracy.total == 60
    assert january.accuracy.total == 10


def test_few_errors_are_no_loss() -> None:
    month = np.zeros(20, np.int_)
    assert not is_loss(np.array([False]), month[:1], 0.9).any()
    assert is_loss(np.zeros(20, np.bool_), month, 0.9).any()
    assert is_loss(np.zeros(20, np.bool_), month, 0.08).sum() == 0


def test_expected_accuracy_is_between_the_value_and_the_lower_end() -> None:
    assert expected_accuracy({"accuracy": 0.9, "accuracy_low": 0.8}) == pytest.approx(0.85)
    assert expected_accuracy({"accuracy": 0.9}) is None
