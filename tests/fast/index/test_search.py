import pickle
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from evernear.common.disk import sha256_file
from evernear.common.frozen import FORMAT
from evernear.embedding.embeddings import Embeddings
from evernear.errors import IntegrityError
from evernear.index import vectors
from evernear.index.build import build_index
from evernear.index.description import DESCRIPTION_FILE, TOWARD_MEAN, describe_index
from evernear.index.faiss_compat import FaissIndex, faiss
from evernear.index.search import MAX_DISTANCE, NO_LABEL, Gallery
from evernear.index.vectors import exact_neighbors, move_toward, noise_of_means, sample_queries
from evernear.settings import IndexSettings
from tests.fast.index.conftest import MakeSettings
from tests.gallery_vectors import NETWORK, MakeEmbeddings, blobs, unit

LABELS = ("a", "b", "c", "d", "e", "never seen")


@pytest.mark.parametrize("k", [1, 4, 9])
def test_recognize_matches_a_reference_implementation(
    make_embeddings: MakeEmbeddings, index_settings: MakeSettings, tmp_path, k
):
    (vectors, label_indices), (queries, _) = blobs(1, 210), blobs(3, 90)
    embeddings = make_embeddings({"gallery": (vectors, label_indices), "query": blobs(2, 100)})
    build_index(embeddings, LABELS, index_settings(k=k, false_accept_rate=0.2), tmp_path)
    gallery = Gallery.open(tmp_path, NETWORK)

    recognized = gallery.recognize(queries)
    means = np.array([vectors[label_indices == label].mean(axis=0) for label in range(5)])
    noise = noise_of_means(means, np.bincount(label_indices))
    vectors = move_toward(vectors, means[label_indices], noise[label_indices], TOWARD_MEAN)
    for query, result in zip(queries, recognized, strict=True):
        distances = np.sqrt(np.maximum(2 - 2 * vectors @ query, 0))
        nearest = np.argsort(distances)[:k]
        assert result.pred == LABELS[label_indices[nearest[0]]]
        assert result.dist == pytest.approx(distances.min(), abs=1e-5)
        assert result.unknown == (result.dist > gallery.description.threshold)
        assert [neighbor.label for neighbor in result.neighbors] == [
            LABELS[number] for number in label_indices[nearest]
        ]
        assert [neighbor.dist for neighbor in result.neighbors] == pytest.approx(distances[nearest], abs=1e-5)
        assert all(nearer.dist <= farther.dist for nearer, farther in pairwise(result.neighbors))
    assert {result.unknown for result in recognized} == {True, False}


def small_index(make_embeddings: MakeEmbeddings, settings: IndexSettings, directory: Path) -> Path:
    build_index(make_embeddings({"gallery": blobs(1, 40), "query": blobs(2, 60)}), LABELS, settings, directory)
    return directory


