"""Individual rules, tampered verdicts, and the gate's error rates on simulated cases.

The simulation is that of ``benchmarks/gate.py``, which measures the same rates over more seeds.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks import gate as simulation
from evernear.common.frozen import stamp
from evernear.data.near_duplicates import NearDuplicates
from evernear.errors import IntegrityError
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import Outcomes
from evernear.evaluation.open_set import OpenSet, stated_false_accepts
from evernear.evaluation.statistics import Proportion, exact_proportion, proportion
from evernear.evaluation.verdict import Rule, Verdict
from evernear.index.description import MAX_DISTANCE
from evernear.settings import GateSettings

SETTINGS = GateSettings()
WITH_FLOOR = GateSettings(accuracy_floor=0.95)
UNSEEN = {"train": 0, "gallery": 0, "query": 0}
SEEDS = 250
NAN = Proportion.model_construct(count=math.nan, total=9, low=math.nan, high=math.nan)


@pytest.mark.parametrize("shared", [0.6, 0.0], ids=["as two seeds of a recipe", "independent errors"])
class TestErrorRatesOnTenThousandQueries:
    """Each bound is exceeded in one of 1000 runs if the true rate is at its limit."""

    def stopped(self, points: float, shared: float, how: str = "drawn") -> int:
        case = simulation.Case(how, 10_000, 0.996, points, shared)
        (count,) = simulation.count_held(case, SEEDS, [SETTINGS.significance])
        return count

    def test_false_alarm_rate_for_equal_models_is_bounded(self, shared: float):
        assert self.stopped(0.0, shared) <= binom.ppf(0.999, SEEDS, SETTINGS.significance)

    def test_model_three_tenths_of_a_point_worse_fails(self, shared: float):
        assert self.stopped(-0.3, shared) >= binom.ppf(0.001, SEEDS, 0.985 if shared else 0.93)

    def test_visible_regression_always_fails(self, shared: float):
        assert self.stopped(-0.3, shared, "frozen") == SEEDS

    def test_model_three_tenths_of_a_point_better_passes(self, shared: float):
        assert self.stopped(+0.3, shared) == 0


def test_small_test_split_rarely_fails_equal_models_and_fails_a_bad_one():
    case = simulation.Case
    (equal,) = simulation.count_held(case("drawn", 180, 0.98, 0.0, 0.6), SEEDS, [SETTINGS.significance])
    (worse,) = simulation.count_held(case("drawn", 180, 0.98, -10.0, 0.6), SEEDS, [SETTINGS.significance])
    assert equal <= binom.ppf(0.999, SEEDS, SETTINGS.significance)
    assert worse >= binom.ppf(0.001, SEEDS, 0.99)


def outcomes(errors: dict[int, int], queries: int = 100, unknown: int = 0) -> Outcomes:
    """Ten classes of ``queries`` queries, of which the first ``errors`` of a class are wrong, and
    the last ``unknown`` of all are called unknown."""
    labels = np.repeat(np.arange(10, dtype=np.int32), queries)
    correct = np.ones(len(labels), np.bool_)
    for label, count in errors.items():
        correct[label * queries : label * queries + count] = False
    return Outcomes(correct, labels, unknown=np.arange(len(labels)) >= len(labels) - unknown)


@pytest.fixture
def passing() -> Evaluation:
    """A challenger as good as its champion."""
    return simulation.make_evaluation(outcomes({1: 2, 8: 1}), outcomes({1: 2, 8: 1}))


def failed(verdict: Verdict) -> dict[str, Rule]:
    assert verdict.promote == all(rule.passed for rule in verdict.rules)
    return {rule.name: rule for rule in verdict.rules if not rule.passed}


def with_candidate(evaluation: Evaluation, **changes: object) -> Evaluation:
    return evaluation.model_copy(update={"candidate": evaluation.candidate.model_copy(update=changes)})


def accepting(evaluation: Evaluation, count: int, total: int) -> Evaluation:
    """The probe accepts ``count`` of ``total`` images of unseen classes. It accepts all because
    unknown is switched off."""
    threshold = MAX_DISTANCE if count == total else None
    open_set = evaluation.open_set.model_copy(
        update={"false_accepts": proportion(count, total, 0.95), "threshold": threshold}
    )
    return evaluation.model_copy(update={"open_set": open_set})


def test_good_challenger_passes_and_every_rule_gives_a_reason(passing: Evaluation):
    verdict = decide(passing, SETTINGS)
    assert verdict.promote
    assert verdict.reasons == [rule.reason for rule in verdict.rules]
    assert all(reason.endswith((".", ").")) and "\n" not in reason for reason in verdict.reasons)
    assert verdict.dataset_digest == passing.candidate.dataset_digest


def test_each_rule_can_fail_alone(passing: Evaluation):
    slow_rot = simulation.make_evaluation(outcomes({1: 5, 3: 4, 5: 3, 8: 3}), outcomes({1: 2, 8: 1}))
    one_class = simulation.make_evaluation(outcomes({1: 2, 4: 12}), outcomes({1: 2, 2: 12}))
    cases = {
        "accuracy_floor": with_candidate(passing, label_right=proportion(949, 1000, 0.95)),
        "class_recall": with_candidate(
            passing, class_label_right=passing.candidate.class_label_right | {"4": proportion(30, 100, 0.95)}
        ),
        "false_rejects": with_candidate(passing, false_rejects=proportion(130, 1000, 0.95)),
        "test_images_unseen": passing.model_copy(update={"leakage": UNSEEN | {"gallery": 1}}),
        "same_test_set": passing.model_copy(update={"champion_test_overlap": 0.89}),
        "classes_kept": with_candidate(passing, known_labels=simulation.LABELS[:-1]),
        "false_accepts": accepting(passing, 58, 60),
    }
    for name, case in cases.items():
        failures = failed(decide(case, WITH_FLOOR))
        assert set(failures) == {name}
        if setting := failures[name].setting:
            key, _, value = setting.removeprefix("gate.").partition("=")
            changed = WITH_FLOOR.model_dump() | {key: value}
            assert decide(case, GateSettings.model_validate(changed)).promote
    rules = {rule.name for rule in decide(passing, SETTINGS).rules}
    assert set(cases) == rules - {"no_worse", "no_worse_than_anchor"}, "these two compare the same systems here"
    assert set(failed(decide(slow_rot, WITH_FLOOR))) == {"no_worse", "no_worse_than_anchor"}
    assert set(failed(decide(one_class, WITH_FLOOR))) == {"class_recall"}
    others = with_candidate(passing, queries_sha256="others")
    assert set(failed(decide(others, WITH_FLOOR))) == {"same_test_set"}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("label_right", NAN, "accuracy_floor"),
        ("known_labels", (), "classes_kept"),
        ("false_rejects", None, "false_rejects"),
        ("false_rejects", NAN, "false_rejects"),
        ("class_label_right", {}, "class_recall"),
        ("class_label_right", {"4": NAN}, "class_recall"),
    ],
)
def test_missing_or_nan_metric_fails(passing: Evaluation, field, value, rule):
    verdict = decide(with_candidate(passing, **{field: value}), SETTINGS)
    assert rule in failed(verdict)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"comparison": None}, {"same_test_set", "no_worse", "class_recall"}),
        ({"refusals": None}, {"false_rejects"}),
        ({"leakage": {}}, {"test_images_unseen"}),
        ({"champion_test_overlap": None}, {"same_test_set"}),
        ({"champion_test_overlap": math.nan}, {"same_test_set"}),
    ],
)
def test_missing_section_fails(passing: Evaluation, changes, rules):
    assert set(failed(decide(passing.model_copy(update=changes), SETTINGS))) == rules


def test_false_rejects_hold_only_significantly_above_the_ceiling(passing: Evaluation):
    for count, total, passed in ((11, 100, True), (115, 1000, True), (150, 1000, False), (1000, 1000, False)):
        verdict = decide(with_candidate(passing, false_rejects=proportion(count, total, 0.95)), SETTINGS)
        assert verdict.promote == passed
    assert "100.00% (99.62% to 100.00%) of the known test images are called unknown" in verdict.reasons[0]
    assert decide(with_candidate(passing, false_rejects=proportion(1, 9, 0.95)), SETTINGS).promote
    strict = GateSettings(false_reject_ceiling=0.0)
    assert set(failed(decide(with_candidate(passing, false_rejects=proportion(1, 9, 0.95)), strict))) == {
        "false_rejects"
    }


@pytest.mark.parametrize(
    ("unknown", "accepted", "rules"),
    [
        ((70, 70), 5, set()),
        ((90, 30), 5, {"false_rejects"}),
        ((90, 30), 0, {"false_rejects"}),
        ((30, 90), 60, {"false_accepts"}),
        ((0, 90), 100, {"false_accepts"}),
        ((90, 60), 12, set()),
    ],
    ids=[
        "equal",
        "six points more are refused",
        "refused, for fewer unseen",
        "unseen are accepted, for fewer refused",
        "unknown is switched off",
        "three points and not significantly more",
    ],
)
def test_neither_known_nor_unseen_images_are_bought_with_the_other(unknown, accepted, rules):
    """All labels are right, and the ceiling alone would pass each candidate."""
    candidate, champion = (outcomes({}, unknown=count) for count in unknown)
    verdict = decide(accepting(simulation.make_evaluation(candidate, champion), accepted, 100), SETTINGS)
    assert set(failed(verdict)) == rules
    for rule in failed(verdict).values():
        assert rule.reason.endswith(" If this is intended, promote the release.")
        assert not rule.setting


def test_release_without_unknown_states_that_it_accepts_all(passing: Evaluation):
    off = accepting(passing, 100, 100)
    assert stated_false_accepts(off.metrics()).value == 1
    later = passing.model_copy(update={"champion_false_accepts": stated_false_accepts(off.metrics())})
    assert "false_accepts" not in failed(decide(accepting(later, 100, 100), SETTINGS))


def test_few_known_images_that_are_newly_refused_do_not_hold():
    """Of 18 images, two more are 11 points, and not significant."""
    candidate, champion = (outcomes({}, queries=2, unknown=count) for count in (2, 0))
    verdict = decide(simulation.make_evaluation(candidate, champion), SETTINGS)
    assert "false_rejects" not in failed(verdict)
    reason = next(rule.reason for rule in verdict.rules if rule.name == "false_rejects")
    assert "10.0% but not significantly more (p = 0.25, level 0.025)" in reason


def test_champion_without_a_probe_leaves_too_few_to_tell(passing: Evaluation):
    before = passing.model_copy(update={"champion_false_accepts": None})
    (rule,) = (rule for rule in decide(before, SETTINGS).rules if rule.name == "false_accepts")
    assert rule.result == "too few to tell"
    assert "The champion does not state" in rule.reason


def test_reused_network_and_threshold_accept_what_the_champion_accepts(passing: Evaluation):
    reused = passing.model_copy(update={"open_set": OpenSet(held_out=(), threshold=0.5)})
    assert "false_accepts" not in {rule.name for rule in decide(reused, SETTINGS).rules}
    now, before = (stated_false_accepts(evaluation.metrics()).model_dump() for evaluation in (reused, passing))
    assert now == pytest.approx(before)
    assert now["value"] == pytest.approx(0.05)


def test_a_reindex_with_more_classes_accepts_more_unseen_images(passing: Evaluation):
    """A tenth class was added to nine, and each accepts as many."""
    nine = passing.champion.model_copy(update={"known_labels": simulation.LABELS[:-1]})
    reused = passing.model_copy(update={"open_set": OpenSet(held_out=(), threshold=0.5), "champion": nine})
    stated = stated_false_accepts(reused.metrics())
    assert 1 - stated.value == pytest.approx((1 - 0.05) ** (10 / 9))
    assert 0 < stated.low < stated.value < stated.high < 1


def test_test_images_unlike_the_gallery_are_said_in_words(passing: Evaluation):
    """15.5% of the test split is unknown, and 5% of the images that set the threshold."""
    other = {"false_rejects": proportion(155, 1000, 0.95), "calibration_rejects": exact_proportion(10, 200, 0.95)}
    reason = failed(decide(with_candidate(passing, **other), SETTINGS))["false_rejects"].reason
    assert "significantly more than 10%. Your test images look different from your gallery: of the 200 query " in reason
    assert "5.00% are called unknown. Add images like the test images to the training images, or," in reason
    assert "data.group" in reason
    within = {"false_rejects": proportion(99, 1000, 0.95), "calibration_rejects": exact_proportion(10, 1000, 0.95)}
    verdict = decide(with_candidate(passing, **within), SETTINGS)
    assert verdict.promote
    assert "not significantly more than 10%. Your test images look different" in " ".join(verdict.reasons)
    grouped = decide(with_candidate(passing, **other, groups=40), SETTINGS)
    assert "Your test images look different" in failed(grouped)["false_rejects"].reason
    assert "data.group" not in failed(grouped)["false_rejects"].reason


@pytest.mark.parametrize(
    ("tested", "calibrated"), [((99, 1000), (10, 100)), ((1, 9), (0, 10)), ((60, 1000), (50, 1000)), ((0, 50), (0, 50))]
)
def test_test_images_like_the_gallery_get_no_advice(passing, tested, calibrated):
    alike = with_candidate(
        passing, false_rejects=proportion(*tested, 0.95), calibration_rejects=exact_proportion(*calibrated, 0.95)
    )
    assert "look different" not in " ".join(decide(alike, SETTINGS).reasons)
    assert "look different" not in " ".join(decide(with_candidate(alike, calibration_rejects=None), SETTINGS).reasons)


def test_reason_names_the_largest_class_regression():
    verdict = decide(simulation.make_evaluation(outcomes({1: 2, 8: 1}), outcomes({1: 1, 8: 1, 3: 9})), SETTINGS)
    assert verdict.promote
    reasons = {rule.name: rule.reason for rule in verdict.rules}
    assert reasons["class_recall"].endswith("the worst change is -1.0% for 1.")
    assert "9 improvements and 1 regression, not significantly worse" in reasons["no_worse"]


def test_worst_class_and_largest_fall_may_be_of_few_images(passing: Evaluation):
    """Class 4 is wrong on both of its two images, and class 3 on one of a hundred."""
    shares = {"3": proportion(99, 100, 0.95), "4": proportion(0, 2, 0.95)}
    pairs = {
        "3": PairedCounts(queries=100, regressions=1, improvements=0),
        "4": PairedCounts(queries=2, regressions=2, improvements=0),
    }
    comparison = passing.comparison.model_copy(update={"classes": pairs})
    few = with_candidate(passing, class_label_right=shares).model_copy(update={"comparison": comparison})
    settings = SETTINGS.model_copy(update={"class_recall_floor": 0.5})
    reason = next(rule.reason for rule in decide(few, settings).rules if rule.name == "class_recall")
    assert "for no class; the worst is 4 with 0.00%" in reason
    assert "Too few images to tell for 4." in reason
    assert reason.endswith("the worst change is -100.0% for 4. Too few images to tell for 1 class.")


def test_single_error_in_a_small_class_is_not_a_collapse():
    """With 18 queries per class, one additional error is 5.6 points; eighteen are a collapse."""
    champion = outcomes({1: 1}, queries=18)
    assert decide(simulation.make_evaluation(outcomes({1: 1, 4: 1}, queries=18), champion), SETTINGS).promote
    collapsed = simulation.make_evaluation(outcomes({1: 1, 4: 18}, queries=18), champion)
    assert {"class_recall"} <= set(failed(decide(collapsed, SETTINGS)))


def with_new_class(errors: dict[int, int]) -> Evaluation:
    """A champion without class 9, and a challenger with it and ``errors`` per class."""
    evaluation = simulation.make_evaluation(outcomes(errors), outcomes({1: 2, 8: 1, 9: 100}))
    champion = evaluation.champion.model_copy(update={"known_labels": simulation.LABELS[:-1]})
    return evaluation.model_copy(update={"champion": champion})


def test_new_class_passes_and_is_named():
    verdict = decide(with_new_class({1: 2, 8: 1, 9: 4}), SETTINGS)
    assert verdict.promote
    reasons = {rule.name: rule.reason for rule in verdict.rules}
    assert "New: 9 (96.0% named right, 4.0% named wrong, 0.0% called unknown)" in reasons["classes_kept"]
    assert "99.67% against the champion's 99.67% on the 900 images of classes that it knows" in reasons["no_worse"]


def test_new_class_does_not_offset_regressions_of_other_classes():
    """100 correct images in the new class, and 8 errors spread over the champion's classes."""
    losing = with_new_class({1: 5, 3: 2, 5: 2, 8: 2})
    assert losing.comparison.overall.improvements == 100
    assert set(failed(decide(losing, SETTINGS))) == {"no_worse", "no_worse_than_anchor"}


