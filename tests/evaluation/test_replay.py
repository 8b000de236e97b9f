"""The rule that compares answers to live queries with answers to the test split."""

import numpy as np
import pytest
from numpy.typing import NDArray

from evernear.evaluation.replay import (
    LACKING,
    RETIRED,
    AnswerNumbers,
    Answers,
    ChangeCounts,
    PairedAnswers,
    Replay,
    compare_answers,
    p_explained,
    replay_rule,
    unexpected_errors,
)
from evernear.settings import ClassSettings, GateSettings

CLASSES = 10
LABELS = tuple("abcdefghij")
KNOWN = np.arange(CLASSES, dtype=np.int32)
SETTINGS = GateSettings()


def retrained(rng: np.random.Generator, count: int, difficulty: float = 1.0) -> PairedAnswers:
    """Two equally good systems: each errs, and rejects,
    independently and more often on difficult images.
    """
    truth = rng.integers(0, CLASSES, count).astype(np.int32)
    hardness = rng.beta(1, 6 / difficulty, count)

    def answer() -> Answers:
        wrong = rng.random(count) < 0.4 * hardness
        labels = np.where(wrong, (truth + rng.integers(1, CLASSES, count)) % CLASSES, truth).astype(np.int32)
        distances = (hardness + 0.05 * rng.random(count)).astype(np.float32)
        return Answers(labels, distances, rng.random(count) < hardness**2)

    return PairedAnswers(answer(), answer())


def damaged(pairs: PairedAnswers, labels: NDArray[np.int32] | None = None, unknown: NDArray[np.bool_] | None = None):
    after = pairs.candidate
    return PairedAnswers(
        pairs.champion,
        Answers(
            after.labels if labels is None else labels,
            after.distances,
            after.unknown if unknown is None else unknown,
        ),
    )


def rule_for(live: PairedAnswers, test: PairedAnswers, unexpected: float = 0.0):
    return replay_rule(compare_answers(live, test, LABELS, KNOWN, unexpected), SETTINGS)


@pytest.mark.parametrize("difficulty", [1.0, 2.0])
@pytest.mark.parametrize("test_images", [50, 400, 3000])
def test_equal_retrainings_pass_even_if_live_queries_are_more_difficult(difficulty: float, test_images: int):
    rng = np.random.default_rng(0)
    verdicts = [rule_for(retrained(rng, 500, difficulty), retrained(rng, test_images)).passed for _ in range(100)]
    assert sum(verdicts) >= 95


def test_exchanged_classes_are_held():
    rng = np.random.default_rng(1)
    for _ in range(20):
        live, test = retrained(rng, 500), retrained(rng, 300)
        exchanged = live.candidate.labels.copy()
        exchanged[live.candidate.labels == 3], exchanged[live.candidate.labels == 4] = 4, 3
        rule = rule_for(damaged(live, labels=exchanged), test)
        assert not rule.passed
        assert "d (" in rule.reason
        assert "e (" in rule.reason


def test_queries_that_are_now_unknown_are_held():
    rng = np.random.default_rng(2)
    live, test = retrained(rng, 500), retrained(rng, 300)
    assert not rule_for(damaged(live, unknown=live.candidate.unknown | (rng.random(500) < 0.25)), test).passed


def test_the_proposed_setting_lets_the_candidate_pass():
    replay = Replay(queries=100, groups=(ChangeCounts(queries=100, changed=20, images=100, explained=1),))
    rule = replay_rule(replay, SETTINGS)
    assert not rule.passed
    key, _, value = rule.setting.partition("=")
    assert key == "gate.replay_change"
    assert replay_rule(replay, GateSettings(replay_change=float(value))).passed


def test_a_lost_class_among_many_is_held():
    groups = (ChangeCounts(queries=490, changed=20, images=1000, explained=20), ChangeCounts())
    classes = {str(number): ChangeCounts(queries=10, changed=0, images=20, explained=0) for number in range(48)}
    lost = {"lost": ChangeCounts(queries=10, changed=10, images=20, explained=0)}
    assert replay_rule(Replay(queries=490, groups=groups, classes=classes), SETTINGS).passed
    rule = replay_rule(Replay(queries=490, groups=groups, classes=classes | lost), SETTINGS)
    assert not rule.passed
    assert "most answers of lost (10 of 10, 0.0 explained)" in rule.reason
    assert not rule.setting


