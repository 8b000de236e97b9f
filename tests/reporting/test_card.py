"""The verdict card: a small self-contained page that starts with the reasons."""

import html
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from evernear.evaluation.evaluate import evaluate
from evernear.evaluation.gate import decide
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.probe import assess
from evernear.evaluation.recognizer import Recognizer
from evernear.reporting.card import confusion_png, verdict_card
from evernear.settings import EvaluationSettings, GateSettings, IndexSettings
from tests.conftest import System

NEAR_AND_FAR = np.linspace(0, 1, 50, dtype=np.float32), np.linspace(0.5, 1.5, 50, dtype=np.float32)
ALIKE = NEAR_AND_FAR[0], NEAR_AND_FAR[0]


@pytest.fixture(scope="module")
def recognizer(system: System) -> Recognizer:
    return Recognizer.open(system.network_dir, system.index_dir, "20260101.000000.00000000")


@pytest.mark.parametrize(
    ("open_set", "explanation"),
    [
        (OpenSet(held_out=()), "was calibrated on gallery impostors"),
        (OpenSet(held_out=(), threshold=0.4), "was reused together with the network"),
        (assess(*NEAR_AND_FAR, *NEAR_AND_FAR, IndexSettings(), 0.95), "known images take precedence"),
        (assess(*ALIKE, *ALIKE, IndexSettings(), 0.95), "Unknown is switched off"),
    ],
)
def test_card_is_small_self_contained_and_starts_with_the_reasons(
    system: System, recognizer: Recognizer, open_set: OpenSet, explanation: str
) -> None:
    evaluation = evaluate(recognizer, recognizer, system.dataset, open_set, EvaluationSettings(), system.dataset)
    for floor, title in ((0.5, "Promote: "), (1.0, "Hold: ")):
        verdict = decide(evaluation, GateSettings(accuracy_floor=floor))
        card = verdict_card(verdict, evaluation)
        assert len(card) < 64 * 1024
        assert "None" not in card
        assert explanation in card
        assert not [word for word in ("<script", "src=", "@import", "url(http") if word in card]
        start = card.index("<h1>") + len("<h1>")
        assert card[start:].startswith(title)
        top = card[: card.index("<h2>")]
        assert [html.unescape(item) for item in re.findall("<li>(.*?)</li>", top)] == verdict.reasons


def test_card_shows_warnings_of_the_training(system: System, recognizer: Recognizer) -> None:
    measured = evaluate(
        recognizer, None, system.dataset, OpenSet(held_out=()), EvaluationSettings(), system.dataset
    ).model_copy(update={"training_warnings": ("Training collapsed after epoch 1.",)})
    assert "Training collapsed after epoch 1." in verdict_card(decide(measured, GateSettings()), measured)


def test_card_accepts_any_class_name(system: System, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib would parse text between two dollar signs as a formula, and raise if it is invalid."""
    evaluation = evaluate(recognizer, recognizer, system.dataset, OpenSet(held_out=()), EvaluationSettings())
    matrix = (
        ["$1_$2", "a<b&c", "\x1b[31m\x00", "\u202egod\nline"],
        [[3, 1, 0, 0], [0, 4, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    )
    monkeypatch.setattr(type(evaluation.candidate), "confusion_matrix", lambda _: matrix)
    reason = "<script>alert(1)</script> \x1b[31m \u202egod"
    verdict = decide(evaluation, GateSettings()).model_copy(update={"reasons": [reason]})
    card = verdict_card(verdict, evaluation)
    assert "$1_$2" in card
    assert "a&lt;b&amp;c" in card
    assert card.count(r"\x1b[31m\x00") == card.count(r"\u202egod\nline") == 2, "once per axis"
    assert r"<li>&lt;script&gt;alert(1)&lt;/script&gt; \x1b[31m \u202egod</li>" in card
    assert all(line.isprintable() for line in card.splitlines())
    assert confusion_png(evaluation).startswith(b"\x89PNG")


@pytest.mark.parametrize("names", [["short", "x" * 40], [f"{number} {'x' * 90} {number}" for number in range(10)]])
def test_long_class_names_are_shortened(
    recognizer: Recognizer, system: System, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Names cut off at the edge of the figure would not identify their classes."""
    evaluation = evaluate(recognizer, recognizer, system.dataset, OpenSet(held_out=()), EvaluationSettings())
    rows = [[int(i == j) for j in range(len(names))] for i in range(len(names))]
    monkeypatch.setattr(type(evaluation.candidate), "confusion_matrix", lambda _: (names, rows))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    confusion_png(evaluation)
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.bbox.width > 0.25 * figure.bbox.width
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        box = label.get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert [(text[0], text[-1]) for text in texts] == [(name[0], name[-1]) for name in names]