@pytest.fixture(scope="module")
def index_dir(make_embeddings: MakeEmbeddings, tmp_path_factory: pytest.TempPathFactory):
    return small_index(make_embeddings, IndexSettings(), tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def any_index_dir(make_embeddings: MakeEmbeddings, index_settings: MakeSettings, tmp_path_factory):
    """An index in either backend."""
    return small_index(make_embeddings, index_settings(), tmp_path_factory.mktemp("index"))


def test_number_of_listed_neighbors_does_not_affect_the_label(any_index_dir):
    gallery, queries = Gallery.open(any_index_dir, NETWORK), blobs(3, 30)[0]
    usual = gallery.recognize(queries)
    for k in (1, 3, 12):
        listed = gallery.recognize(queries, k)
        assert {len(result.neighbors) for result in listed} == {k}
        assert [result[:3] for result in listed] == [result[:3] for result in usual]
    assert {len(result.neighbors) for result in gallery.recognize(queries, 1000)} == {40}


def test_prediction_does_not_depend_on_the_batch(any_index_dir):
    gallery, queries = Gallery.open(any_index_dir, NETWORK), blobs(3, 1500)[0]
    together = gallery.recognize(queries)
    for number in (0, 7, 1499):
        (alone,) = gallery.recognize(queries[number : number + 1])
        assert (alone.pred, alone.unknown) == (together[number].pred, together[number].unknown)
        assert alone.dist == pytest.approx(together[number].dist, abs=1e-5)
    assert gallery.recognize(queries[:0]) == []


def test_vectors_of_wrong_dimension_are_rejected(any_index_dir):
    with pytest.raises(IntegrityError, match="16 coordinates"):
        Gallery.open(any_index_dir, NETWORK).recognize(np.zeros((2, 8), np.float32))


def test_missing_neighbors_of_an_approximate_index_are_omitted(make_embeddings: MakeEmbeddings, tmp_path):
    """A list of an IVF index can contain fewer vectors than requested, or none."""
    vectors, label_indices = blobs(1, 60, spread=0.05)
    embeddings = make_embeddings({"gallery": (vectors, label_indices), "query": blobs(2, 60, spread=0.05)})
    build_index(embeddings, LABELS, IndexSettings(type="IVF5,Flat", k=50), tmp_path)
    gallery = Gallery.open(tmp_path, NETWORK)
    recognitions = gallery.recognize(vectors)
    assert [result.pred for result in recognitions] == [LABELS[number] for number in label_indices]
    assert all(0 < len(result.neighbors) < 50 for result in recognitions)

    no_neighbors = gallery.search(vectors, 50)
    no_neighbors.labels[:], no_neighbors.distances[:] = NO_LABEL, np.inf
    answered = gallery.classify(no_neighbors)
    assert answered.unknown.all()
    assert (answered.distances == MAX_DISTANCE).all()
    assert set(answered.labels.tolist()) == {int(np.bincount(label_indices).argmax())}


def test_index_of_another_network_is_rejected(any_index_dir):
    with pytest.raises(IntegrityError, match="vectors of network nnnn"):
        Gallery.open(any_index_dir, "m" * 64)


@pytest.fixture
def copied_index(index_dir, tmp_path):
    for path in index_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", ["index.faiss", "labels.npy"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "gone"])
def test_damaged_file_is_rejected_before_parsing(copied_index, name, damage):
    path = copied_index / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if damage == "changed" else data[: len(data) // 2])
    if damage == "gone":
        path.unlink()
    with pytest.raises(IntegrityError, match=f"{name} is missing or changed"):
        Gallery.open(copied_index, NETWORK)


def update_hash(directory, name: str) -> None:
    """Update the hash of a file in the description, as an attacker would."""
    described = describe_index(directory)
    parts = described.parts | {name: sha256_file(directory / name)}
    (directory / DESCRIPTION_FILE).write_text(described.model_copy(update={"parts": parts}).model_dump_json())


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code of the file ran",))


def test_labels_cannot_execute_code(copied_index):
    with (copied_index / "labels.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (40,)})
        pickle.dump(Bomb(), file)
    update_hash(copied_index, "labels.npy")
    with pytest.raises(IntegrityError, match="cannot be read"):
        Gallery.open(copied_index, NETWORK)


def test_invalid_index_file_is_rejected(copied_index):
    (copied_index / "index.faiss").write_bytes(b"no index at all")
    update_hash(copied_index, "index.faiss")
    with pytest.raises(IntegrityError, match="cannot be read"):
        Gallery.open(copied_index, NETWORK)


@pytest.mark.parametrize("labels", [np.zeros(39, np.int32), np.full(40, 6, np.int32)], ids=["too few", "unknown"])
def test_mismatched_files_are_rejected(copied_index, labels):
    np.save(copied_index / "labels.npy", labels)
    update_hash(copied_index, "labels.npy")
    with pytest.raises(IntegrityError, match="do not match each other"):
        Gallery.open(copied_index, NETWORK)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "run the index step again"),
        ("", "run the index step again"),
        ("{}", "run the index step again"),
        (f'{{"format": {FORMAT}}}', "run the index step again"),
    ],
)
def test_invalid_description_is_rejected(copied_index, content, sentence):
    (copied_index / DESCRIPTION_FILE).unlink()
    if content is not None:
        (copied_index / DESCRIPTION_FILE).write_text(content)
    with pytest.raises(IntegrityError, match=sentence):
        Gallery.open(copied_index, NETWORK)


