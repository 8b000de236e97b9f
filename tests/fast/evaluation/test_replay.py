"""Counts of changed answers to live queries, and the examples on the run page."""

import numpy as np
import pytest

from evernear.evaluation.examples import SHOWN, Answer, Replayed, changed_answers, count_changes
from evernear.settings import ClassSettings

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
