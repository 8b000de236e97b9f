"""Live accuracy: coverage of the intervals, power of the test for a loss, and its false alarms."""

from datetime import UTC, datetime

import numpy as np
import pytest

from evernear.evaluation.examples import SHOWN, Answer, Replayed, changed_answers, count_changes
from evernear.evaluation.live_accuracy import (
    LEVEL,
    ExpectedAccuracy,
    LabeledQuery,
    accuracy_by_week,
    assess,
    expected_accuracy,
    is_loss,
)
from evernear.evaluation.statistics import proportion
from evernear.settings import ClassSettings

RNG_SEED = 7


def labeled(at: datetime, version: str, *, correct: bool) -> LabeledQuery:
    return LabeledQuery(
        id="1",
        at=at,
        version=version,
        pred="a",
        unknown=False,
        dist=0.1,
        log="",
        label="a" if correct else "b",
        labeled_at=at,
    )


def test_accuracy_is_counted_by_release_and_iso_week() -> None:
    december, january = datetime(2026, 12, 31, tzinfo=UTC), datetime(2027, 1, 4, tzinfo=UTC)
    queries = [labeled(december, "old", correct=True), labeled(december, "new", correct=False)]
    queries += [labeled(january, "new", correct=number > 0) for number in range(4)]
    weeks = [
        (each.week, each.version, each.label_right.count, each.label_right.total) for each in accuracy_by_week(queries)
    ]
    assert weeks == [("2027-W01", "new", 3, 4), ("2026-W53", "old", 1, 1), ("2026-W53", "new", 0, 1)]


def test_figures_are_also_said_without_corrected_labels() -> None:
    at = datetime(2026, 12, 31, tzinfo=UTC)
    queries = [labeled(at, "v", correct=number > 0) for number in range(4)]
    corrected = queries[1].model_copy(update={"first_label": "b"})
    kept = queries[0].model_copy(update={"first_label": "b"})
    (week,) = accuracy_by_week([kept, corrected, *queries[2:]])
    assert week.counts == (
        "of 4 labeled live queries: 3 named right, 1 named wrong, 0 called unknown; without the corrected labels, "
        "of 3 labeled live queries: 2 named right, 1 named wrong, 0 called unknown"
    )


def drawn(truth: float, images: int, rng: np.random.Generator) -> ExpectedAccuracy:
    """The accuracy on a random test split."""
    return ExpectedAccuracy(rng.binomial(images, truth) / images, images)


@pytest.mark.parametrize(
    ("truth", "images", "power", "labels_before"),
    [(0.97, 200, 0.9, 0), (0.95, 1000, 0.9, 433), (0.88, 10_000, 0.82, 0), (0.8, 10_000, 0.7, 433)],
)
def test_loss_of_ten_points_is_found_within_150_labels(truth, images, power, labels_before) -> None:
    rng = np.random.default_rng(RNG_SEED)
    months = np.repeat([0, 12], [labels_before, 150])
    accuracy = np.where(np.arange(len(months)) < labels_before, truth, truth - 0.1)
    found = [
        is_loss(rng.random(len(months)) < accuracy, months, drawn(truth, images, rng))[labels_before:].any()
        for _ in range(200)
    ]
    assert np.mean(found) >= power - 0.042, "two standard deviations"


@pytest.mark.parametrize(
    ("truth", "images", "month_labels"), [(0.7, 50, 40), (0.8, 50, 433), (0.93, 1000, 40), (0.995, 200, 433)]
)
def test_no_loss_is_seldom_called_one_in_any_month(truth: float, images: int, month_labels: int) -> None:
    rng = np.random.default_rng(RNG_SEED)
    months = np.repeat(np.arange(4), month_labels)
    lost = [is_loss(rng.random(len(months)) < truth, months, drawn(truth, images, rng)) for _ in range(400)]
    monthly = np.array(lost).reshape(400, 4, month_labels).any(axis=2)
    assert monthly.mean(axis=0).max() <= 0.041, "2% are 8 with a standard deviation of 2.8"
    assert monthly.mean() <= 0.025


def test_total_loss_is_found_with_the_labels_of_two_weeks() -> None:
    assert is_loss(np.zeros(24, np.bool_), np.zeros(24, np.int_), ExpectedAccuracy(0.8, 1000)).any()


@pytest.mark.parametrize("lost_after", [400, 2000, 6000])
def test_loss_in_the_middle_of_a_month_is_found_in_it_if_labels_are_many(lost_after: int) -> None:
    correct = np.arange(10_000) % 10 > 0
    correct[lost_after:] &= np.arange(10_000 - lost_after) % 9 > 0
    lost = is_loss(correct, np.zeros(10_000, np.int_), ExpectedAccuracy(0.9, 10_000))
    assert lost_after < lost.argmax() < 1.5 * lost_after + 300


