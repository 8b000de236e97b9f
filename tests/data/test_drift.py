"""False alarm rates of the drift tests, and their detection of simulated shifts."""

import itertools

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import pdist

from evernear.data.drift import (
    Floats,
    Measure,
    Queries,
    distance_shift,
    embedding_shift,
    measure_drift,
    unknown_rise,
)

LEVEL = 0.05
SEEDS = 120
# At a rate of LEVEL, SEEDS checks exceed this number of alarms in one of 10,000 test runs.
MOST_ALARMS = int(stats.binom.isf(1e-4, SEEDS, LEVEL))
BOUNDS: dict[Measure, float] = {"unknown_rise": 0.05, "distance_shift": 0.15, "embedding_shift": 0.02}
NO_BOUNDS: dict[Measure, float] = dict.fromkeys(BOUNDS, -1.0)
CENTERS = np.random.default_rng(99).standard_normal((10, 16)) * 0.3


def drawn(
    rng: np.random.Generator, total: int = 300, sample: int = 120, farther: float = 0.0, one_class: float = 0.0
) -> Queries:
    """Queries near ten classes; ``farther`` shifts their distances, and ``one_class`` of them belong to one class."""
    labels = np.where(rng.random(sample) < one_class, 0, rng.integers(0, 10, sample))
    points = CENTERS[labels] + rng.standard_normal((sample, 16)) * 0.1
    everything = rng.gamma(4.0, 0.08, total) + farther
    return Queries(
        total=total,
        unknown=int((everything > 0.6).sum()),
        distances=everything[:sample].astype(np.float32),
        coordinates=points.astype(np.float32),
    )


def test_false_alarm_rate_without_drift_is_bounded() -> None:
    """The complete check, without the effect size bounds, which would reduce the alarm rate further."""
    alarms = dict.fromkeys(BOUNDS, 0)
    datasets_with_alarms = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        shifts = measure_drift(drawn(rng), drawn(rng), NO_BOUNDS, LEVEL, seed)
        assert {shift.measure for shift in shifts} == set(BOUNDS)
        for shift in shifts:
            assert shift.level == pytest.approx(LEVEL / 3)
            alarms[shift.measure] += shift.detected
        datasets_with_alarms += any(shift.detected for shift in shifts)
    assert datasets_with_alarms <= MOST_ALARMS
    assert datasets_with_alarms > 0, "a test that never raises an alarm detects nothing"
    assert max(alarms.values()) <= stats.binom.isf(1e-4, SEEDS, LEVEL / 3)


@pytest.mark.parametrize(
    ("shift", "measure"),
    [
        ({"farther": 0.15}, "unknown_rise"),
        ({"farther": 0.1}, "distance_shift"),
        ({"one_class": 0.5}, "embedding_shift"),
    ],
)
def test_simulated_shift_is_detected_at_the_default_rate(shift: dict[str, float], measure: Measure) -> None:
    detections = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        reference = drawn(rng, 500, 500)
        shifts = measure_drift(reference, drawn(rng, 500, 500, **shift), {measure: BOUNDS[measure]}, 0.005, seed)
        detections += shifts[0].detected
    assert detections == 8


@pytest.mark.parametrize("rate", [0.0003, 0.3])
def test_shift_is_detected_at_rates_with_a_rounded_share(rate: float) -> None:
    rng = np.random.default_rng(0)
    shifts = measure_drift(drawn(rng), drawn(rng, one_class=0.9), BOUNDS, rate)
    assert [shift.measure for shift in shifts if shift.detected] == ["embedding_shift"]


def test_significant_but_small_difference_is_ignored() -> None:
    rng = np.random.default_rng(0)
    reference, live = drawn(rng, 200_000, 100_000), drawn(rng, 200_000, 100_000, farther=0.005)
    for shift in measure_drift(reference, live, {m: BOUNDS[m] for m in ("unknown_rise", "distance_shift")}, 0.001):
        assert shift.p <= shift.level
        assert not shift.detected


def test_decrease_of_the_unknown_rate_is_not_drift() -> None:
    rng = np.random.default_rng(1)
    effect, p = unknown_rise(drawn(rng, 500, 500, farther=0.2), drawn(rng, 500, 500))
    assert effect < 0
    assert p > 0.5


def test_fisher_p_value_sums_all_tables_at_least_as_extreme() -> None:
    def queries(unknown: int, total: int) -> Queries:
        return Queries(total, unknown, np.empty(0, np.float32), np.empty((0, 0), np.float32))

    _, p = unknown_rise(queries(1, 10), queries(5, 12))
    # The probability that at least this many of the 6 unknown among 22 are among the 12 live queries.
    hypergeometric = stats.hypergeom(22, 6, 12)
    assert p == pytest.approx(sum(hypergeometric.pmf(k) for k in (5, 6)))


def test_ks_distance_is_the_largest_gap_of_the_cdfs() -> None:
    rng = np.random.default_rng(2)
    first, second = rng.random(70).astype(np.float32), (rng.random(90) * 1.3).astype(np.float32)
    gaps = [abs((first <= x).mean() - (second <= x).mean()) for x in [*first, *second]]
    assert distance_shift(first, second)[0] == pytest.approx(max(gaps))


def energy(first: Floats, second: Floats) -> float:
    """Compute the coefficient pair by pair, by its definition."""

    def mean(left: Floats, right: Floats) -> float:
        return float(np.mean([np.linalg.norm(x - y) for x in left for y in right]))

    across = 2 * mean(first, second)
    return (across - mean(first, first) - mean(second, second)) / across


def test_energy_coefficient_matches_its_definition() -> None:
    rng = np.random.default_rng(3)
    first = rng.standard_normal((13, 4)).astype(np.float32)
    second = (rng.standard_normal((17, 4)) + 0.5).astype(np.float32)
    assert embedding_shift(first, second, 19)[0] == pytest.approx(energy(first, second), abs=1e-5)


def test_permutation_p_value_matches_full_enumeration() -> None:
    """Two samples of 4 points have 70 permutations, so the exact p-value can be enumerated."""
    rng = np.random.default_rng(4)
    points = rng.standard_normal((8, 2)).astype(np.float32)
    points[:4] += 1
    observed = energy(points[:4], points[4:]) * 1.0
    spread = pdist(points).sum()
    as_large = 0
    for chosen in itertools.combinations(range(8), 4):
        others = [row for row in range(8) if row not in chosen]
        first, second = points[list(chosen)], points[others]
        # For samples of equal size, comparing E is equivalent to comparing the sum of cross distances.
        across = sum(np.linalg.norm(x - y) for x in first for y in second)
        actual = sum(np.linalg.norm(x - y) for x in points[:4] for y in points[4:])
        as_large += across >= actual - 1e-5
    assert observed > 0
    assert spread > 0
    _, p = embedding_shift(points[:4], points[4:], 4999)
    assert p == pytest.approx(as_large / 70, abs=0.03)


def test_single_point_and_zero_dimensional_samples_are_accepted() -> None:
    same = np.ones((5, 3), np.float32)
    effect, p = embedding_shift(same, same, 9)
    assert effect == 0
    assert p == 1
    rng = np.random.default_rng(5)
    bare = Queries(100, 3, rng.random(100).astype(np.float32), np.empty((100, 0), np.float32))
    assert [shift.measure for shift in measure_drift(drawn(rng), bare, BOUNDS, LEVEL)] == [
        "unknown_rise",
        "distance_shift",
    ]
