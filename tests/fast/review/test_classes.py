"""Which classes a person may have meant, and which wait for more images."""

import pytest

from evernear.review.answers import Answer, meant_classes, waiting_classes
from tests.review_queue import NOW

KNOWN = ["seven", "eight", "cat", "dog", "Coffee Cup", "person 12", "7", "café"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sevn", ["seven"]),
        ("svene", ["seven"]),
        ("SEVEN", ["seven"]),
        ("dgo", ["dog"]),
        ("catt", ["cat"]),
        ("coffee-cup", ["Coffee Cup"]),
        ("coffeecup", ["Coffee Cup"]),
        ("Person  12", ["person 12"]),
        ("07", ["7"]),
        ("cafe", ["café"]),
    ],
)
def test_mistyped_name_leads_to_the_class(typed: str, meant: list[str]) -> None:
    assert meant_classes(typed, KNOWN)[:1] == meant


@pytest.mark.parametrize("typed", ["bicycle", "person 13", "77", "8", "x", "tulip"])
def test_other_names_are_not_asked_about(typed: str) -> None:
    assert meant_classes(typed, KNOWN) == []


def named(number: int, label: str, action: str = "label") -> Answer:
    fields = {"image": f"{number:064x}", "action": action, "label": label, "who": "ann", "at": NOW}
    return Answer.model_validate(fields)


def test_class_waits_until_it_has_enough_images() -> None:
    answers = [named(1, "sevn"), named(2, "seven"), named(3, "seven"), named(4, "cat"), named(5, "", "skip")]
    assert waiting_classes(answers, {"cat"}, 3) == {"seven": 2, "sevn": 1}
    assert waiting_classes(answers, {"cat"}, 2) == {"sevn": 1}