def test_few_labels_a_month_add_up() -> None:
    correct = np.arange(150) % 5 > 0
    lost = is_loss(correct, np.arange(150) // 50, ExpectedAccuracy(0.93, 1000))
    assert lost.argmax() > 50


def test_levels_of_a_month_add_up_to_at_most_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []
    monkeypatch.setattr(
        "evernear.evaluation.live_accuracy._limit", lambda expected, labels, level: spent.append(level) or labels
    )
    is_loss(np.ones(100_000, np.bool_), np.zeros(100_000, np.int_), ExpectedAccuracy(0.9, 100))
    assert 0.999 * LEVEL < sum(spent) <= LEVEL


def test_loss_is_said_with_its_interval_and_what_was_expected() -> None:
    now = datetime(2027, 1, 4, tzinfo=UTC)
    worse = [labeled(now, "v", correct=number % 4 > 0) for number in range(100)]
    found = assess(worse, ExpectedAccuracy(0.931, 1000), now)
    assert found.loss == pytest.approx(0.181)
    assert "75.00% (65.34% to 83.12%). Since 2027-01-04, this is significantly less than the 93.1% on" in str(found)
    equal = assess(worse, ExpectedAccuracy(0.74, 1000), now)
    assert (equal.loss, equal.lost_at) == (0.0, None)
    assert "75.00% (65.34% to 83.12%), not significantly less" in str(equal)
    assert assess([], ExpectedAccuracy(0.9, 100), now) is None
    unexpected = assess(worse, None, now)
    assert (unexpected.loss, unexpected.lost_at) == (0.0, None)


def test_release_without_errors_on_its_test_split_can_lose() -> None:
    now = datetime(2027, 1, 4, tzinfo=UTC)
    found = assess([labeled(now, "v", correct=number % 4 > 0) for number in range(100)], ExpectedAccuracy(1, 50), now)
    assert found.lost_at == now


def test_assessment_is_of_this_month_and_the_one_before() -> None:
    bad, good = datetime(2026, 11, 30, tzinfo=UTC), datetime(2027, 1, 4, tzinfo=UTC)
    queries = [labeled(bad, "v", correct=False)] * 50 + [labeled(good, "v", correct=True)] * 10
    expected = ExpectedAccuracy(0.9, 1000)
    assert assess(queries[:50], expected, good) is None
    december = assess(queries, expected, datetime(2026, 12, 31, 23, tzinfo=UTC))
    january = assess(queries, expected, good)
    assert december.lost_at == bad
    assert december.label_right.total == 60
    assert january.label_right.total == 10


def test_few_errors_are_no_loss() -> None:
    month, expected = np.zeros(20, np.int_), ExpectedAccuracy(0.9, 1000)
    assert not is_loss(np.array([False]), month[:1], expected).any()
    assert is_loss(np.zeros(20, np.bool_), month, expected).any()
    assert not is_loss(np.zeros(20, np.bool_), month, ExpectedAccuracy(0.08, 1000)).any()


@pytest.mark.parametrize(("count", "images"), [(50, 50), (930, 1000), (19, 20)])
def test_number_of_test_images_follows_from_the_interval(count: int, images: int) -> None:
    accuracy = proportion(count, images, 0.95)
    metrics = {"label_right": accuracy.value, "label_right_low": accuracy.low}
    expected = expected_accuracy(metrics)
    assert (expected.value, expected.images) == (accuracy.value, pytest.approx(images))


def test_too_few_labels_are_not_called_insignificant() -> None:
    now = datetime(2027, 1, 4, tzinfo=UTC)
    few = assess([labeled(now, "v", correct=False)] * 2, ExpectedAccuracy(0.93, 1000), now)
    assert str(few).endswith("too few labels to compare it with the 93.0% on the test split.")
    unknown = assess([labeled(now, "v", correct=False)] * 2, None, now)
    assert str(unknown).endswith("On the test split, it is unknown.")


def test_images_of_groups_count_as_fewer() -> None:
    grouped = proportion(930, 1000, 0.95, effective=100)
    metrics = {"label_right": 0.93, "label_right_low": grouped.low, "test_images": 1000}
    few = expected_accuracy(metrics)
    assert few.images == pytest.approx(100)
    assert expected_accuracy({"label_right": 0.9}) is None
    assert expected_accuracy({"label_right": 0.0, "label_right_low": 0.0}) is None


# Changed answers to live queries


IMAGE = np.zeros((8, 8, 1), np.uint8)
CLASSES = ClassSettings(renamed={"mug": "cup"}, retired=("fork",))
KNOWN = ("cup", "plate")


def replayed(before: str, after: str, dist: float = 0.5) -> Replayed:
    """A query with two answers. A question mark stands for an answer that is called unknown."""
    answers = (Answer(name.strip("?"), dist, name.startswith("?")) for name in (before, after))
    return Replayed(IMAGE, *answers)


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        ("plate", "plate", set()),
        ("mug", "cup", set()),  # renamed on purpose
        ("?plate", "?cup", set()),  # unknown is one answer
        ("plate", "cup", {"changed"}),
        ("plate", "spoon", {"changed", "new_class"}),
        ("fork", "cup", {"changed", "retired"}),
        ("?plate", "plate", {"changed", "now_recognized"}),
        ("plate", "?plate", {"changed", "now_unknown"}),
    ],
)
def test_changes_are_counted_by_kind(before: str, after: str, counted: set[str]):
    counts = count_changes([replayed(before, after)], CLASSES, KNOWN)
    assert counts.queries == 1
    kinds = ("changed", "new_class", "retired", "now_recognized", "now_unknown")
    assert {kind for kind in kinds if getattr(counts, kind)} == counted


def test_least_expected_changes_are_shown_first():
    queries = [replayed("plate", "cup", dist / 100) for dist in range(60, 0, -1)]
    queries += [replayed("?plate", "cup", 0.0), replayed("cup", "cup", 0.0)]
    examples = changed_answers(queries, CLASSES, IMAGE.shape)
    assert len(examples.answers) == SHOWN
    assert [answer.before_distance for answer in examples.answers[:3]] == [0.01, 0.02, 0.03]
    few = changed_answers(queries[-2:], CLASSES, IMAGE.shape).answers
    assert [(answer.before, answer.before_unknown, answer.after) for answer in few] == [("plate", True, "cup")]
