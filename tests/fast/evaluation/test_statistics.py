import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import binom, binomtest

from evernear.evaluation.statistics import (
    ROC_POINTS,
    TRANSFER_DEVIATION,
    Auroc,
    Placements,
    auroc_interval,
    effective_totals,
    expected_share,
    false_accepts_at,
    place,
    proportion,
    roc,
)

GRID = st.integers(0, 8).map(lambda step: step / 4)
DISTANCES = st.lists(GRID, min_size=1, max_size=25).map(lambda values: np.array(values, np.float32))


@given(total=st.integers(1, 20_000), part=st.floats(0, 1))
def test_proportion_has_the_wilson_interval(total, part):
    count = round(total * part)
    result = proportion(count, total, 0.95)
    interval = binomtest(count, total).proportion_ci(0.95, method="wilson")
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert 0 <= result.low <= result.value <= result.high <= 1


def auroc(known: np.ndarray, unknown: np.ndarray) -> Auroc:
    """The area for independent images, with an interval of 95%."""
    value, low, high = auroc_interval(place(known, unknown), len(known), len(unknown), 0.95)
    return Auroc(value=value, low=low, high=high, known=len(known), unknown=len(unknown))


@given(known=DISTANCES, unknown=DISTANCES)
def test_auroc_is_the_rank_probability_with_ties_counted_half(known, unknown):
    result = auroc(known, unknown)
    wins = [(u > k) + (u == k) / 2 for u in unknown for k in known]
    assert result.value == pytest.approx(np.mean(wins), abs=1e-12)
    assert 0 <= result.low <= result.value <= result.high <= 1


def test_auroc_interval_is_valid_at_its_extremes():
    near, far = np.zeros(20, np.float32), np.ones(20, np.float32)
    best, worst = auroc(near, far), auroc(far, near)
    assert (best.value, best.high) == (1, 1)
    assert 0.7 < best.low < 0.95
    assert worst.low == 0
    assert worst.high == pytest.approx(1 - best.low, abs=1e-6)


def test_one_odd_image_does_not_make_the_area_uncertain():
    """Three of four networks separate all images, and the other all but one."""
    near, far = np.linspace(0.5, 0.9, 14, dtype=np.float32), np.linspace(1.0, 1.3, 5, dtype=np.float32)
    odd = np.append(near[1:], np.float32(1.1))
    by_draw = [place(near, far)] * 3 + [place(odd, far)]
    placements = Placements(*(np.concatenate(column) for column in zip(*by_draw, strict=True)))
    value, low, _ = auroc_interval(placements, 14, 20, 0.95)
    assert value > 0.99
    assert low > 0.8


SHAPES = {
    "normal, 0.64": lambda rng, n: (rng.normal(size=n[0]), rng.normal(0.5, 1, n[1])),
    "normal, 0.98": lambda rng, n: (rng.normal(size=n[0]), rng.normal(3, 1, n[1])),
    # Here Newcombe's interval alone covers the true value in 84 of 100 cases ...
    "unknown spread wide, 0.90": lambda rng, n: (rng.normal(size=n[0]), rng.normal(4, 3, n[1])),
    # ... and here DeLong's in 86, or in 67 with symmetric limits.
    "known skewed, 0.998": lambda rng, n: (0.13 * np.exp(0.5 * rng.normal(size=n[0])), rng.normal(0.8, 0.2, n[1])),
}


@pytest.mark.parametrize("sizes", [(300, 60), (60, 300)])
@pytest.mark.parametrize("shape", SHAPES)
def test_auroc_interval_has_its_nominal_coverage(sizes, shape):
    rng = np.random.default_rng(0)
    truth = auroc(*SHAPES[shape](rng, (30_000, 30_000))).value
    trials, inside = 200, 0
    for _ in range(trials):
        result = auroc(*SHAPES[shape](rng, sizes))
        inside += result.low <= truth <= result.high
    # Below 0.95 by the error of 200 trials and two approximations, but above either interval alone.
    assert inside / trials >= 0.9


@given(known=DISTANCES, unknown=DISTANCES)
def test_short_roc_curve_is_exact(known, unknown):
    assume(len(set(known) | set(unknown)) < ROC_POINTS)
    curve = roc(known, unknown)
    area = np.trapezoid(curve.true_accepts, curve.false_accepts)
    assert area == pytest.approx(auroc(known, unknown).value, abs=1e-12)
    for far, tar, threshold in list(zip(curve.false_accepts, curve.true_accepts, curve.thresholds, strict=True))[1:]:
        assert (far, tar) == ((unknown <= threshold).mean(), (known <= threshold).mean())


