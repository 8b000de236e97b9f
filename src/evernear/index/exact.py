"""Exact nearest neighbors of a sample of queries, in one pass over the gallery."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.errors import DataError

SAMPLE_SIZE = 8192
"""Maximum number of queries for calibrating an index, at which the 95% Wilson interval is 0.8% to
1.2% for a share of 1%, and 4.6% to 5.5% for 5%."""
QUERY_BLOCK_SIZE, VECTOR_BLOCK_SIZE = 512, 1024
"""Size of a block of scores, which takes 2 MB and fits in the cache of a processor core."""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ExactNeighbors:
    """Exact squared distances of N queries to their nearest vectors, and these vectors' rows."""

    squared: Floats
    rows: NDArray[np.int64]
    squared_to_others: Floats
    """Squared distance to the nearest vector of a different class, or infinity without one."""


def sample_queries(
    embeddings: Embeddings,
    known: NDArray[np.bool_],
    size: int = SAMPLE_SIZE,
    exclude: frozenset[bytes] = frozenset(),
) -> EmbeddingBlock:
    """At most ``size`` queries of ``known`` labels, evenly spaced and sorted by label. Digests in
    ``exclude`` are omitted, unless no query would remain."""
    selected = list(_at(select_labels(embeddings.blocks("query"), known), _positions(embeddings, known, size)))
    if not selected:
        raise DataError("No image of the query split is left to calibrate on; raise data.query_fraction.")
    vectors, labels, digests = (
        np.concatenate(columns)
        for columns in zip(*((block.embeddings, block.labels, block.digests) for block in selected), strict=True)
    )
    order = np.argsort(labels, kind="stable")
    included = digests_outside(digests, exclude)[order]
    order = order[included] if included.any() else order
    return EmbeddingBlock(vectors[order], labels[order], digests[order])


def digests_outside(digests: NDArray[np.uint8], exclude: frozenset[bytes]) -> NDArray[np.bool_]:
    """For each of ``digests`` (N, 32), whether it is not in ``exclude``."""
    return np.array([digest.tobytes() not in exclude for digest in digests] if exclude else [True] * len(digests), bool)


def _positions(embeddings: Embeddings, known: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
    count = sum(len(block.labels) for block in select_labels(embeddings.blocks("query"), known))
    return np.unique(np.linspace(0, count - 1, min(size, count)).astype(np.int64))


def _at(blocks: Iterable[EmbeddingBlock], positions: NDArray[np.int64]) -> Iterator[EmbeddingBlock]:
    first = 0
    for block in blocks:
        here = positions[np.searchsorted(positions, first) : np.searchsorted(positions, first + len(block.labels))]
        if len(here):
            # Indexing with numbers copies the rows. A view would keep the whole block in memory.
            rows = here - first
            yield EmbeddingBlock(block.embeddings[rows], block.labels[rows], block.digests[rows])
        first += len(block.labels)


def exact_neighbors(queries: EmbeddingBlock, gallery: Iterable[EmbeddingBlock]) -> ExactNeighbors:
    """One pass for all ``queries``, which must be sorted by label, as by `sample_queries`."""
    count, first_row = len(queries.labels), 0
    best = np.full(count, -np.inf, np.float32)
    best_of_others = best.copy()
    rows = np.full(count, -1, np.int64)
    for block in gallery:
        for vectors in range(0, len(block.labels), VECTOR_BLOCK_SIZE):
            labels = block.labels[vectors : vectors + VECTOR_BLOCK_SIZE]
            order = np.argsort(labels, kind="stable")
            transposed = np.ascontiguousarray(block.embeddings[vectors : vectors + VECTOR_BLOCK_SIZE][order].T)
            for start in range(0, count, QUERY_BLOCK_SIZE):
                part = slice(start, start + QUERY_BLOCK_SIZE)
                scores = queries.embeddings[part] @ transposed
                highest = scores.max(axis=1)
                improved = np.flatnonzero(highest > best[part])
                rows[start + improved] = first_row + vectors + order[scores[improved].argmax(axis=1)]
                best[part] = np.maximum(best[part], highest)
                _exclude_own_class(scores, queries.labels[part], labels[order])
                best_of_others[part] = np.maximum(best_of_others[part], scores.max(axis=1))
        first_row += len(block.labels)
    return ExactNeighbors(2 - 2 * best, rows, 2 - 2 * best_of_others)


def _exclude_own_class(scores: Floats, query_labels: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
    """Set the scores of vectors of the query's class to minus infinity. Both label arrays are
    sorted, so each class is a block."""
    for label in np.intersect1d(query_labels, labels):
        same = (slice(*np.searchsorted(column, [label, label + 1])) for column in (query_labels, labels))
        scores[tuple(same)] = -np.inf


def select_labels(blocks: Iterable[EmbeddingBlock], known: NDArray[np.bool_]) -> Iterator[EmbeddingBlock]:
    """Yield the embeddings whose label index is in the mask ``known``."""
    for block in blocks:
        selected = known[block.labels]
        if selected.any():
            yield EmbeddingBlock(block.embeddings[selected], block.labels[selected], block.digests[selected])
