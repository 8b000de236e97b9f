from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from evernear.data.ingest import ingest
from evernear.data.shards import Dataset
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.probe import choose_held_out, probe
from evernear.settings import DataSettings, EvaluationSettings, IndexSettings, TrainSettings
from evernear.store import open_store
from tests.conftest import System

TINY = TrainSettings(epochs=30, min_steps=0, width=4, embedding_dim=16, batch_size=128, patience_epochs=4)


@given(st.lists(st.text(max_size=3), unique=True, max_size=8), st.integers(1, 5), st.integers(0, 5))
def test_held_out_classes_leave_two_to_learn(labels, wanted, seed):
    held_out = choose_held_out(labels, wanted, seed)
    assert held_out <= set(labels)
    assert len(held_out) == max(0, min(wanted, len(labels) - 2))
    assert held_out == choose_held_out(labels, wanted, seed)


@pytest.fixture(scope="module")
def found(system: System) -> OpenSet:
    settings = EvaluationSettings(probe_epochs=4)
    return probe(system.dataset, TINY, settings, IndexSettings(false_accept_rate=0.05))


def test_the_probe_asks_about_every_test_image(system: System, found: OpenSet):
    counts = system.dataset.manifest.label_counts("test")
    unknown = sum(counts[label] for label in found.held_out)
    assert len(found.held_out) == 2
    assert found.auroc is not None
    assert (found.auroc.unknown, found.auroc.known) == (unknown, system.dataset.count("test") - unknown)
    assert found.false_accepts is not None
    assert found.false_rejects is not None
    assert (found.false_accepts.total, found.false_rejects.total) == (unknown, found.auroc.known)


def test_classes_never_trained_on_lie_further_away(found: OpenSet):
    assert found.auroc is not None
    assert found.auroc.low > 0.6


def test_figures_at_the_threshold_lie_on_the_curve(found: OpenSet):
    assert found.roc is not None
    assert found.threshold is not None
    assert found.false_accepts is not None
    below = max(i for i, threshold in enumerate(found.roc.thresholds) if threshold <= found.threshold)
    above = min(below + 1, len(found.roc.thresholds) - 1)
    assert found.roc.false_accepts[below] <= found.false_accepts.value <= found.roc.false_accepts[above]


def test_the_threshold_accepts_of_unseen_classes_about_what_is_stated(found: OpenSet):
    """By impostors instead it would accept nearly all of them."""
    assert found.false_accepts is not None
    assert found.false_accepts.low < 0.05 + 0.1


def test_the_probe_is_the_same_twice_and_survives_json(system: System, found: OpenSet):
    again = probe(system.dataset, TINY, EvaluationSettings(probe_epochs=4), IndexSettings(false_accept_rate=0.05))
    assert OpenSet.model_validate_json(again.model_dump_json()) == found


@pytest.mark.parametrize("seed", range(3))
def test_classes_without_a_gallery_image_leave_the_others_in_the_gallery(tmp_path: Path, seed: int):
    """So few images that by chance two of four classes have none there, which validation only warns of."""
    pixels, digits = load_digits(return_X_y=True)
    for digit in range(4):
        images = iter((pixels[digits == digit] * 15).astype(np.uint8).reshape(-1, 8, 8))
        for split, count in {"train": 10, "test": 3, "query": 2, "gallery": 3 if digit < 2 else 0}.items():
            folder = tmp_path / "images" / split / str(digit)
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(next(images)).save(folder / f"{number}.png")
    store = open_store((tmp_path / "store").as_uri())
    dataset = Dataset(ingest(DataSettings(source=f"folder:{tmp_path / 'images'}"), store.uri), store)
    recipe = TINY.model_copy(update={"epochs": 1, "batch_size": 16, "seed": seed})
    assert probe(dataset, recipe, EvaluationSettings(probe_epochs=1), IndexSettings()) == OpenSet(held_out=())


def test_too_few_classes_leave_nothing_to_probe(system: System):
    manifest = system.dataset.manifest
    shards = tuple(
        shard.model_copy(update={"label_counts": {"0": 5, "1": 5}}) if shard.split == "test" else shard
        for shard in manifest.shards
    )
    two_classes = Dataset(manifest.model_copy(update={"shards": shards}), open_store(manifest.store_uri))
    nothing = probe(two_classes, TINY, EvaluationSettings(), IndexSettings())
    assert nothing == OpenSet(held_out=())
