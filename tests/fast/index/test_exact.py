from collections import Counter

import numpy as np
import pytest
from scipy.stats import binomtest

from evernear.embedding.embeddings import Embeddings
from evernear.index import vectors
from evernear.index.build import build_index
from evernear.index.vectors import SAMPLE_SIZE, exact_neighbors, sample_queries
from evernear.settings import IndexSettings
from tests.gallery_vectors import MakeEmbeddings, blobs


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


def test_calibration_reads_the_gallery_once_for_any_number_of_queries(
    make_embeddings: MakeEmbeddings, tmp_path, monkeypatch
):
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


def test_sampling_errors_are_those_stated():
    for share, low, high in ((0.01, 0.008, 0.012), (0.05, 0.046, 0.055)):
        interval = binomtest(round(share * SAMPLE_SIZE), SAMPLE_SIZE).proportion_ci(method="wilson")
        assert (round(interval.low, 3), round(interval.high, 3)) == (low, high)
