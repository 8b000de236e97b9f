"""Independent queries are all kept, and of each block of dependent ones the first."""

import dataclasses

import numpy as np
import pytest

from evernear.serving.live_queries import Queries
from evernear.triggers.watch.drift import independent_queries

CENTERS = np.random.default_rng(99).standard_normal((10, 16)) * 0.3


def queries(
    rng: np.random.Generator,
    count: int,
    frames: int = 1,
    cameras: int = 1,
    over_s: float = 86_400,
    one_class: float = 0,
) -> Queries:
    """``count`` queries, ``frames`` of each picture a second apart; ``cameras`` start at the same
    times."""
    pictures = count // frames
    starts = np.repeat(np.sort(rng.uniform(0, over_s, -(-pictures // cameras))), cameras)[:pictures]
    classes = np.where(rng.random(pictures) < one_class, 0, rng.integers(0, 10, pictures))
    points = CENTERS[classes] + rng.standard_normal((pictures, 16)) * 0.1
    shown = np.repeat(points, frames, axis=0)
    return Queries(
        total=len(shown),
        unknown=0,
        distances=np.linalg.norm(shown, axis=1).astype(np.float32),
        coordinates=(shown + (frames > 1) * rng.standard_normal(shown.shape) * 0.01).astype(np.float32),
        is_unknown=np.zeros(len(shown), bool),
        at_s=np.repeat(starts, frames) + np.tile(np.arange(frames), pictures),
        labels=np.repeat(classes, frames).astype(np.str_),
    )


def joined(first: Queries, second: Queries) -> Queries:
    return Queries(
        first.total + second.total,
        0,
        np.concatenate([first.distances, second.distances]),
        np.concatenate([first.coordinates, second.coordinates]),
        np.concatenate([first.is_unknown, second.is_unknown]),
        np.concatenate([first.at_s, second.at_s]),
        np.concatenate([first.labels, second.labels]),
    )


@pytest.mark.parametrize(
    "how",
    [{}, {"one_class": 0.6}, {"over_s": 100.0}],
    ids=["all day", "mostly of one class", "in a burst of different pictures"],
)
def test_independent_queries_all_count(how: dict[str, float]) -> None:
    kept = 0
    for seed in range(20):
        live = queries(np.random.default_rng(seed), 400, **how)
        kept += len(independent_queries(live)[0])
    assert kept >= 0.95 * 20 * 400


@pytest.mark.parametrize("batches", [1, 2, 3, 10])
def test_independent_queries_in_a_few_batches_all_count(batches: int) -> None:
    """Otherwise, no drift is found where a client sends its images in batches."""
    for seed in range(20):
        live = queries(np.random.default_rng(seed), 400)
        batch = np.arange(400) * batches // 400
        together = dataclasses.replace(live, at_s=batch * 3600.0)
        assert len(independent_queries(together)[0]) == 400


@pytest.mark.parametrize("cameras", [1, 3])
def test_frames_of_a_picture_count_once(cameras: int) -> None:
    for seed in range(5):
        live = queries(np.random.default_rng(seed), 600, frames=10, cameras=cameras)
        independent, gap_s = independent_queries(live)
        assert 0.7 * 60 / cameras <= len(independent) <= 60 * 1.1
        assert gap_s >= 4


def test_burst_of_one_picture_counts_little_among_independent_queries() -> None:
    rng = np.random.default_rng(0)
    live = joined(queries(rng, 400), queries(rng, 300, frames=300))
    independent, _ = independent_queries(live)
    burst = int(np.isin(independent.distances, live.distances[400:]).sum())
    assert burst <= 12
    assert len(independent) - burst >= 240


def test_change_in_the_middle_of_the_window_is_not_mistaken_for_blocks() -> None:
    """Otherwise drift would hide itself while it begins."""
    rng = np.random.default_rng(0)
    before, after = queries(rng, 300, over_s=43_200), queries(rng, 300, over_s=43_200)
    moved = Queries(
        300, 0, after.distances, after.coordinates + 0.3, after.is_unknown, after.at_s + 43_200, after.labels
    )
    assert len(independent_queries(joined(before, moved))[0]) >= 500


def test_queries_without_embeddings_or_without_any() -> None:
    rng = np.random.default_rng(0)
    live = queries(rng, 600, frames=10)
    bare = Queries(600, 0, live.distances, np.empty((600, 0), np.float32), live.is_unknown, live.at_s, live.labels)
    assert len(independent_queries(bare)[0]) <= 150
    assert len(independent_queries(live.select(np.empty(0, np.intp)))[0]) == 0