def test_labels_exchanged_in_the_whole_dataset_are_held():
    """The candidate agrees with the test split,
    and the champion disagrees with it as with the live queries.
    """
    rng = np.random.default_rng(3)
    live, test = retrained(rng, 500), retrained(rng, 400)
    shuffled = rng.permutation(CLASSES).astype(np.int32)
    live, test = (damaged(pairs, labels=shuffled[pairs.candidate.labels]) for pairs in (live, test))
    assert rule_for(live, test).passed
    assert not rule_for(live, test, unexpected_errors(360, 400, 400, 0.95)).passed
    # The champion was tested on none of these images, so it may not know their kind.
    assert rule_for(live, test, unexpected_errors(360, 400, 0, 0.95)).passed
    assert unexpected_errors(20, 400, 400, 0.95) == pytest.approx(0)


def test_answers_with_new_and_retired_classes_count_apart():
    rng = np.random.default_rng(4)
    live, test = retrained(rng, 500), retrained(rng, 300)
    labels = np.where(rng.random(500) < 0.3, CLASSES, live.candidate.labels).astype(np.int32)
    replay = compare_answers(damaged(live, labels=labels), test, (*LABELS, "new"), KNOWN)
    rule = replay_rule(replay, SETTINGS)
    assert replay.new_class > 50
    assert rule.passed
    assert f"{replay.new_class:,} answered with a class that the champion does not know" in rule.reason
    retired = Answers(
        np.where(live.champion.labels == 0, RETIRED, live.champion.labels).astype(np.int32),
        live.champion.distances,
        live.champion.unknown,
    )
    replay = compare_answers(PairedAnswers(retired, live.candidate), test, LABELS, KNOWN)
    assert replay.retired > 20
    assert replay_rule(replay, SETTINGS).passed


@pytest.mark.parametrize("count", [0, 20])
def test_too_few_queries_hold_nothing_and_say_so(count: int):
    rng = np.random.default_rng(5)
    live = retrained(rng, count)
    rule = rule_for(damaged(live, unknown=~live.candidate.unknown), retrained(rng, 300))
    assert rule.passed
    expected = "No stored query" if count == 0 else "a change of live answers is not detected"
    assert expected in rule.reason


def test_no_test_image_that_the_champion_recognizes():
    rng = np.random.default_rng(6)
    test = retrained(rng, 40)
    champion = Answers(test.champion.labels, test.champion.distances, np.ones(40, np.bool_))
    assert rule_for(retrained(rng, 500), PairedAnswers(champion, test.candidate)).passed


def test_a_class_that_the_dataset_lost_with_its_test_images_is_held():
    rng = np.random.default_rng(7)
    live, test = retrained(rng, 500), retrained(rng, 400)
    remaining = np.flatnonzero(test.champion.labels != 3)
    test = PairedAnswers(
        *(
            Answers(each.labels[remaining], each.distances[remaining], each.unknown[remaining])
            for each in (test.champion, test.candidate)
        )
    )
    rule = rule_for(damaged(live, unknown=live.candidate.unknown | (live.champion.labels == 3)), test)
    assert not rule.passed
    assert "most answers of d (" in rule.reason


def test_p_value_of_one_group_is_that_of_fishers_exact_test():
    from scipy.stats import fisher_exact

    group = ChangeCounts(queries=40, changed=9, images=60, explained=3)
    _, expected = fisher_exact([[9, 31], [3, 57]], alternative="greater")
    assert p_explained((group,)) == pytest.approx(expected)
    assert p_explained((group, ChangeCounts(queries=5))) == pytest.approx(expected)
    assert p_explained(()) == 1.0


def test_names_of_the_champion_are_renamed_retired_or_lacking():
    numbers = AnswerNumbers(("cup", "plate"), ClassSettings(renamed={"mug": "cup"}, retired=("fork",)))
    assert [numbers.of_champion(name) for name in ("mug", "plate", "fork", "spoon")] == [0, 1, RETIRED, LACKING]