@pytest.mark.parametrize("index_type", ["Flat", "HNSW8", "IVF8,SQfp16", "PQ4x4"])
def test_index_is_mapped_into_memory_with_the_same_results(make_embeddings: MakeEmbeddings, tmp_path, index_type: str):
    size = 5_000 if index_type == "HNSW8" else 20_000  # a graph takes long to build
    gallery, queries = blobs(1, size, dim=64), blobs(2, 50, dim=64)
    embeddings = make_embeddings({"gallery": gallery, "query": queries}, rows_per_shard=size)
    build_index(embeddings, LABELS, IndexSettings(type=index_type), tmp_path)
    private_bytes = _private_bytes()
    opened = Gallery.open(tmp_path, NETWORK)
    grown_bytes = _private_bytes() - private_bytes
    size_bytes = (tmp_path / "index.faiss").stat().st_size
    assert grown_bytes < size_bytes / 4 + (size * 8) + 2**20, f"{grown_bytes:,} private of {size_bytes:,}"

    in_memory = FaissIndex(faiss.read_index(str(tmp_path / "index.faiss")))
    distances, rows = in_memory.search(queries[0], 5)
    found = opened.search(queries[0], 5)
    np.testing.assert_array_equal(found.distances, distances)
    np.testing.assert_array_equal(found.labels, gallery[1][rows])


def _private_bytes() -> int:
    """Memory that this process shares with no other."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_Dirty: +(\d+) kB", rollup, re.M))


class Rounded:
    """An index whose distances differ by up to ``tolerance`` from those of another one."""

    def __init__(self, index: FaissIndex, tolerance: float, seed: int) -> None:
        self._index, self._tolerance, self._rng = index, tolerance, np.random.default_rng(seed)

    def __getattr__(self, name: str):
        return getattr(self._index, name)

    def search(self, vectors, k):
        distances, rows = self._index.search(vectors, self._index.shape[0])
        # The largest differences are the worst ones.
        distances = distances + self._tolerance * self._rng.choice([-1, 1], distances.shape).astype(np.float32)
        order = np.argsort(distances, axis=1)[:, :k]
        return np.take_along_axis(distances, order, axis=1), np.take_along_axis(rows, order, axis=1)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_settled_predictions_survive_rounding_and_others_may_not(make_embeddings, tmp_path, monkeypatch, k):
    tolerance = 0.02
    embeddings = make_embeddings({"gallery": blobs(1, 60), "query": blobs(2, 60)})
    build_index(embeddings, LABELS, IndexSettings(k=k), tmp_path)
    queries, _ = blobs(3, 400)
    gallery = Gallery.open(tmp_path, NETWORK)
    settled = gallery.is_settled(queries, tolerance)
    predictions = [(answer.pred, answer.unknown) for answer in gallery.recognize(queries)]
    changed = np.zeros(len(queries), np.bool_)
    for seed in range(30):
        index = Rounded(FaissIndex.open(tmp_path / "index.faiss"), tolerance * 0.99, seed)
        rounded = Gallery(gallery.description, index, gallery.label_indices).recognize(queries)
        changed |= [(answer.pred, answer.unknown) != p for answer, p in zip(rounded, predictions, strict=True)]
    assert not (changed & settled).any()
    assert settled.sum() > 100
    assert changed.sum() > 20, "without rounding errors that matter, the test proves nothing"


def test_query_at_the_threshold_is_settled_only_if_unknown_is_switched_off(make_embeddings: MakeEmbeddings, tmp_path):
    embeddings = make_embeddings({"gallery": blobs(1, 60), "query": blobs(2, 60)})
    queries = blobs(3, 5)[0][:1]
    build_index(embeddings, LABELS, IndexSettings(k=1), tmp_path / "off", threshold=MAX_DISTANCE)
    off = Gallery.open(tmp_path / "off", NETWORK)
    (answer,) = off.recognize(queries)
    for away, expected in ((0.0, False), (1e-3, False), (-1e-3, False), (3e-3, True), (-3e-3, True)):
        directory = tmp_path / f"at{away}"
        build_index(embeddings, LABELS, IndexSettings(k=1), directory, threshold=answer.dist + away)
        assert Gallery.open(directory, NETWORK).is_settled(queries, 2e-3).tolist() == [expected]
    assert off.is_settled(queries, 2e-3).tolist() == [True]


# Large and small classes


def noisy(rng: np.random.Generator, means: np.ndarray, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors, most of whose length is noise, as of photographs."""
    labels = np.repeat(np.arange(len(counts)), counts)
    vectors = means[labels] + rng.normal(size=(len(labels), means.shape[1])) / np.sqrt(means.shape[1])
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def test_large_classes_do_not_take_the_images_of_a_small_one(make_embeddings: MakeEmbeddings, tmp_path):
    rng = np.random.default_rng(0)
    means = 0.16 * unit(rng.normal(size=(4, 400)))
    gallery, (queries, labels) = noisy(rng, means, [300, 300, 300, 20]), noisy(rng, means, [200] * 4)
    build_index(
        make_embeddings({"gallery": gallery, "query": (queries, labels)}), LABELS[:4], IndexSettings(), tmp_path
    )
    pred = np.array([answer.pred for answer in Gallery.open(tmp_path, NETWORK).recognize(queries)])
    large, small = ((pred == np.array(LABELS)[labels])[each].mean() for each in (labels < 3, labels == 3))
    assert large > 0.9
    assert small > 0.7  # 0.55 with vectors of length 1; 0.17 by a vote of five that are moved halfway


