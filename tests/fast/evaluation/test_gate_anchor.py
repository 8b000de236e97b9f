"""The anchor: planted chains of small losses, the budget, and an anchor that moved or cannot be
measured.

The simulations are those of ``benchmarks/gate.py``, which measures the same rates over more seeds.
"""

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks import gate as simulation
from evernear.evaluation.compare import PairedCounts, loss_beyond_budget, net_loss_budget
from evernear.evaluation.evaluate import AnchorEvaluation, Evaluation
from evernear.evaluation.gate import decide
from evernear.evaluation.gate_limits import MAX_UNDETECTED_LOSS
from evernear.evaluation.measure import Outcomes
from evernear.evaluation.verdict import AnchorChoice, Rule, Verdict
from evernear.settings import GateSettings

SETTINGS = GateSettings()


def losing(errors: int, queries: int) -> Outcomes:
    """Errors in the first ``errors`` of ``queries`` of six classes."""
    return Outcomes(np.arange(queries) >= errors, (np.arange(queries) % 6).astype(np.int32))


def rules(verdict: Verdict) -> dict[str, Rule]:
    return {rule.name: rule for rule in verdict.rules}


def failed(verdict: Verdict) -> set[str]:
    return {rule.name for rule in verdict.rules if not rule.passed}


def test_budget_counts_groups() -> None:
    """One lost scene of ten frames uses one net loss, not ten."""

    def in_scenes(errors: int) -> Outcomes:
        outcomes = losing(errors, 200)
        return Outcomes(outcomes.correct, outcomes.labels, np.arange(200, dtype=np.int32) // 10)

    verdict = decide(simulation.make_evaluation(in_scenes(20), in_scenes(10)), SETTINGS)
    assert rules(verdict)["no_worse_than_anchor"].passed
    assert (
        "uses 1 of a budget of 2 net losses on 20 groups of test images"
        in rules(verdict)["no_worse_than_anchor"].reason
    )
    verdict = decide(simulation.make_evaluation(losing(20, 200), losing(10, 200)), SETTINGS)
    assert not rules(verdict)["no_worse_than_anchor"].passed, "as independent images, the same answers lose more"


@pytest.mark.parametrize(("queries", "step", "last"), [(18, 1, 2), (50, 1, 3), (200, 1, 3)])
def test_chain_of_losses_that_no_single_test_detects_ends(queries: int, step: int, last: int) -> None:
    """Each candidate has ``step`` more errors than the one before; ``last`` is promoted last."""
    anchor = champion = losing(1, queries)
    for number in range(1, 10):
        candidate = losing(1 + number * step, queries)
        without = decide(simulation.make_evaluation(candidate, champion), SETTINGS)
        assert without.promote, "against its champion alone, every step passes"
        fixed = anchor if number > 1 else None
        verdict = decide(simulation.make_evaluation(candidate, champion, anchor=fixed), SETTINGS)
        assert verdict.promote == (number <= last)
        if not verdict.promote:
            assert failed(verdict) <= {"no_worse_than_anchor"}
            return
        champion = candidate


@pytest.mark.parametrize(("queries", "shared"), [(50, 0.0), (200, 0.6)])
def test_equal_candidates_are_held_at_most_at_the_level_of_the_gate(queries: int, shared: float) -> None:
    """The bound is exceeded in one of 1000 runs at the limit."""
    seeds = 100
    held = sum(bool(simulation.held_equal(queries, 0.97, shared, seed)) for seed in range(seeds))
    assert held <= binom.ppf(0.999, seeds, SETTINGS.significance)


def test_paired_test_against_the_anchor_detects_what_each_step_hid() -> None:
    """On 1,000 images, 9 regressions from the champion and 18 from the anchor."""
    anchor, champion, candidate = (losing(errors, 1000) for errors in (20, 29, 38))
    verdict = decide(simulation.make_evaluation(candidate, champion, anchor=anchor), GateSettings(significance=0.004))
    assert failed(verdict) == {"no_worse_than_anchor"}
    (reason,) = verdict.reasons
    assert (
        "significantly worse than the anchor anchor, whose label right is 98.00%: 0 improvements and 18 reg" in reason
    )
    assert "`evernear registry anchor VERSION --why REASON`" in reason


def test_anchor_and_champion_share_the_level() -> None:
    same = losing(1, 200)
    alone = rules(decide(simulation.make_evaluation(same, same), SETTINGS))
    both = rules(decide(simulation.make_evaluation(same, same, anchor=same), SETTINGS))
    assert alone["no_worse"].bound == pytest.approx(0.08)
    assert "significantly worse" not in alone["no_worse_than_anchor"].reason
    assert both["no_worse"].bound == pytest.approx(0.04)
    assert "not significantly worse than the anchor anchor, whose label right is 99.50%: 0 improvements and 0 reg" in (
        both["no_worse_than_anchor"].reason
    )
    assert "p = 1, level 0.04." in both["no_worse_than_anchor"].reason


def test_budget_is_shown_with_how_much_of_it_is_used() -> None:
    verdict = decide(simulation.make_evaluation(losing(2, 18), losing(1, 18)), SETTINGS)
    rule = rules(verdict)["no_worse_than_anchor"]
    assert (rule.candidate, rule.bound) == (1, 2)
    assert rule.reason == (
        "Against the anchor champion, which is the champion, the candidate uses 1 of a budget of 2 net losses on 18 "
        "test images (0 improvements and 1 regression)."
    )


def test_a_better_candidate_uses_nothing_of_the_budget() -> None:
    rule = rules(decide(simulation.make_evaluation(losing(0, 18), losing(3, 18)), SETTINGS))["no_worse_than_anchor"]
    assert rule.passed
    assert " uses 0 of a budget of " in rule.reason


def with_anchor(evaluation: Evaluation, **changes: object) -> Evaluation:
    return evaluation.model_copy(update={"anchor": evaluation.anchor.model_copy(update=changes)})


@pytest.fixture
def walked_down() -> Evaluation:
    """A candidate as good as the champion, and six errors worse than the anchor."""
    return simulation.make_evaluation(losing(7, 50), losing(7, 50), anchor=losing(1, 50))


def test_champion_takes_the_place_of_an_anchor_of_another_test_set(walked_down: Evaluation) -> None:
    assert failed(decide(walked_down, SETTINGS)) == {"no_worse_than_anchor"}
    for changes, why in (
        ({"test_overlap": 0.5}, "contains 50.0% of the images that it was tested on, below 90%"),
        ({"test_overlap": None}, "contains none of the images that it was tested on"),
        ({"measurement": None, "comparison": None, "difference": "It takes images of (8, 8, 1)."}, "(8, 8, 1)"),
    ):
        verdict = decide(with_anchor(walked_down, **changes), SETTINGS)
        assert verdict.promote
        assert (verdict.anchor.version, verdict.anchor.former) == ("champion", "anchor")
        reason = rules(verdict)["no_worse_than_anchor"].reason
        assert reason.startswith("The champion takes the place of the anchor anchor, which cannot be compared: ")
        assert why in reason
        assert rules(verdict)["no_worse"].bound == pytest.approx(0.08)


def test_champion_takes_the_place_of_an_anchor_of_other_classes(walked_down: Evaluation) -> None:
    elsewhere = walked_down.anchor.measurement.model_copy(update={"known_labels": ("elsewhere",)})
    verdict = decide(with_anchor(walked_down, measurement=elsewhere), SETTINGS)
    assert verdict.promote
    assert "no image of a class that it and the candidate know" in rules(verdict)["no_worse_than_anchor"].reason


def test_anchor_is_compared_on_the_classes_that_both_know(walked_down: Evaluation) -> None:
    """Errors 1 to 6 are in classes 1 to 5 and 0; without classes 1 to 5, one loss remains."""
    some = walked_down.anchor.measurement.model_copy(update={"known_labels": ("0", "gone")})
    verdict = decide(with_anchor(walked_down, measurement=some), SETTINGS)
    assert verdict.promote
    assert "uses 1 of a budget of 2 net losses on 9 test images" in rules(verdict)["no_worse_than_anchor"].reason


def test_anchor_that_cannot_be_read_holds_the_candidate() -> None:
    same = losing(1, 200)
    damaged = AnchorEvaluation(name="v1", fault="Release v1 does not exist in file:///store.")
    evaluation = simulation.make_evaluation(same, same).model_copy(update={"anchor": damaged})
    verdict = decide(evaluation, SETTINGS)
    assert failed(verdict) == {"no_worse_than_anchor"}
    (reason,) = verdict.reasons
    assert reason.startswith("The anchor v1 cannot be measured: Release v1 does not exist")
    assert reason.endswith("`evernear registry anchor VERSION --why REASON` makes another release the anchor.")
    assert verdict.anchor == AnchorChoice(version="v1")


def test_missing_comparison_with_the_anchor_holds_the_candidate_or_moves_the_anchor(walked_down: Evaluation) -> None:
    verdict = decide(walked_down.model_copy(update={"comparison": None}), SETTINGS)
    assert not verdict.promote
    assert verdict.detectable_loss is None


def test_first_release_has_no_anchor() -> None:
    evaluation = simulation.make_evaluation(losing(0, 50), losing(0, 50))
    first = evaluation.model_copy(update={"champion": None, "comparison": None})
    verdict = decide(first, SETTINGS)
    assert verdict.anchor is None
    assert "no_worse_than_anchor" not in rules(verdict)
    assert verdict.detectable_loss is None


def test_verdict_warns_where_a_small_test_split_hides_a_large_loss() -> None:
    small = simulation.make_evaluation(losing(1, 18), losing(1, 18))
    verdict = decide(small, SETTINGS)
    assert verdict.promote
    assert verdict.detectable_loss is not None
    assert verdict.detectable_loss > MAX_UNDETECTED_LOSS
    assert rules(verdict)["no_worse"].reason.endswith(verdict.caution)
    assert (
        "points is detected with 90% probability, and 10 points should be: the test split is too small"
        in verdict.caution
    )
    large = decide(simulation.make_evaluation(losing(1, 500), losing(1, 500)), SETTINGS)
    assert not large.caution


def test_unattended_run_holds_where_a_large_loss_stays_undetected() -> None:
    unattended = GateSettings(on_undetected_loss="hold")
    verdict = decide(simulation.make_evaluation(losing(1, 18), losing(1, 18)), unattended)
    assert failed(verdict) == {"no_worse"}
    assert rules(verdict)["no_worse"].setting == "gate.on_undetected_loss=warn"
    assert "nothing without a person" in verdict.reasons[0]
    assert decide(simulation.make_evaluation(losing(1, 500), losing(1, 500)), unattended).promote


def test_too_few_images_to_compare_with_champion_and_anchor_are_said() -> None:
    """Nothing is called insignificant that could not be significant."""
    few = simulation.make_evaluation(losing(1, 1), losing(0, 1), anchor=losing(0, 1))
    found = rules(decide(few, SETTINGS))
    assert found["no_worse"].result == "too few to tell"
    assert found["no_worse"].reason.startswith(
        "Too few images to tell whether the candidate is worse. Label right 0.00% "
    )
    assert found["class_recall"].result == "too few to tell"
    assert (
        "Too few images to tell whether label right fell by more than 5.0% for a class" in found["class_recall"].reason
    )
    assert found["no_worse_than_anchor"].result == "too few to tell"
    assert all("significant" not in found[name].reason for name in ("no_worse", "class_recall", "no_worse_than_anchor"))
    enough = rules(decide(simulation.make_evaluation(losing(0, 30), losing(0, 30), anchor=losing(0, 30)), SETTINGS))
    assert [enough[name].result for name in ("no_worse", "no_worse_than_anchor")] == ["passed", "passed"]


@pytest.mark.parametrize("queries", [18, 50, 200, 2000])
def test_budget_grows_with_the_split_and_the_anchors_errors_and_shrinks_with_the_level(queries: int) -> None:
    budgets = [net_loss_budget(errors, queries, 0.1) for errors in (0, queries // 10, queries // 3)]
    assert budgets == sorted(budgets)
    assert net_loss_budget(1, queries, 0.1) <= net_loss_budget(1, 10 * queries, 0.1)
    assert net_loss_budget(1, queries, 0.3) <= net_loss_budget(1, queries, 0.1)


def test_stated_loss_exceeds_the_budget_with_the_stated_probability() -> None:
    rng = np.random.default_rng(0)
    pairs, budget = PairedCounts(queries=200, regressions=3, improvements=3), 5
    loss, gained = loss_beyond_budget(pairs, budget), 4 / 202
    drawn = rng.multinomial(200, [gained, gained + loss, 1 - 2 * gained - loss], size=4000)
    assert np.mean(drawn[:, 1] - drawn[:, 0] > budget) == pytest.approx(0.9, abs=0.03)
