"""Trivial baselines on the digits, and the gate's rule about them on constructed counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from evernear.evaluation.baselines import Baseline, measure_baselines
from evernear.evaluation.compare import PairedCounts, mcnemar_worse
from evernear.evaluation.evaluate import Evaluation, evaluate_systems
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import Outcomes, measure
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.statistics import p_by_chance, proportion
from evernear.evaluation.verdict import Rule
from evernear.settings import GateSettings
from tests.digits import load_digits
from tests.releases import System
from tests.small_ingest import dataset_of


@pytest.fixture(scope="module")
def evaluation(system: System) -> Evaluation:
    recognizer = Recognizer.open(system.network_dir, system.index_dir)
    return evaluate_systems(recognizer, None, system.dataset, OpenSet(held_out=()))


@pytest.fixture(scope="module")
def outcomes(system: System) -> Outcomes:
    return measure(Recognizer.open(system.network_dir, system.index_dir), system.dataset)[1]


def standardized(images: np.ndarray) -> np.ndarray:
    flat = images.reshape(len(images), -1).astype(float)
    return (flat - flat.mean(axis=1, keepdims=True)) / flat.std(axis=1, keepdims=True)


def test_baselines_are_the_most_common_class_and_nearest_pixels(system: System, evaluation: Evaluation):
    common, pixels = evaluation.baselines
    labels = np.concatenate([block.labels for block in system.dataset.blocks("test")])
    assert common.label_right.count == np.bincount(labels).max()
    assert common.p_by_chance == 1
    gallery, queries = (
        [
            np.concatenate(columns)
            for columns in zip(*((b.images, b.labels) for b in system.dataset.blocks(split)), strict=True)
        ]
        for split in ("gallery", "test")
    )
    distances = np.linalg.norm(standardized(queries[0])[:, None] - standardized(gallery[0])[None], axis=2)
    assert pixels.label_right.count == (gallery[1][distances.argmin(axis=1)] == queries[1]).sum()
    assert pixels.label_right.value > 0.8
    assert pixels.p_by_chance < 1e-6
    assert pixels.name == "the nearest gallery image by 8x8 pixels"


def test_a_sample_of_queries_is_compared_with_the_candidate_on_the_same_queries(system, outcomes, monkeypatch):
    whole = measure_baselines(outcomes, system.dataset)[1]
    monkeypatch.setattr("evernear.evaluation.baselines.QUERIES_MAX", 50)
    step = -(-len(outcomes.labels) // 50)
    for batch_size in (7, 512):
        part = measure_baselines(outcomes, system.dataset, batch_size)[1]
        assert part.comparison.queries == len(range(0, len(outcomes.labels), step))
        assert part.label_right.value == pytest.approx(whole.label_right.value, abs=0.15)
        correct = int(outcomes.correct[::step].sum())
        assert part.label_right.count + part.comparison.improvements - part.comparison.regressions == correct


def test_the_pixel_baseline_knows_the_classes_that_train_images_fill(tmp_path: Path):
    """Otherwise a candidate would pass the gate more easily because val/ lacks classes."""
    images, digits = load_digits()
    for number, (pixels, label) in enumerate(zip(images[:400], digits[:400], strict=True)):
        split = ("train", "test", "val")[number % 3]
        if split != "val" or label < 3:
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15).astype(np.uint8)).save(folder / f"{number}.png")
    dataset = dataset_of(tmp_path / "images", tmp_path / "store")
    assert dataset.manifest.label_counts("gallery")["9"] == 0
    labels = np.concatenate([block.labels for block in dataset.blocks("test")]).astype(np.int32)
    pixels = measure_baselines(Outcomes(labels >= 0, labels), dataset)[1]
    assert pixels.label_right.value > 0.7


def test_constant_images_have_a_baseline(system: System, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch):
    blocks = [replace(block, images=block.images * 0) for block in system.dataset.blocks("test")]
    monkeypatch.setattr(type(system.dataset), "blocks", lambda *_: iter(blocks))
    (_, pixels) = measure_baselines(Outcomes(outcomes.correct, outcomes.labels), system.dataset)
    assert pixels.p_by_chance > 0.1


def rule(
    evaluation: Evaluation, settings: GateSettings, *counts: tuple[int, int, int], last_is_part: bool = False
) -> Rule:
    """The rule for baselines of (right answers of 100, regressions, improvements)."""
    baselines = tuple(
        Baseline(
            name=f"baseline {number}",
            label_right=proportion(correct, 100, 0.95),
            comparison=PairedCounts(queries=100, regressions=regressions, improvements=improvements),
            p_perfect=mcnemar_worse(100 - correct, 0),
            p_worst=mcnemar_worse(correct, 0),
            p_by_chance=0.0,
            is_part=last_is_part and number == len(counts) - 1,
        )
        for number, (correct, regressions, improvements) in enumerate(counts)
    )
    verdict = decide(evaluation.model_copy(update={"baselines": baselines}), settings)
    return next(rule for rule in verdict.rules if rule.name == "beats_baselines")


@pytest.mark.parametrize(
    ("counts", "passed"),
    [
        ([(10, 0, 80), (60, 2, 30)], True),
        ([(10, 0, 80), (60, 20, 22)], False),  # as good as pixels
        ([(10, 10, 12)], False),
        ([(98, 0, 1)], True),  # two errors leave no room for a significant gain
        ([(98, 5, 1)], True),
        ([(98, 9, 1)], False),  # significantly worse
    ],
)
def test_a_first_release_beats_every_baseline(evaluation: Evaluation, counts, passed):
    found = rule(evaluation, GateSettings(), *counts)
    assert found.passed == passed
    assert found.setting == ("" if passed else "gate.beat_baseline=false")
    assert rule(evaluation, GateSettings(beat_baseline=False), *counts).passed


@pytest.mark.parametrize(
    ("counts", "passed"), [((60, 20, 22), True), ((60, 2, 30), True), ((60, 30, 2), False), ((98, 0, 1), True)]
)
def test_the_network_that_training_starts_from_must_only_not_be_better(evaluation: Evaluation, counts, passed):
    """Otherwise, a release would be held that is as good as its pretrained network alone."""
    found = rule(evaluation, GateSettings(), (10, 0, 80), counts, last_is_part=True)
    assert found.passed == passed
    assert f"{'not ' * passed}significantly worse than baseline 1" in found.reason


def test_missing_baselines_hold(evaluation: Evaluation):
    assert not rule(evaluation, GateSettings()).passed


PAIRS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abcd"), st.integers(1, 40)), min_size=1, max_size=9)


@given(PAIRS)
def test_p_by_chance_is_close_to_a_permutation_test(pairs):
    labels, predictions = (np.repeat([pair[i] for pair in pairs], [pair[2] for pair in pairs]) for i in (0, 1))
    assume(len(labels) >= 20)  # the normal distribution is a coarse approximation for fewer
    found = p_by_chance(pairs)
    rng = np.random.default_rng(0)
    correct = (labels == predictions).sum()
    permuted = np.array([(rng.permutation(labels) == predictions).sum() for _ in range(300)])
    # A few images can only be right in a few numbers, which the normal distribution lies between.
    assert (permuted > correct).mean() - 0.25 <= found <= (permuted >= correct).mean() + 0.25 or permuted.var() == 0
