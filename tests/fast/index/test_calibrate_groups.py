"""A threshold for images of new scenes comes from scenes that the gallery lacks."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import open_store
from evernear.data.groups import group_numbers
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest, Split
from evernear.data.shards import Dataset
from evernear.embedding.embeddings import Embeddings
from evernear.index.build import build_index
from evernear.index.calibrate import calibration_gaps
from evernear.settings import DataSettings, IndexSettings
from tests.gallery_vectors import MakeEmbeddings, unit

FRAMES, SIZE = 6, 12
CLASSES = np.random.default_rng(0).integers(60, 190, (2, SIZE, SIZE))


def scene(rng: np.random.Generator, label: int, frames: int) -> np.ndarray:
    """Frames (N, H, W) of one scene: scenes of a class differ by far more than the frames of
    one."""
    place = CLASSES[label] + rng.normal(0, 25, (SIZE, SIZE))
    return np.clip(place + rng.normal(0, 2, (frames, SIZE, SIZE)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 scenes of two classes: three of four are bursts of frames, and the others are single
    images."""
    root, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(1)
    for number in range(150):
        (root / "ab"[number // 2 % 2]).mkdir(exist_ok=True)
        for frame, pixels in enumerate(scene(rng, number // 2 % 2, FRAMES if number % 4 else 1)):
            data = io.BytesIO()
            Image.fromarray(pixels).save(data, "PNG")
            (root / "ab"[number // 2 % 2] / f"scene{number}-{frame}.png").write_bytes(data.getvalue())
    return root


def ingest(folder: Path, store: Path, **settings: object) -> Manifest:
    values = {"source": f"folder:{folder}", "query_fraction": 0.3, "gallery_fraction": 0.2, **settings}
    return ingest_source(DataSettings.model_validate(values), store.as_uri())


def embed(dataset: Dataset, make_embeddings: MakeEmbeddings) -> Embeddings:
    """The pixels as vectors."""
    splits: tuple[Split, ...] = ("gallery", "query")
    blocks = {split: next(iter(dataset.blocks(split, 10_000))) for split in splits}
    return make_embeddings(
        {split: (vectors(block.images), block.labels.astype(np.int64)) for split, block in blocks.items()},
        digests={split: block.digests for split, block in blocks.items()},
    )


def vectors(images: np.ndarray) -> np.ndarray:
    flat = images.reshape(len(images), -1).astype(np.float64)
    return unit(flat - CLASSES.mean())


def rejected_of_new_scenes(threshold: float, dataset: Dataset) -> float:
    gallery = vectors(next(iter(dataset.blocks("gallery", 10_000))).images)
    rng = np.random.default_rng(2)
    queries = vectors(np.concatenate([scene(rng, number % 2, 1) for number in range(500)]))
    return float((np.linalg.norm(queries[:, None] - gallery[None], axis=2).min(axis=1) > threshold).mean())


def test_only_queries_of_scenes_that_the_gallery_lacks_set_the_threshold(
    folder: Path, tmp_path: Path, make_embeddings: MakeEmbeddings
):
    """A dataset that was ingested before data.group was set keeps its divided scenes."""
    ingest(folder, tmp_path)
    manifest = ingest(folder, tmp_path, group="stem")
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    made = embed(dataset, make_embeddings)
    digests = next(iter(dataset.blocks("query", 10_000))).digests
    with group_numbers(dataset) as groups:
        assert groups is not None
        seen = groups.seen_queries()
        assert 0 < len(seen) < len(digests)
        of_splits = {
            split: set(groups.of(next(iter(dataset.blocks(split, 10_000))).digests).tolist())
            for split in ("train", "gallery")
        }
        elsewhere = of_splits["train"] | of_splits["gallery"]
        numbers = groups.of(digests).tolist()
        assert seen == {
            digest.tobytes() for digest, number in zip(digests, numbers, strict=True) if number in elsewhere
        }
        with_groups = build_index(
            made, dataset.labels, IndexSettings(), tmp_path / "groups", reject_rate=0.1, groups=groups
        )
    images_alone = build_index(made, dataset.labels, IndexSettings(), tmp_path / "images", reject_rate=0.1)
    gaps = calibration_gaps(dataset, ["a", "b", "c"], len(seen))
    assert f"; calibrated without query images of 1 class; calibrated without {len(seen)} query images" in gaps
    assert "every query image is of a group" in calibration_gaps(dataset, ["a", "b"], len(digests))
    assert calibration_gaps(dataset, ["a", "b"], 0) == ""
    assert with_groups.calibration.queries == len(digests) - len(seen)
    assert rejected_of_new_scenes(images_alone.threshold, dataset) > 0.2
    assert rejected_of_new_scenes(with_groups.threshold, dataset) < 0.15


def test_expected_false_rejects_count_scenes(folder: Path, tmp_path: Path, make_embeddings: MakeEmbeddings):
    manifest = ingest(folder, tmp_path, group="stem")
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    made = embed(dataset, make_embeddings)
    with group_numbers(dataset) as groups:
        assert groups is not None
        assert groups.seen_queries() == frozenset()
        grouped = build_index(
            made, dataset.labels, IndexSettings(), tmp_path / "groups", reject_rate=0.1, groups=groups
        )
        sizes = np.bincount(groups.of(next(iter(dataset.blocks("query", 10_000))).digests))
    images_alone = build_index(made, dataset.labels, IndexSettings(), tmp_path / "images", reject_rate=0.1)
    independent = grouped.calibration.independent
    assert independent == pytest.approx(sizes.sum() ** 2 / (sizes**2).sum())
    assert independent < 0.4 * grouped.calibration.queries
    low, high = grouped.calibration.expected_false_rejects()
    narrow_low, narrow_high = images_alone.calibration.expected_false_rejects()
    assert low < narrow_low < narrow_high < high
    assert f"of groups (data.group), as good as {round(independent)} independent images" in (
        grouped.calibration.describe_false_rejects()
    )
    assert "independent" not in images_alone.calibration.describe_false_rejects()
