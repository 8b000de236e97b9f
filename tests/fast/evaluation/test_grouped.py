import numpy as np
import pytest
from scipy.stats import binom

from evernear.evaluation.statistics import effective_totals, proportion


def test_images_without_siblings_count_one_each():
    strata = np.array([0, 0, 0, 2, 2])
    assert effective_totals(strata, np.arange(5), 3).tolist() == [3, 0, 2]


def test_a_group_counts_once_in_each_class_that_it_shows():
    strata, groups = np.array([0] * 20 + [1] * 10), np.array([0] * 10 + [1] * 10 + [1] * 10)
    assert effective_totals(strata, groups, 2).tolist() == [2, 1]
    assert effective_totals(np.zeros(12, np.int32), np.array([0] * 10 + [1, 2]), 1)[0] == pytest.approx(144 / 102)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("correlation", [0.5, 1.0])
def test_interval_of_groups_contains_the_accuracy_and_that_of_frames_does_not(even: bool, correlation: float):
    """20 scenes of ten frames, 1,000 times; more cases are in the docstring of
    `effective_totals`."""
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