def test_long_roc_curve_is_thinned():
    rng = np.random.default_rng(0)
    known, unknown = (np.abs(rng.normal(mean, 1, 5000)).astype(np.float32) for mean in (1, 3))
    curve = roc(known, unknown)
    columns = (curve.false_accepts, curve.true_accepts, curve.thresholds)
    assert {len(column) for column in columns} == {ROC_POINTS}
    for column in columns:
        assert all(type(value) is float and math.isfinite(value) for value in column)
        assert list(column) == sorted(column)
    assert (curve.false_accepts[0], curve.true_accepts[0]) == (0, 0)
    assert (curve.false_accepts[-1], curve.true_accepts[-1]) == (1, 1)
    area = np.trapezoid(curve.true_accepts, curve.false_accepts)
    assert area == pytest.approx(auroc(known, unknown).value, abs=1e-3)


@given(known=DISTANCES, unknown=DISTANCES)
def test_false_accepts_are_counted_at_the_smallest_threshold_that_accepts_enough_known(known, unknown):
    result = false_accepts_at(known, unknown, 0.8, 0.95)
    threshold = min(t for t in known if (known <= t).mean() >= 0.8)
    assert result.value == (unknown <= threshold).mean()
    assert 0 <= result.low <= result.value <= result.high <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_of_false_accepts_covers_the_truth(shape):
    rng = np.random.default_rng(0)
    truth = false_accepts_at(*SHAPES[shape](rng, (50_000, 50_000)), 0.95, 0.95).value
    trials, inside = 200, 0
    for _ in range(trials):
        result = false_accepts_at(*SHAPES[shape](rng, (300, 120)), 0.95, 0.95)
        inside += result.low <= truth <= result.high
    assert inside >= 0.92 * trials


def test_the_trade_off_names_the_false_accepts_at_a_rate_of_false_rejects():
    known, unknown = np.arange(100, dtype=np.float32), np.arange(50, 150, dtype=np.float32)
    curve = roc(known, unknown)
    assert curve.false_accepts_at(0.05) == pytest.approx(0.45, abs=0.02)
    assert curve.false_accepts_at(0.0) == pytest.approx(0.5, abs=0.02)
    assert curve.false_accepts_at(1.0) == 0


def test_images_without_siblings_count_one_each():
    strata = np.array([0, 0, 0, 2, 2])
    assert effective_totals(strata, np.arange(5), 3).tolist() == [3, 0, 2]


def test_a_group_counts_once_in_each_class_that_it_shows():
    strata, groups = np.array([0] * 20 + [1] * 10), np.array([0] * 10 + [1] * 10 + [1] * 10)
    assert effective_totals(strata, groups, 2).tolist() == [2, 1]
    assert effective_totals(np.zeros(12, np.int32), np.array([0] * 10 + [1, 2]), 1)[0] == pytest.approx(144 / 102)


@pytest.mark.parametrize(("even", "correlation"), [(True, 1.0), (False, 0.5)])
def test_interval_of_groups_contains_the_accuracy_and_that_of_frames_does_not(even: bool, correlation: float):
    """More cases are in the docstring of `effective_totals`."""
    rng, accuracy = np.random.default_rng(0), 0.9
    contained = by_frames = 0
    for _ in range(1000):
        sizes = np.full(20, 10) if even else rng.geometric(0.1, 20)
        shown = rng.random(20) < accuracy if correlation == 1 else rng.beta(accuracy, 1 - accuracy, 20)
        right = rng.binomial(sizes, shown)
        groups = np.repeat(np.arange(20), sizes)
        effective = effective_totals(np.zeros_like(groups), groups, 1)[0]
        count, total = int(right.sum()), int(sizes.sum())
        grouped, frames = proportion(count, total, 0.95, effective), proportion(count, total, 0.95)
        contained += grouped.low <= accuracy <= grouped.high
        by_frames += frames.low <= accuracy <= frames.high
    assert contained >= binom.ppf(0.01, 1000, 0.94)
    assert by_frames < 700


@pytest.mark.parametrize(("count", "total"), [(0, 16), (1, 16), (8, 16), (16, 16), (90, 900)])
def test_the_share_to_expect_is_less_certain_than_the_measured_one(count: int, total: int):
    measured = proportion(count, total, 0.95)
    expected = expected_share(measured)
    assert expected.value == pytest.approx(measured.value)
    assert expected.low <= measured.low
    assert expected.high >= measured.high
    assert expected.high - expected.low > measured.high - measured.low


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_more_classes_accept_more_images(share: float):
    """Of independent classes, none accepts with the product of the probabilities."""
    measured = proportion(round(1000 * share), 1000, 0.95)
    twice = expected_share(measured, 2)
    assert twice.value == pytest.approx(1 - (1 - share) ** 2)
    assert twice.low < twice.value < twice.high < 1


def test_shares_of_another_log_odds_lie_in_the_interval_as_often_as_stated():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(500):
        odds = rng.normal(-1.5, 1)
        measured = proportion(int(rng.binomial(60, expit(odds))), 60, 0.95)
        expected = expected_share(measured)
        held += expected.low <= expit(odds + rng.normal(0, TRANSFER_DEVIATION)) <= expected.high
    assert 0.93 < held / 500 <= 1