def test_tiny_p_value_is_not_printed_as_zero():
    verdict = decide(with_new_class({1: 60}), SETTINGS)
    assert "58 regressions, significantly worse (p < 0.001, level 0.08)" in failed(verdict)["no_worse"].reason


def test_unrecognized_new_class_fails():
    assert set(failed(decide(with_new_class({1: 2, 8: 1, 9: 70}), SETTINGS))) == {"class_recall"}


def test_disjoint_classes_fail():
    evaluation = with_new_class({})
    unrelated = evaluation.champion.model_copy(update={"known_labels": ("elsewhere",)})
    failures = failed(decide(evaluation.model_copy(update={"champion": unrelated}), SETTINGS))
    assert set(failures) == {"no_worse", "classes_kept", "class_recall"}


def test_class_without_test_images_is_named(passing: Evaluation):
    recalls = {label: recall for label, recall in passing.candidate.class_label_right.items() if label != "6"}
    verdict = decide(with_candidate(passing, class_label_right=recalls), SETTINGS)
    assert verdict.promote
    assert any("not measured: 6." in reason for reason in verdict.reasons)


def test_champion_leakage_is_reported_but_passes(passing: Evaluation):
    for leakage, words in ((UNSEEN | {"train": 7}, "built from 7 test images"), (None, "its leakage was not measured")):
        verdict = decide(passing.model_copy(update={"champion_leakage": leakage}), SETTINGS)
        assert verdict.promote
        assert any(words in reason for reason in verdict.reasons)


