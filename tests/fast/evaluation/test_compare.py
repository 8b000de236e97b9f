from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evernear.errors import IntegrityError
from evernear.evaluation.compare import PairedCounts, compare, detectable_loss, mcnemar_worse
from evernear.evaluation.measure import Outcomes
from evernear.evaluation.statistics import sign_flip_worse

COUNTS = st.integers(0, 150)


@given(regressions=COUNTS, improvements=COUNTS)
def test_p_value_is_the_exact_binomial_tail(regressions, improvements):
    differing = regressions + improvements
    tail = Fraction(sum(comb(differing, count) for count in range(regressions, differing + 1)), 2**differing)
    assert mcnemar_worse(regressions, improvements) == pytest.approx(float(tail), rel=1e-9)


@pytest.mark.parametrize(("queries", "improvements"), [(50, 0), (200, 1), (200, 6), (1000, 10), (10_000, 20)])
def test_detectable_loss_is_noticed_with_the_stated_probability(queries: int, improvements: int) -> None:
    loss = detectable_loss(PairedCounts(queries=queries, regressions=0, improvements=improvements), 0.08)
    gained = (improvements + 1) / (queries + 2)
    draws = np.random.default_rng(0).multinomial(queries, [gained + loss, gained, 1 - 2 * gained - loss], 2000)
    noticed = np.mean([mcnemar_worse(int(lost), int(won)) <= 0.08 for lost, won, _ in draws])
    assert 0.88 <= noticed <= 0.96


def test_no_loss_is_detectable_on_a_handful_of_images() -> None:
    assert detectable_loss(PairedCounts(queries=3, regressions=0, improvements=0), 0.08) == 1.0


OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=60).map(
    lambda rows: [np.array(column) for column in zip(*rows, strict=True)]
)


@given(OUTCOMES)
def test_pairs_are_counted_overall_and_per_class(columns):
    ours, others, truth = columns
    labels = truth.astype(np.int32)
    comparison = compare(Outcomes(ours, labels), Outcomes(others, labels), ("a", "b", "c", "no query"))

    def pairs(mask) -> PairedCounts:
        rows = [(bool(o), bool(t)) for o, t in zip(ours[mask], others[mask], strict=True)]
        return PairedCounts(
            queries=len(rows), regressions=rows.count((False, True)), improvements=rows.count((True, False))
        )

    assert comparison.overall == pairs(truth >= 0)
    assert comparison.classes == {"abc"[label]: pairs(truth == label) for label in set(truth.tolist())}


def test_outcomes_of_different_queries_are_rejected():
    correct = np.ones(3, np.bool_)
    with pytest.raises(IntegrityError, match="different queries"):
        compare(
            Outcomes(correct, np.array([0, 1, 1], np.int32)),
            Outcomes(correct, np.array([0, 1, 0], np.int32)),
            ("a", "b"),
        )


def test_groups_of_one_image_have_the_same_test():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400).astype(np.int32)
    ours, others = rng.random((2, 400)) < 0.8
    alone = rng.permutation(400).astype(np.int32)
    single = compare(Outcomes(ours, labels), Outcomes(others, labels), ("a", "b", "c"))
    grouped = compare(Outcomes(ours, labels, alone), Outcomes(others, labels, alone), ("a", "b", "c"))
    for pairs, of_groups in [(single.overall, grouped.overall), (single.within("ab"), grouped.within("ab"))]:
        assert of_groups.groups == of_groups.queries == pairs.queries
        assert (of_groups.p_worse, of_groups.p_better) == (pairs.p_worse, pairs.p_better)
        assert detectable_loss(of_groups, 0.08) == detectable_loss(pairs, 0.08)


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=10))
def test_sign_flip_test_counts_all_flips(nets):
    flips = np.array([*np.ndindex(*[2] * len(nets))]).reshape(-1, len(nets)) * 2 - 1
    expected = np.mean((flips * np.abs(nets)).sum(axis=1) >= sum(nets))
    assert sign_flip_worse(nets) == pytest.approx(expected, abs=1e-12)


def test_a_lost_scene_is_one_loss_and_may_show_several_classes():
    """Ten frames of one scene are lost: McNemar's test would call that significant."""
    labels = np.repeat(np.arange(2, dtype=np.int32), 50)
    groups = np.tile(np.repeat(np.arange(10, dtype=np.int32), 5), 2)  # each scene shows both classes
    ours, others = groups != 3, np.ones(100, np.bool_)
    comparison = compare(Outcomes(ours, labels, groups), Outcomes(others, labels, groups), ("a", "b"))
    for pairs in (comparison.overall, comparison.within("ab")):
        assert (pairs.regressions, pairs.groups, pairs.nets, pairs.p_worse) == (10, 10, {3: 10}, 0.5)
    assert comparison.classes["a"].nets == {3: 5}
    assert mcnemar_worse(10, 0) < 0.001
