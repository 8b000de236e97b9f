"""The open-set threshold: from which distance on an image counts as unknown."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evernear.embedding.embed import EmbeddingBlock, Embeddings
from evernear.errors import DataError
from evernear.index.description import FARTHEST, Calibration
from evernear.index.library import nearest_rows

if TYPE_CHECKING:
    from faiss import Index

QUERIES_AT_ONCE = 1024
ROUNDING = 1e-5
"""Two squared distances of float32 unit vectors that differ by less are taken as equal (seen: 1e-6)."""
Floats = NDArray[np.float32]


def calibrate(
    embeddings: Embeddings,
    known: NDArray[np.bool_],
    index: "Index",
    false_accept_rate: float,
    threshold: float | None,
) -> Calibration:
    """Set the threshold, and count what the index does at it on the query split, neither trained nor tested
    on.

    ``threshold`` is the one that `evernear.evaluation.probe` found on classes its network had never seen, and
    is taken as it is: distances between unit vectors of one recipe compare. How near it comes depends on
    which classes are unknown: a stated 5% was 6% over eight draws of two unseen classes of scikit-learn's
    digits (0 to 25%), and 12% and 2% for two draws on MNIST. It cost 16% of known digits and 6% of MNIST's,
    called unknown.

    Where there are too few classes for a probe (None), impostors stand in: each query counts as unknown once,
    at the distance to the nearest gallery vector of *another* class, and ``false_accept_rate`` of them may
    lie within the threshold. That trusts classes never seen too much (5% was 70% in the draws of digits, 56%
    and 5% on MNIST), for a network puts those it was trained on far apart.

    Distances to impostors are exact, whatever the index: an approximate search started amid a query's own
    class would find no impostor, and the threshold would come out too wide. ``known`` says of each label
    number whether its class is part of the gallery.

    Raises:
        DataError: no query, or a gallery of fewer than two classes.
    """
    impostors, genuine, found = [np.empty(0, np.float32)], [np.empty(0, np.float32)], 0
    for queries in _slices(of_known(embeddings.blocks("query"), known)):
        exact = _nearest(queries, of_known(embeddings.blocks("gallery"), known))
        distances, rows = nearest_rows(index, queries.embeddings, 1)
        # The same distance is as good as the same vector: a gallery may hold an image twice.
        found += int(((rows[:, 0] == exact.rows) | (np.abs(distances[:, 0] ** 2 - exact.squared) <= ROUNDING)).sum())
        impostors.append(_root(exact.squared_to_others))
        genuine.append(distances[:, 0])
    impostor_distances, distances = np.concatenate(impostors), np.concatenate(genuine)
    if not len(distances):
        raise DataError("No image of the query split is left to calibrate on; raise data.query_fraction.")
    if not np.isfinite(impostor_distances).all():
        raise DataError("The gallery holds one class only, so no query has an impostor; raise data.gallery_fraction.")
    found_by = "impostors" if threshold is None else "unseen classes"
    if threshold is None:
        threshold = threshold_at(impostor_distances, false_accept_rate)
    return Calibration(
        found_by=found_by,
        queries=len(distances),
        stated_false_accept_rate=false_accept_rate,
        threshold=threshold,
        false_accepts=int((impostor_distances <= threshold).sum()),
        false_rejects=int((distances > threshold).sum()),
        nearest_found=found,
    )


def threshold_at(unknown_distances: Floats, false_accept_rate: float) -> float:
    """The largest float32 that at most ``false_accept_rate`` of ``unknown_distances`` (N,), N >= 1, do not
    exceed.

    With ties among the distances fewer are accepted, never more; with N below 1 / ``false_accept_rate`` none.
    """
    allowed = int(np.floor(false_accept_rate * len(unknown_distances)))
    first_refused = np.partition(unknown_distances, allowed)[allowed]
    return float(np.clip(np.nextafter(np.float32(first_refused), np.float32(-1)), 0, FARTHEST))


@dataclass(frozen=True)
class _Nearest:
    """For each query, exactly: squared distance to the nearest vector, its row, and the same for other
    classes.
    """

    squared: Floats
    rows: NDArray[np.int64]
    squared_to_others: Floats


def _nearest(queries: EmbeddingBlock, gallery: Iterable[EmbeddingBlock]) -> _Nearest:
    count, first_row = len(queries.labels), 0
    nearest = np.full(count, np.inf, np.float32)
    rows = np.full(count, -1, np.int64)
    other = nearest.copy()
    for block in gallery:
        squared = 2 - 2 * (queries.embeddings @ block.embeddings.T)
        columns = squared.argmin(axis=1)
        here = squared[np.arange(count), columns]
        rows = np.where(here < nearest, first_row + columns, rows)
        nearest = np.minimum(nearest, here)
        squared[queries.labels[:, None] == block.labels[None, :]] = np.inf
        other = np.minimum(other, squared.min(axis=1))
        first_row += len(block.labels)
    return _Nearest(nearest, rows, other)


def of_known(blocks: Iterable[EmbeddingBlock], known: NDArray[np.bool_]) -> Iterator[EmbeddingBlock]:
    """``blocks`` without the embeddings whose label number is not ``known`` (a mask over label numbers)."""
    for block in blocks:
        kept = known[block.labels]
        if kept.any():
            yield EmbeddingBlock(block.embeddings[kept], block.labels[kept], block.digests[kept])


def _slices(blocks: Iterable[EmbeddingBlock]) -> Iterator[EmbeddingBlock]:
    """The same in smaller pieces: the matrix of distances between two whole blocks would be a gigabyte."""
    for block in blocks:
        for start in range(0, len(block.labels), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            yield EmbeddingBlock(block.embeddings[part], block.labels[part], block.digests[part])


def _root(squared: Floats) -> Floats:
    return np.sqrt(np.maximum(squared, 0)).astype(np.float32)
