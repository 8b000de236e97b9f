"""The drift baseline: a sample of a release's predictions to compare live queries with."""

import io

import numpy as np
import pytest

from evernear.embedding.data_loader import embed_images
from evernear.embedding.export import load_network
from evernear.errors import IntegrityError
from evernear.index.search import Gallery
from evernear.release.archive_reader import read_part
from evernear.release.drift_baseline import PROJECTED_DIM, DriftBaseline, evenly, random_projection
from evernear.release.manifest import DRIFT_BASELINE_FILE
from tests.releases import MakeRelease, System


@pytest.fixture(scope="module")
def reference(make_release: MakeRelease) -> DriftBaseline:
    data = read_part(make_release().archive, DRIFT_BASELINE_FILE)
    assert data is not None
    return DriftBaseline.parse(data, "here")


def test_baseline_contains_the_predictions_on_the_query_and_test_splits(
    reference: DriftBaseline, system: System
) -> None:
    """The query split is smaller than a baseline may be."""
    images = np.concatenate([block.images for split in ("query", "test") for block in system.dataset.blocks(split)])
    embeddings = embed_images(load_network(system.network_dir), images)
    gallery = Gallery.open(system.index_dir, reference_network(system))
    recognitions = gallery.recognize(embeddings)
    assert reference.distances == pytest.approx([recognition.dist for recognition in recognitions], abs=1e-5)
    assert reference.unknown.tolist() == [recognition.unknown for recognition in recognitions]
    assert reference.coordinates == pytest.approx(embeddings @ reference.projection, abs=1e-5)
    assert reference.labels is not None
    assert reference.labels.tolist() == [recognition.pred for recognition in recognitions]


def reference_network(system: System) -> str:
    from evernear.embedding.export import describe_network

    return describe_network(system.network_dir).sha256


def test_projection_preserves_distances_on_average() -> None:
    rng = np.random.default_rng(7)
    points = rng.standard_normal((200, 128))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    projected = points @ random_projection(128)
    ratios = np.linalg.norm(projected[:100] - projected[100:], axis=1) / np.linalg.norm(
        points[:100] - points[100:], axis=1
    )
    assert projected.shape == (200, PROJECTED_DIM)
    assert np.mean(ratios**2) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("total", [0, 1, 999, 1000, 1001, 123_456])
def test_large_split_is_sampled_evenly(total: int) -> None:
    rows = list(evenly(total))
    assert len(rows) == min(total, 1000)
    assert rows == sorted(set(rows))
    assert not rows or (rows[0] == 0 and rows[-1] < total)
    assert len({*np.diff(rows)} or {0}) <= 2


def test_invalid_baseline_is_rejected_with_its_path(reference: DriftBaseline) -> None:
    def packed(**changes: np.ndarray) -> bytes:
        arrays = {name: getattr(reference, name) for name in ("projection", "coordinates", "distances", "unknown")}
        buffer = io.BytesIO()
        np.savez(buffer, **(arrays | changes))
        return buffer.getvalue()

    whole = reference.to_bytes()
    unusable = [
        b"",
        b"text",
        whole[:100],
        packed(distances=reference.distances[1:]),
        packed(coordinates=reference.coordinates[:, 1:]),
        packed(distances=reference.distances.astype(np.float64)),
        packed(projection=np.array([{"a": "pickle"}], dtype=object)),
        packed(projection=reference.projection[0]),
        packed(labels=np.array(["one"])),
        packed(labels=np.arange(len(reference.distances))),
    ]
    for data in unusable:
        with pytest.raises(IntegrityError, match="somewhere is not a drift baseline"):
            DriftBaseline.parse(data, "somewhere")
