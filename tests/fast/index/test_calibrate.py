from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evernear.data.group_numbers import GroupNumbers, group_numbers
from evernear.data.manifest import Split
from evernear.data.shards import Dataset
from evernear.embedding.embeddings import Embeddings
from evernear.errors import DataError
from evernear.index.build import build_index
from evernear.index.calibrate import (
    EQUAL,
    MARGIN,
    between,
    calibration_gaps,
    threshold_at,
    threshold_of,
    threshold_rejecting,
    unit_of,
)
from evernear.index.description import MAX_DISTANCE, Calibration, IndexDescription, describe_threshold
from evernear.settings import IndexSettings
from tests.gallery_vectors import MakeEmbeddings, blobs, unit
from tests.small_ingest import dataset_of

LABELS = tuple("abcde")
# Few distinct values make ties common.
DISTANCES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 2.0]), min_size=1, max_size=60)


@given(distances=DISTANCES, rate=st.floats(0.001, 0.999))
def test_threshold_is_the_largest_within_the_false_accept_rate(distances, rate):
    impostors = np.array(distances, np.float32)
    threshold = threshold_at(impostors, rate)
    # Distances are at least 0, so even the smallest threshold accepts impostors at distance 0.
    if threshold > 0:
        assert (impostors <= threshold).sum() <= rate * len(impostors)
    beyond = impostors[impostors > threshold]
    if len(beyond):
        assert (impostors <= beyond.min()).sum() > np.floor(rate * len(impostors))


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF4,Flat"])
def test_threshold_uses_exact_impostor_distances_for_every_index(make_embeddings: MakeEmbeddings, tmp_path, factory):
    gallery, queries = blobs(1, 300), blobs(2, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    described = build_index(
        embeddings,
        LABELS,
        IndexSettings(type=factory, false_accept_rate=0.1, false_reject_rate=0.95),
        tmp_path,
        toward_mean=0,
    )

    impostors = [
        min(np.linalg.norm(query - vector) for vector, other in zip(*gallery, strict=True) if other != label)
        for query, label in zip(*queries, strict=True)
    ]
    assert (np.array(impostors) <= described.threshold).sum() == described.calibration.false_accepts == 13
    accepted, refused = sorted(impostors)[12:14]
    assert accepted < described.threshold < refused < described.threshold + MARGIN + 1e-5


def test_false_rejects_and_recall_are_measured_on_the_index(make_embeddings: MakeEmbeddings, tmp_path):
    gallery, queries = blobs(1, 300), blobs(2, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    exact = build_index(embeddings, LABELS, IndexSettings(), tmp_path / "flat", toward_mean=0).calibration
    assert exact.nearest_found == exact.queries == 130

    distances = np.linalg.norm(queries[0][:, None] - gallery[0][None], axis=2).min(axis=1)
    assert exact.false_rejects == (distances > exact.threshold).sum() > 0

    approximate = build_index(embeddings, LABELS, IndexSettings(type="IVF32,Flat"), tmp_path / "ivf").calibration
    assert approximate.nearest_found < 130
    better = IndexSettings(type="IVF32,Flat", search="nprobe=32")
    assert build_index(embeddings, LABELS, better, tmp_path / "all").calibration.nearest_found == 130


def test_compressed_index_recall_counts_returned_ids(make_embeddings: MakeEmbeddings, tmp_path):
    """Its distances are underestimated, which must not count as a recalled neighbor."""
    gallery, queries = blobs(1, 400), blobs(2, 100)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    built = build_index(embeddings, LABELS, IndexSettings(type="PQ2x4"), tmp_path, toward_mean=0)

    from evernear.index.faiss_compat import faiss

    index = faiss.read_index(str(tmp_path / "index.faiss"))
    true_nearest = np.linalg.norm(queries[0][:, None] - gallery[0][None], axis=2).argmin(axis=1)
    assert built.calibration.nearest_found == (index.search(queries[0], 1)[1][:, 0] == true_nearest).sum() < 50


def test_excluded_classes_are_neither_indexed_nor_used_for_calibration(make_embeddings, index_settings, tmp_path):
    gallery, queries = blobs(1, 300), blobs(2, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    described = build_index(embeddings, LABELS, index_settings(), tmp_path / "some", frozenset({"b", "e"}))

    kept_gallery, kept_queries = (
        (split[0][np.isin(split[1], [0, 2, 3])], split[1][np.isin(split[1], [0, 2, 3])]) for split in (gallery, queries)
    )
    alone = make_embeddings({"gallery": kept_gallery, "query": kept_queries})
    assert described.calibration == build_index(alone, LABELS, index_settings(), tmp_path / "alone").calibration
    assert described.known_labels == ("a", "c", "d")
    assert described.counts[1] == described.counts[4] == 0


def test_missing_queries_or_impostors_are_reported(make_embeddings, index_settings, tmp_path):
    vectors, labels = blobs(1, 60)
    with pytest.raises(DataError, match="query_fraction"):
        build_index(make_embeddings({"gallery": (vectors, labels)}), LABELS, index_settings(), tmp_path)
    one_class = (vectors, np.zeros_like(labels))
    with pytest.raises(DataError, match="only one class"):
        build_index(make_embeddings({"gallery": one_class, "query": one_class}), LABELS, index_settings(), tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_probe_threshold_is_used_and_its_error_rates_are_measured(make_embeddings, index_settings, tmp_path):
    gallery, queries = blobs(1, 300), blobs(2, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    calibration = build_index(embeddings, LABELS, index_settings(), tmp_path, threshold=0.9, toward_mean=0).calibration
    distances = np.linalg.norm(queries[0][:, None] - gallery[0][None], axis=2)
    to_others = np.where(queries[1][:, None] == gallery[1][None], np.inf, distances)
    assert (calibration.threshold, calibration.found_by) == (0.9, "unseen classes")
    assert calibration.false_rejects == (distances.min(axis=1) > 0.9).sum()
    assert calibration.false_accepts == (to_others.min(axis=1) <= 0.9).sum()
    assert build_index(embeddings, LABELS, index_settings(), tmp_path).calibration.found_by == "impostors"


@given(distances=DISTANCES, rate=st.floats(0.001, 0.999))
def test_threshold_rejects_no_more_known_than_stated_and_as_many_as_it_can(distances, rate):
    known = np.array(distances, np.float32)
    threshold = threshold_rejecting(known, rate)
    assert (known > threshold).sum() <= rate * (len(known) + 1)
    accepted = known[known <= threshold]
    below = accepted[accepted < accepted.max()]
    if len(below) and (len(known) + 1) * rate >= 1:
        # A smaller threshold would reject so many that a new image exceeds it more often than
        # stated.
        assert (known > below.max()).sum() + 1 > rate * (len(known) + 1) - 1e-6


def test_new_known_images_are_rejected_no_more_often_than_stated():
    """The mean over calibrations, of which the next higher rank would reject 3.3% with 29 images.
    The plain quantile would reject 8.2%."""
    rng = np.random.default_rng(0)
    rejected = [(rng.random(500) > threshold_rejecting(rng.random(29), 0.05)).mean() for _ in range(1000)]
    assert 0.045 < np.mean(rejected) < 0.055


def test_known_images_take_precedence_over_impostors(make_embeddings, index_settings, tmp_path):
    gallery, queries = blobs(1, 300), blobs(2, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    strict = index_settings(false_accept_rate=0.001, false_reject_rate=0.05)
    result = build_index(embeddings, LABELS, strict, tmp_path).calibration
    assert 0 < result.false_rejects <= 0.05 * 131
    assert result.false_accepts > 0.001 * 130
    assert (result.stated_false_accept_rate, result.stated_false_reject_rate) == (0.001, 0.05)


def test_the_threshold_of_a_probe_is_relative_to_the_releases_own_queries(make_embeddings: MakeEmbeddings, tmp_path):
    gallery, queries = blobs(1, 300), blobs(2, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": queries})
    distances = np.linalg.norm(queries[0][:, None] - gallery[0][None], axis=2).min(axis=1)
    relative = 1.2 * float(np.median(distances)) ** 0.5
    built = build_index(embeddings, LABELS, IndexSettings(), tmp_path, relative_threshold=relative, toward_mean=0)
    assert built.calibration.found_by == "unseen classes"
    assert built.threshold == pytest.approx(1.2 * np.median(distances), abs=MARGIN)
    assert built.calibration.false_rejects == (distances > built.threshold).sum() > 0
    off = build_index(embeddings, LABELS, IndexSettings(), tmp_path, threshold=MAX_DISTANCE)
    assert off.calibration.false_rejects == 0
    assert describe_threshold(off.threshold) == "unknown switched off"


def test_a_threshold_is_raised_only_if_there_are_enough_queries():
    near = np.append(np.linspace(0.4, 0.6, 17), 1.9).astype(np.float32)
    assert threshold_of(near, 0.5, 0.05) == pytest.approx(0.5 * unit_of(near), abs=0.01)
    assert threshold_of(np.append(near, near[0]), 0.5, 0.05) == pytest.approx(1.9, abs=0.01)


CLOSE = st.lists(st.floats(0.0, 2.0, width=32), min_size=1, max_size=40) | st.lists(
    st.floats(0.5, 0.5078125, width=32), min_size=1, max_size=40
)


@pytest.mark.parametrize("choose", [threshold_at, threshold_rejecting])
@given(distances=CLOSE | DISTANCES, rate=st.floats(0.001, 0.999))
def test_threshold_lies_between_two_distances(choose, distances, rate):
    values = np.array(distances, np.float32)
    threshold = choose(values, rate)
    nearest = np.abs(values.astype(np.float64) - threshold).min()
    if 0 < threshold < MAX_DISTANCE:
        assert nearest > EQUAL / 3
        assert choose is threshold_rejecting or nearest <= MARGIN * 1.001
        assert ((values > threshold) == (values.astype(np.float64) > threshold)).all(), "exact in float32"


def test_threshold_stays_between_0_and_the_largest_distance(make_embeddings: MakeEmbeddings, tmp_path) -> None:
    embeddings = make_embeddings({"gallery": blobs(1, 60), "query": blobs(2, 18)})
    assert build_index(embeddings, LABELS, IndexSettings(), tmp_path, relative_threshold=9).threshold == MAX_DISTANCE
    assert build_index(embeddings, LABELS, IndexSettings(), tmp_path, relative_threshold=-1).threshold == 0


@pytest.mark.parametrize(("queries", "rejected"), [(18, 18), (19, 0), (199, 9)])
def test_enough_queries_raise_a_threshold_that_would_reject_too_many(make_embeddings, tmp_path, queries, rejected):
    embeddings = make_embeddings({"gallery": blobs(1, 60), "query": blobs(2, queries)})
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path, relative_threshold=0)
    assert described.calibration.false_rejects == rejected


@given(distances=CLOSE | DISTANCES, threshold=st.floats(0.0, 2.0))
def test_a_given_threshold_keeps_its_distance_from_all_distances(distances, threshold):
    values = np.array(distances, np.float32)
    moved = between(values, threshold)
    assert np.abs(values.astype(np.float64) - moved).min() > EQUAL / 3
    assert abs(moved - threshold) <= 3 * MARGIN or np.ptp(values) < 40 * EQUAL * len(values)


@pytest.mark.parametrize(("queries", "relative"), [(5, None), (8, 1.0), (12, 1.2), (30, None)])
def test_no_query_of_a_small_dataset_is_at_the_threshold(make_embeddings, tmp_path, queries, relative):
    for seed in range(20):
        gallery, query = blobs(2 * seed, 40, spread=0.2), blobs(2 * seed + 1, queries, spread=0.2)
        embeddings = make_embeddings({"gallery": gallery, "query": query})
        threshold = build_index(
            embeddings, LABELS, IndexSettings(), tmp_path / str(seed), relative_threshold=relative, toward_mean=0
        ).threshold
        distances = np.linalg.norm(query[0][:, None] - gallery[0][None], axis=2).min(axis=1)
        assert np.abs(distances - threshold).min() > EQUAL / 3


@pytest.mark.parametrize("queries", [5, 10, 20, 50, 200])
def test_expected_false_rejects_contain_the_share_of_new_images(queries: int) -> None:
    rng, inside, trials = np.random.default_rng(0), 0, 1000
    for _ in range(trials):
        known = rng.random(queries).astype(np.float32)
        threshold = threshold_rejecting(known, 0.05)
        calibration = calibrated(queries, int((known > threshold).sum()), threshold)
        low, high = calibration.expected_false_rejects()
        inside += low <= max(0.0, 1 - threshold) <= high
    assert inside >= 0.94 * trials


def test_few_queries_are_said_to_determine_the_false_rejects_badly() -> None:
    assert calibrated(10, 0, 0.5).describe_false_rejects() == (
        "0.0% to 30.8% of new images like the query images are called unknown, a wide range from only 10 query images: "
        "to narrow it, add images, or raise data.query_fraction for a new dataset"
    )
    assert calibrated(1000, 49, 0.5).describe_false_rejects() == (
        "3.6% to 6.4% of new images like the query images are called unknown"
    )
    assert calibrated(10, 0, MAX_DISTANCE).describe_false_rejects() == ""


def calibrated(queries: int, false_rejects: int, threshold: float) -> Calibration:
    return Calibration(
        found_by="unseen classes",
        stated_false_accept_rate=0.05,
        stated_false_reject_rate=0.05,
        threshold=threshold,
        queries=queries,
        false_accepts=0,
        false_rejects=false_rejects,
        nearest_found=queries,
    )


# Images of new scenes


FRAMES, SIZE = 6, 12
CLASSES = np.random.default_rng(0).integers(60, 190, (2, SIZE, SIZE))


def scene(rng: np.random.Generator, label: int, frames: int) -> np.ndarray:
    """Frames (N, H, W) of a scene, which differ far less than the scenes of a class."""
    place = CLASSES[label] + rng.normal(0, 25, (SIZE, SIZE))
    return np.clip(place + rng.normal(0, 2, (frames, SIZE, SIZE)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 scenes of two classes: three of four are bursts of frames, the others single images."""
    root, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(1)
    for number in range(150):
        (root / "ab"[number // 2 % 2]).mkdir(exist_ok=True)
        for frame, pixels in enumerate(scene(rng, number // 2 % 2, FRAMES if number % 4 else 1)):
            Image.fromarray(pixels).save(root / "ab"[number // 2 % 2] / f"scene{number}-{frame}.png")
    return root


def ingest(folder: Path, store: Path, **settings: object) -> Dataset:
    return dataset_of(folder, store, query_fraction=0.3, gallery_fraction=0.2, **settings)


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


def build_both(
    dataset: Dataset, made: Embeddings, groups: GroupNumbers, directory: Path
) -> tuple[IndexDescription, IndexDescription]:
    """Indexes whose thresholds rest on groups, and on images alone."""

    def build(name: str, groups: GroupNumbers | None) -> IndexDescription:
        return build_index(
            made,
            dataset.labels,
            IndexSettings(),
            directory / name,
            relative_threshold=0.5,
            groups=groups,
            toward_mean=0,
        )

    return build("groups", groups), build("images", None)


def test_only_queries_of_scenes_that_the_gallery_lacks_set_the_threshold(folder, tmp_path, make_embeddings):
    """A dataset that was ingested before data.group was set keeps its divided scenes."""
    ingest(folder, tmp_path)
    dataset = ingest(folder, tmp_path, group="stem")
    made = embed(dataset, make_embeddings)
    digests = next(iter(dataset.blocks("query", 10_000))).digests
    groups = group_numbers(dataset)
    seen = groups.seen_queries()
    assert 0 < len(seen) < len(digests)
    of_splits = {
        split: set(next(iter(dataset.blocks(split, 10_000))).groups.tolist()) for split in ("train", "gallery")
    }
    elsewhere = of_splits["train"] | of_splits["gallery"]
    numbers = next(iter(dataset.blocks("query", 10_000))).groups.tolist()
    assert seen == {digest.tobytes() for digest, number in zip(digests, numbers, strict=True) if number in elsewhere}
    in_splits = Counter(
        group
        for split in ("train", "gallery", "query")
        for group in set(next(iter(dataset.blocks(split, 10_000))).groups.tolist())
    )
    assert dataset.manifest.seen_groups == tuple(sorted(group for group, splits in in_splits.items() if splits > 1))
    with_groups, images_alone = build_both(dataset, made, groups, tmp_path)
    gaps = calibration_gaps(dataset, ["a", "b", "c"], len(seen))
    assert f"; calibrated without query images of 1 class; calibrated without {len(seen)} query images" in gaps
    assert "every query image is of a group" in calibration_gaps(dataset, ["a", "b"], len(digests))
    assert calibration_gaps(dataset, ["a", "b"], 0) == ""
    assert with_groups.calibration.queries == len(digests) - len(seen)
    alone, grouped = (rejected_of_new_scenes(each.threshold, dataset) for each in (images_alone, with_groups))
    assert grouped < 0.15
    assert grouped < alone


def test_expected_false_rejects_count_scenes(folder: Path, tmp_path: Path, make_embeddings: MakeEmbeddings):
    dataset = ingest(folder, tmp_path, group="stem")
    made = embed(dataset, make_embeddings)
    groups = group_numbers(dataset)
    assert groups.seen_queries() == frozenset()
    grouped, images_alone = build_both(dataset, made, groups, tmp_path)
    sizes = np.unique(next(iter(dataset.blocks("query", 10_000))).groups, return_counts=True)[1]
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
