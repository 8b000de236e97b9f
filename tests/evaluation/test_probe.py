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
from evernear.evaluation.probe import assess, choose_held_out, probe
from evernear.index.description import FARTHEST
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


def test_figures_at_the_operating_point_are_on_the_curve(found: OpenSet):
    assert found.roc is not None
    assert found.false_accepts is not None
    assert found.false_rejects is not None
    points = [*zip(found.roc.false_accepts, found.roc.true_accepts, strict=True)]
    kept = 1 - found.false_rejects.value
    assert min(abs(far - found.false_accepts.value) + abs(tar - kept) for far, tar in points) < 0.03


def test_known_images_take_precedence(found: OpenSet):
    """The small network cannot reject 95% of unseen classes without rejecting many known images."""
    assert found.required_reject_rate is not None
    assert found.required_reject_rate > 0.05
    assert found.reject_rate == 0.05
    assert found.false_rejects is not None
    assert found.false_rejects.low <= 0.05
    assert "more than index.false_reject_rate = 0.05: known images take precedence" in found.summary()


NEAR, FAR = np.linspace(0, 1, 200, dtype=np.float32), np.linspace(0.9, 1.9, 200, dtype=np.float32)


def test_both_rates_are_met_where_they_can_be():
    result = assess(NEAR, FAR, NEAR, FAR, IndexSettings(false_accept_rate=0.05, false_reject_rate=0.2), 0.95)
    assert result.reject_rate == result.required_reject_rate == pytest.approx(0.055, abs=0.01)
    assert result.false_accepts is not None
    assert result.false_accepts.value <= 0.06
    assert "take precedence" not in result.summary()
    assert result.threshold is None


@pytest.mark.parametrize("shift", [0.0, -0.5])
def test_unknown_is_switched_off_where_distances_do_not_separate(shift: float):
    """As near as known images, or nearer: every threshold would reject known images first."""
    result = assess(NEAR, NEAR + shift, NEAR, NEAR + shift, IndexSettings(), 0.95)
    assert result.threshold == FARTHEST
    assert result.reject_rate is None
    assert result.false_rejects is not None
    assert result.false_rejects.count == 0
    assert result.summary().startswith("Unknown is switched off")


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
