"""The sentence with which every page, message and command describes a release."""

import pytest

from evernear.evaluation.headline import AnswerCounts, headline


def test_unknown_images_are_counted_beside_right_and_wrong_ones():
    counts = AnswerCounts(named_right=14, named_wrong=0, called_unknown=4)
    assert counts.sentence() == "of 18 test images: 14 named right, 0 named wrong, 4 called unknown"
    assert headline(counts.model_dump() | {"label_right": 1.0}) == counts.sentence()


def test_numbers_and_nouns_agree():
    counts = AnswerCounts(named_right=1, named_wrong=0, called_unknown=0)
    assert counts.sentence("query", "queries") == "of 1 query: 1 named right, 0 named wrong, 0 called unknown"
    many = AnswerCounts(named_right=9961, named_wrong=21, called_unknown=1018)
    assert many.sentence("query", "queries").startswith("of 11,000 queries: 9,961 named right")


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({}, ""),
        ({"classes": 10.0, "tested_classes": 8.0}, ""),
        (
            {"named_right": 1.0, "named_wrong": 2.0, "called_unknown": 3.0, "classes": 10.0, "tested_classes": 8.0},
            "of 6 test images: 1 named right, 2 named wrong, 3 called unknown (8 of 10 classes tested)",
        ),
    ],
)
def test_untested_classes_are_said(metrics: dict[str, float], sentence: str):
    assert headline(metrics) == sentence
