"""False alarm rates of the drift tests for any mix of classes, and their detection of simulated
shifts."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from evernear.serving.live_queries import Floats, Queries
from evernear.triggers.watch.drift import MIN_QUERIES, SAMPLE, Measure, Shift, measure_drift

LEVEL = 0.05
SEEDS = 50
# At a rate of LEVEL, SEEDS checks exceed this number of alarms in one of 10,000 test runs.
MOST_ALARMS = int(stats.binom.isf(1e-4, SEEDS, LEVEL))
BOUNDS: dict[Measure, float] = {"unknown_rise": 0.05, "embedding_shift": 0.02}
NO_BOUNDS: dict[Measure, float] = dict.fromkeys(BOUNDS, -1.0)
CENTERS = np.random.default_rng(99).standard_normal((10, 16)) * 0.3


SPREAD = np.linspace(0.06, 0.1, 10)
"""Mean distance of each class to the gallery, as a factor of the gamma distribution."""


def drawn(rng: np.random.Generator, sample: int = 120, farther: float = 0.0, one_class: float = 0.0) -> Queries:
    """Queries near ten classes; ``farther`` shifts them, and ``one_class`` of them belong to one
    class."""
    classes = np.where(rng.random(sample) < one_class, 9, rng.integers(0, 10, sample))
    points = CENTERS[classes] + rng.standard_normal((sample, 16)) * 0.1 + farther / 2
    distances = rng.gamma(4.0, SPREAD[classes]) + farther
    return Queries(
        total=sample,
        unknown=int((distances > 0.6).sum()),
        distances=distances.astype(np.float32),
        coordinates=points.astype(np.float32),
        is_unknown=distances > 0.6,
        at_s=np.sort(rng.uniform(0, 86_400, sample)),
        labels=classes.astype(np.str_),
    )


def measured(
    reference: Queries, live: Queries, measure: Measure, rate: float = LEVEL, bound: float = -1.0, seed: int = 0
) -> Shift:
    (shift,) = measure_drift(reference, live, {measure: bound}, rate, seed)
    return shift


@pytest.mark.parametrize("one_class", [0.0, 0.6])
def test_false_alarm_rate_without_drift_is_bounded(one_class: float) -> None:
    """The complete check, without the effect size bounds, which would reduce the alarm rate
    further."""
    alarms = dict.fromkeys(BOUNDS, 0)
    datasets_with_alarms = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        shifts = measure_drift(drawn(rng), drawn(rng, one_class=one_class), NO_BOUNDS, LEVEL, seed)
        assert {shift.measure for shift in shifts} == set(BOUNDS)
        for shift in shifts:
            assert shift.level == pytest.approx(LEVEL / 2)
            alarms[shift.measure] += shift.detected
        datasets_with_alarms += any(shift.detected for shift in shifts)
    assert datasets_with_alarms <= MOST_ALARMS
    assert datasets_with_alarms > 0, "a test that never raises an alarm detects nothing"
    assert max(alarms.values()) <= stats.binom.isf(1e-4, SEEDS, LEVEL / 2)


def test_another_mix_of_classes_is_drift_only_if_all_queries_count_as_one_class() -> None:
    """60% of one class, as on weekends: the classes are at different places and distances."""
    rng = np.random.default_rng(0)
    reference, live = drawn(rng, 500), drawn(rng, 500, one_class=0.6)
    assert not any(shift.detected for shift in measure_drift(reference, live, BOUNDS, 0.001))
    pooled = [dataclasses.replace(side, labels=np.full(500, "any")) for side in (reference, live)]
    assert [shift.measure for shift in measure_drift(*pooled, BOUNDS, 0.001) if shift.detected]


def test_queries_of_a_class_that_the_reference_lacks_are_compared_with_others() -> None:
    """A broken camera may make everything look like a class of which the reference has no image."""
    rng = np.random.default_rng(0)
    live = drawn(rng, 300, farther=0.5)
    live = Queries(300, 0, live.distances, live.coordinates, live.is_unknown, live.at_s, np.full(300, "rare"))
    assert [shift.measure for shift in measure_drift(drawn(rng), live, BOUNDS, 0.001) if shift.detected]


def test_few_queries_are_not_tested() -> None:
    rng = np.random.default_rng(0)
    few = drawn(rng, MIN_QUERIES - 1)
    assert measure_drift(drawn(rng), few, BOUNDS, LEVEL) == measure_drift(few, drawn(rng), BOUNDS, LEVEL) == []


@pytest.mark.parametrize(("sample", "one_class"), [(60, 0.0), (300, 0.6)])
def test_effect_that_is_called_detectable_is_detected(sample: int, one_class: float) -> None:
    """Shifts are grouped by whether their effect on many queries is the one that small samples
    state."""
    measure: Measure = "embedding_shift"
    rng = np.random.default_rng(0)
    reference, many = drawn(rng, 300), np.arange(0.0, 0.4, 0.02)
    stated = measured(reference, drawn(rng, sample, one_class=one_class), measure, 0.01).detectable
    effects = [measured(reference, drawn(rng, SAMPLE, farther, one_class), measure).effect for farther in many]
    farther = float(many[int(np.searchsorted(effects, stated))])
    detections = [measured(reference, drawn(rng, sample, farther, one_class), measure, 0.01) for _ in range(40)]
    assert sum(shift.detected for shift in detections) >= 30, "90% of 40, less what chance explains"


@pytest.mark.parametrize(
    ("shift", "measure"),
    [
        ({"farther": 0.15}, "unknown_rise"),
        ({"farther": 0.2, "one_class": 0.5}, "embedding_shift"),
    ],
)
def test_simulated_shift_is_detected_at_the_default_rate(shift: dict[str, float], measure: Measure) -> None:
    detections = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        reference = drawn(rng, 500)
        detections += measured(reference, drawn(rng, 500, **shift), measure, 0.005, BOUNDS[measure], seed).detected
    assert detections == 8


def test_significant_but_small_difference_is_ignored() -> None:
    rng = np.random.default_rng(0)
    reference, live = drawn(rng, 1000), drawn(rng, SAMPLE, farther=0.07)
    shift = measured(reference, live, "embedding_shift", 0.001, bound=0.3)
    assert shift.p <= shift.level
    assert not shift.detected


def test_decrease_of_the_unknown_rate_is_not_drift() -> None:
    rng = np.random.default_rng(1)
    shift = measured(drawn(rng, 500, farther=0.2), drawn(rng, 500), "unknown_rise")
    assert shift.effect < 0
    assert shift.p > 0.5


def one_stratum(rng: np.random.Generator, distances: Floats, unknown: int = 0, points: Floats | None = None) -> Queries:
    """Queries of one predicted class, ``unknown`` of them unknown."""
    count = len(distances)
    coordinates = np.empty((count, 0), np.float32) if points is None else points
    is_unknown, labels = np.arange(count) < unknown, np.full(count, "a")
    return Queries(count, unknown, distances, coordinates, is_unknown, rng.random(count), labels)


def test_unknown_p_value_agrees_with_fishers_exact_test() -> None:
    rng = np.random.default_rng(0)
    reference = one_stratum(rng, rng.random(60).astype(np.float32), unknown=6)
    live = one_stratum(rng, rng.random(50).astype(np.float32), unknown=12)
    shift = measured(reference, live, "unknown_rise", 0.0005)
    assert shift.effect == pytest.approx(12 / 50 - 6 / 60)
    exact = stats.fisher_exact([[12, 38], [6, 54]], alternative="greater")
    assert shift.p == pytest.approx(float(exact.pvalue), abs=0.03)


def test_weighted_effects_compare_class_by_class() -> None:
    """Computed again from the definition: the reference's classes weigh as much as their share of
    the live queries."""
    rng = np.random.default_rng(2)
    reference, live = drawn(rng, 150), drawn(rng, 130, farther=0.05, one_class=0.5)
    weights = np.array([(live.labels == a).mean() / (reference.labels == a).sum() for a in reference.labels])
    rise = live.is_unknown.mean() - weights @ reference.is_unknown
    assert measured(reference, live, "unknown_rise").effect == pytest.approx(rise)
    equal = np.full(len(live), 1 / len(live))
    across, first, second = (
        sum(v * w * np.linalg.norm(x - y) for v, x in zip(vs, xs, strict=True) for w, y in zip(ws, ys, strict=True))
        for vs, xs, ws, ys in (
            (weights, reference.coordinates, equal, live.coordinates),
            (weights, reference.coordinates, weights, reference.coordinates),
            (equal, live.coordinates, equal, live.coordinates),
        )
    )
    energy = measured(reference, live, "embedding_shift").effect
    assert energy == pytest.approx((2 * across - first - second) / (2 * across), abs=1e-5)


def test_constant_and_zero_dimensional_samples_are_accepted() -> None:
    rng = np.random.default_rng(5)
    same = one_stratum(rng, np.ones(25, np.float32), points=np.ones((25, 3), np.float32))
    for shift in measure_drift(same, same, BOUNDS, LEVEL):
        assert (shift.effect, shift.p, shift.detectable) == (pytest.approx(0), 1, shift.bound)
    bare = one_stratum(rng, rng.random(100).astype(np.float32))
    assert [shift.measure for shift in measure_drift(drawn(rng), bare, BOUNDS, LEVEL)] == ["unknown_rise"]