@pytest.fixture
def stored_verdict(tmp_path) -> Path:
    verdict = decide(simulation.make_evaluation(outcomes({4: 60}), outcomes({})), SETTINGS)
    assert not verdict.promote
    path = tmp_path / "verdict.json"
    path.write_text(verdict.model_dump_json(indent=2))
    return path


def test_verdict_survives_a_round_trip(stored_verdict: Path):
    verdict = Verdict.load(stored_verdict)
    assert not verdict.promote
    assert verdict.reasons
    assert verdict.model_dump_json(indent=2) == stored_verdict.read_text()


def test_inverted_verdict_is_rejected(stored_verdict: Path):
    tree = json.loads(stored_verdict.read_text())
    stored_verdict.write_text(json.dumps(tree | {"promote": True}))
    with pytest.raises(IntegrityError, match="changed after the gate"):
        Verdict.load(stored_verdict)
    stored_verdict.write_text(json.dumps(tree | {"rules": [], "promote": True}))
    with pytest.raises(IntegrityError, match="changed after the gate"):
        Verdict.load(stored_verdict)


@pytest.mark.parametrize("content", [None, "", "{}", "null", json.dumps(stamp() | {"promote": True})])
def test_invalid_verdict_is_rejected(stored_verdict: Path, content):
    stored_verdict.unlink()
    if content is not None:
        stored_verdict.write_text(content)
    with pytest.raises(IntegrityError, match="run the gate step again"):
        Verdict.load(stored_verdict)


