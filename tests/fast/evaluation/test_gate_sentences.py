"""The gate's sentences about random evaluations are those that were recorded.

``python -m tests.fast.evaluation.test_gate_sentences`` records them again, after a change of a
sentence.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gate as simulation
from evernear.data.near_duplicates import NearDuplicates
from evernear.evaluation.baselines import Baseline, FewGroups
from evernear.evaluation.compare import PairedCounts, mcnemar_worse
from evernear.evaluation.evaluate import AnchorEvaluation, Evaluation
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import Outcomes
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import Interval, proportion
from evernear.settings import ClassSettings, GateSettings

RECORDED = Path(__file__).parent / "gate_sentences.json"
SEEDS = 80


def sentences(seed: int) -> dict[str, Any]:
    """What the verdict about a random evaluation says."""
    draw = np.random.default_rng(seed)
    verdict = decide(random_evaluation(draw), random_settings(draw))
    rules = {
        rule.name: f"{rule.result}: {rule.reason}{f' [{rule.setting}]' if rule.setting else ''}"
        for rule in verdict.rules
    }
    said: dict[str, Any] = {"summary": verdict.summary(), **rules}
    if verdict.caution:
        said["caution"] = verdict.caution
    if verdict.anchor:
        said["anchor"] = verdict.anchor.model_dump(exclude_defaults=True)
    return said


def maybe(draw: np.random.Generator, share: float) -> bool:
    return bool(draw.random() < share)


def random_settings(draw: np.random.Generator) -> GateSettings:
    return GateSettings(
        accuracy_floor=float(draw.choice([0.0, 0.5, 0.95])),
        class_recall_floor=float(draw.choice([0.0, 0.5, 0.8])),
        false_reject_ceiling=float(draw.choice([0.05, 0.3, 1.0])),
        on_undetected_loss="hold" if maybe(draw, 0.2) else "warn",
        beat_baseline=maybe(draw, 0.7),
    )


def random_outcomes(draw: np.random.Generator, labels: np.ndarray, groups: np.ndarray | None) -> Outcomes:
    errors = draw.random(10) * float(draw.choice([0.05, 0.3, 0.9]))
    correct = draw.random(len(labels)) >= errors[labels]
    return Outcomes(correct, labels, groups, draw.random(len(labels)) < float(draw.choice([0.0, 0.02, 0.4])))


def random_evaluation(draw: np.random.Generator) -> Evaluation:
    queries = int(draw.choice([1, 4, 20, 100, 400]))
    labels = np.repeat(np.arange(10, dtype=np.int32), queries)
    groups = np.arange(len(labels), dtype=np.int32) // 5 if maybe(draw, 0.2) else None
    candidate, champion, anchor = (random_outcomes(draw, labels, groups) for _ in range(3))
    if maybe(draw, 0.5):  # nearly as good
        flipped = draw.random(len(labels)) < 0.02
        candidate = Outcomes(champion.correct ^ flipped, labels, groups, champion.unknown)
    evaluation = simulation.make_evaluation(candidate, champion, anchor=anchor if maybe(draw, 0.4) else None)
    if maybe(draw, 0.3):
        return evaluation.model_copy(update=without_champion(draw, evaluation))
    changes = {**changes_of_test_images(draw), **changes_of_systems(draw, evaluation)}
    return evaluation.model_copy(update=changes)


def without_champion(draw: np.random.Generator, evaluation: Evaluation) -> dict[str, Any]:
    baselines = tuple(random_baseline(draw, number) for number in range(int(draw.integers(4))))
    few = FewGroups(
        test_groups=3,
        groups=20,
        needed=5,
        dataset="birds",
        test_fraction=0.4 if maybe(draw, 0.5) else None,
        is_named_by_source=maybe(draw, 0.5),
    )
    candidate = evaluation.candidate
    if maybe(draw, 0.5):
        candidate = candidate.model_copy(update={"groups": 12})
    if maybe(draw, 0.3):  # no better than chance
        confusions = tuple((label, simulation.LABELS[0], 10, 0) for label in simulation.LABELS)
        candidate = candidate.model_copy(update={"confusions": confusions, "label_right": proportion(10, 100, 0.95)})
    return {
        "champion": None,
        "comparison": None,
        "anchor": None,
        "refusals": None,
        "candidate": candidate,
        "baselines": baselines,
        "few_groups": few if maybe(draw, 0.5) else None,
        **changes_of_test_images(draw),
    }


def random_baseline(draw: np.random.Generator, number: int) -> Baseline:
    total = int(draw.choice([4, 100]))
    correct = int(draw.integers(total + 1))
    return Baseline(
        name=f"baseline {number}",
        label_right=proportion(correct, total, 0.95),
        comparison=PairedCounts(
            queries=total,
            regressions=int(draw.integers(total // 3 + 1)),
            improvements=int(draw.integers(total // 2 + 1)),
        ),
        p_perfect=mcnemar_worse(total - correct, 0),
        p_worst=mcnemar_worse(correct, 0),
        p_by_chance=float(draw.choice([0.0, 0.5])),
        ignores_images=number == 0,
        is_part=maybe(draw, 0.3),
    )


def changes_of_test_images(draw: np.random.Generator) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if maybe(draw, 0.2):
        changes["leakage"] = {} if maybe(draw, 0.3) else {"train": 2, "gallery": 0, "query": 1}
    if maybe(draw, 0.2):
        near = NearDuplicates(found=40, compared=90, test_images=100, seen=50, seen_images=80, advice="Set data.group.")
        changes["near_duplicates"] = near
    if maybe(draw, 0.2):
        changes["unreadable"] = {str(draw.choice(["training", "champion"])): "manifests/1.json is damaged."}
    if maybe(draw, 0.2):
        changes["champion_leakage"] = None if maybe(draw, 0.5) else {"train": 7}
    if maybe(draw, 0.2):
        changes["champion_test_overlap"] = None if maybe(draw, 0.3) else 0.62
    if maybe(draw, 0.2):
        changes["reviewed_left_out"] = {"test": 4}
    return changes


def changes_of_systems(draw: np.random.Generator, evaluation: Evaluation) -> dict[str, Any]:
    assert evaluation.champion is not None
    candidate: dict[str, Any] = {}
    champion: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    total = evaluation.candidate.label_right.total
    if maybe(draw, 0.15):
        candidate["known_labels"] = simulation.LABELS[:-2]
    if maybe(draw, 0.15):
        champion["known_labels"] = simulation.LABELS[3:]
    if maybe(draw, 0.1):
        champion["known_labels"] = ()
    if maybe(draw, 0.1):
        candidate["class_label_right"] = {} if maybe(draw, 0.5) else {"4": proportion(1, 3, 0.95)}
    if maybe(draw, 0.1):
        candidate["false_rejects"] = None
    elif maybe(draw, 0.4):
        total = int(draw.choice([1, total]))
        candidate["false_rejects"] = proportion(int(draw.integers(total + 1)), total, 0.95)
        candidate["calibration_rejects"] = proportion(2, 100, 0.95)
    if maybe(draw, 0.1):
        candidate["threshold"] = 2.0
    if maybe(draw, 0.1):
        candidate["queries_sha256"] = "others"
    if maybe(draw, 0.2):
        changes["classes"] = ClassSettings(retired=("old",), renamed={"1": "one"})
    if maybe(draw, 0.1):
        changes["comparison"] = None
    if maybe(draw, 0.1):
        changes["refusals"] = None
    if maybe(draw, 0.5):
        accepted = None if maybe(draw, 0.2) else proportion(int(draw.integers(61)), 60, 0.95)
        changes["open_set"] = evaluation.open_set.model_copy(update={"false_accepts": accepted})
    if maybe(draw, 0.2):
        changes["champion_false_accepts"] = None if maybe(draw, 0.3) else Interval(value=0.1, low=0.05, high=0.2)
    if maybe(draw, 0.1):
        changes["open_set"] = evaluation.open_set.model_copy(update={"false_accepts": proportion(250, 2000, 0.95)})
        changes["champion_false_accepts"] = Interval(value=0.1, low=0.099, high=0.101)
    elif maybe(draw, 0.1):
        changes["open_set"] = OpenSet(held_out=(), threshold=1.0)
    if maybe(draw, 0.2):
        changes["anchor"] = random_anchor(draw, evaluation)
    return changes | {
        "candidate": evaluation.candidate.model_copy(update=candidate),
        "champion": evaluation.champion.model_copy(update=champion),
    }


def random_anchor(draw: np.random.Generator, evaluation: Evaluation) -> AnchorEvaluation:
    kind = int(draw.integers(4))
    if kind == 0:
        return AnchorEvaluation(name="v1", fault="Release v1 does not exist in file:///store.")
    if kind == 1:
        return AnchorEvaluation(name="v1", difference="Its images have another shape.")
    return AnchorEvaluation(
        name="v1",
        measurement=evaluation.champion,
        comparison=evaluation.comparison if kind == 2 else None,
        test_overlap=float(draw.choice([0.3, 1.0])) if maybe(draw, 0.8) else None,
    )


@pytest.mark.parametrize("start", range(0, SEEDS, 20))
def test_every_sentence_is_as_recorded(start: int) -> None:
    recorded = json.loads(RECORDED.read_text())
    for seed in range(start, start + 20):
        assert sentences(seed) == recorded[str(seed)], f"seed {seed}; if the change is meant, record it (see above)"


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({str(seed): sentences(seed) for seed in range(SEEDS)}, indent=0, ensure_ascii=False) + "\n"
    )