@pytest.mark.parametrize("count", [1, 2, 20])
def test_vectors_are_as_long_as_if_their_class_had_more_images(count: int):
    rng = np.random.default_rng(1)
    vectors = unit(np.ones((1, 400)) / 20 + 0.1 * rng.normal(size=(count, 400)))
    means = vectors.mean(axis=0, keepdims=True)
    noise = noise_of_means(means, np.array([count]))
    lengths = np.linalg.norm(move_toward(vectors, means, noise, 0.85), axis=1)
    assert (lengths >= 1 - 1e-6).all()
    assert (lengths <= np.sqrt(2) + 1e-6).all()
    assert move_toward(vectors, means, noise, 0) == pytest.approx(vectors, abs=1e-6)
    if count == 1:
        assert lengths == pytest.approx(1)
        assert move_toward(0 * vectors, 0 * means, noise, 0.85) == pytest.approx(0)


# Exact neighbors


@pytest.mark.parametrize("classes", [2, 5, 90])
def test_nearest_vectors_and_impostors_are_those_of_all_pairs(make_embeddings: MakeEmbeddings, monkeypatch, classes):
    monkeypatch.setattr(vectors, "QUERY_BLOCK_SIZE", 16)
    monkeypatch.setattr(vectors, "VECTOR_BLOCK_SIZE", 32)
    gallery = blobs(1, 330, classes=classes)
    embeddings = make_embeddings({"gallery": gallery, "query": blobs(2, 130, classes=classes)})
    queries = sample_queries(embeddings, np.ones(classes, np.bool_))
    found = exact_neighbors(queries, embeddings.blocks("gallery"))

    squared = ((queries.embeddings[:, None] - gallery[0][None]) ** 2).sum(axis=2)
    assert (found.rows == squared.argmin(axis=1)).all()
    np.testing.assert_allclose(found.squared, squared.min(axis=1), atol=1e-5)
    squared[queries.labels[:, None] == gallery[1][None]] = np.inf
    np.testing.assert_allclose(found.squared_to_others, squared.min(axis=1), atol=1e-5)


def test_sample_is_bounded_and_spread_over_the_known_queries(make_embeddings: MakeEmbeddings):
    vectors, labels = blobs(2, 1000)
    vectors[:, 0] = np.arange(1000)
    embeddings = make_embeddings({"gallery": blobs(1, 60), "query": (vectors, labels)})
    known = np.array([True, True, False, True, True])
    sample = sample_queries(embeddings, known, size=100)
    assert len(sample.labels) == 100
    assert 2 not in sample.labels
    assert (np.diff(sample.labels) >= 0).all()
    assert np.diff(np.sort(sample.embeddings[:, 0])).max() < 25
    for position, label in zip(sample.embeddings[:, 0].astype(int), sample.labels, strict=True):
        assert labels[position] == label
    assert len(sample_queries(embeddings, known).labels) == (labels != 2).sum()


def test_calibration_reads_the_gallery_once_for_any_number_of_queries(make_embeddings, tmp_path, monkeypatch):
    reads: Counter[str] = Counter()
    blocks = Embeddings.blocks

    def counted(self: Embeddings, split):
        reads[split] += 1
        return blocks(self, split)

    monkeypatch.setattr(Embeddings, "blocks", counted)

    def gallery_reads(queries: int) -> int:
        reads.clear()
        embeddings = make_embeddings({"gallery": blobs(1, 90), "query": blobs(2, queries)}, rows_per_shard=1000)
        build_index(embeddings, tuple("abcde"), IndexSettings(), tmp_path)
        return reads["gallery"]

    assert gallery_reads(20_000) == gallery_reads(20)