def test_both_comparisons_with_the_champion_share_one_level():
    """Each rule at the whole level would hold 12% of equal candidates instead of 10%."""
    held, trials, case = 0, 100, simulation.Case("drawn", 1000, 0.9, 0.0, 0.6)
    for seed in range(trials):
        rules = {rule.name: rule for rule in decide(simulation.make_evaluation(*case.outcomes(seed)), SETTINGS).rules}
        held += not (rules["no_worse"].passed and rules["class_recall"].passed)
    assert rules["no_worse"].bound == pytest.approx(0.08)
    assert held <= 0.1 * trials


def test_verdict_states_the_smallest_loss_that_it_would_notice(passing: Evaluation):
    verdict = decide(passing, SETTINGS)
    (rule,) = [rule for rule in verdict.rules if rule.name == "no_worse"]
    stated = re.search(r"\. A loss of (\d\.\d) points is detected with 90% probability\.$", rule.reason)
    assert stated, rule.reason
    assert verdict.detectable_loss == pytest.approx(float(stated[1]) / 100, abs=0.0005)
    assert not verdict.caution


def test_near_duplicates_above_the_bound_hold_the_candidate_with_the_advice(passing: Evaluation):
    near = NearDuplicates(found=31, compared=100, test_images=100, seen=900, seen_images=900, advice="Do this.")
    rule = failed(decide(passing.model_copy(update={"near_duplicates": near}), SETTINGS))["test_images_unseen"]
    assert rule.reason.startswith(
        "The candidate was not built from any test image. But 31% of 100 test images are nearly"
    )
    assert rule.reason.endswith("Do this.")
    usual = passing.model_copy(update={"near_duplicates": near.model_copy(update={"found": 30})})
    assert decide(usual, SETTINGS).promote


def test_gate_counts_groups():
    """Twelve lost images are significant, and one lost scene is not."""
    ours, others = outcomes({1: 12}), outcomes({})
    assert "no_worse" in failed(decide(simulation.make_evaluation(ours, others), SETTINGS))
    groups = np.arange(1000, dtype=np.int32) // 20
    grouped = simulation.make_evaluation(
        Outcomes(ours.correct, ours.labels, groups), Outcomes(others.correct, others.labels, groups)
    )
    assert "no_worse" not in failed(decide(grouped, SETTINGS))
