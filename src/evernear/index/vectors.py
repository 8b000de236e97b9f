"""The protocols for gallery backends, which number the vectors by row."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evernear.common.plugins import backend_names, plugins
from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.errors import DataError, SettingsError
from evernear.index.description import Collection
from evernear.settings import IndexSettings

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
    return ExactNeighbors(2 - 2 * np.minimum(best, 1), rows, 2 - 2 * np.minimum(best_of_others, 1))


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


class VectorIndex(Protocol):
    """The vectors of a gallery, open for search. See `move_toward` for their lengths."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of vectors, and of dimensions."""
        ...

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Distances and rows (N, k) of the vectors nearest to each of the unit ``vectors`` (N, D),
        nearest first. If fewer than k are found, rows are -1 and distances infinite."""
        ...

    def set_search(self, parameters: str) -> None:
        """Parameters of later searches, such as ``nprobe=16``. Raises RuntimeError if unknown."""
        ...

    def save(self, directory: Path) -> Collection | None:
        """Write the vectors to ``directory``, or return the collection that contains them."""
        ...


@dataclass(frozen=True)
class GalleryVectors:
    """The images of the gallery split whose label index is in the mask ``known``."""

    embeddings: Embeddings
    labels: tuple[str, ...]
    """The dataset's labels, by number."""
    known: NDArray[np.bool_]
    size: int
    means: Floats
    """The mean vector of each label (labels, D)."""
    noise: Floats
    """`noise_of_means` (labels,)."""
    toward_mean: float
    """See `evernear.index.description.IndexDescription.toward_mean`."""
    owner: str = ""
    """The store that owns a collection with these vectors
    (`evernear.common.store.base.owner_of`)."""

    def blocks(self) -> Iterator[EmbeddingBlock]:
        """The vectors, in the order of their rows."""
        for block in select_labels(self.embeddings.blocks("gallery"), self.known):
            yield EmbeddingBlock(self._moved(block), block.labels, block.digests) if self.toward_mean else block

    def _moved(self, block: EmbeddingBlock) -> Floats:
        numbers = block.labels
        return move_toward(block.embeddings, self.means[numbers], self.noise[numbers], self.toward_mean)


def move_toward(vectors: Floats, means: Floats, noise: Floats, share: float) -> Floats:
    """Move unit ``vectors`` (N, D) by a ``share`` of the way toward the mean of their class, and
    scale them to the length 1 that they would have if the ``means`` (N, D) had no ``noise`` (N,).

    With this noise, a class of 20 images that is added to classes of 300 would be farther from its
    own images than these are from theirs, and lose them. Because the noise is an estimate, it
    counts at most as half of the squared length.
    """
    moved = (1 - share) * vectors + share * means
    squared = np.square(moved).sum(axis=1)
    lengths = np.sqrt(squared - np.minimum((1 - (1 - share) ** 2) * noise, squared / 2))
    return (moved / np.where(lengths > 0, lengths, 1)[:, None]).astype(np.float32)


def noise_of_means(means: Floats, counts: NDArray[np.int64]) -> Floats:
    """How much longer, squared, the ``means`` (labels, D) of ``counts`` (labels,) unit vectors are
    than those of infinitely many: by the variance of one vector, divided by the number."""
    return np.maximum(1 - np.square(means).sum(axis=1), 0) / np.maximum(counts - 1, 1)


@dataclass(frozen=True)
class Choice:
    index: VectorIndex
    factory: str
    search: str
    reason: str


class IndexBackend(Protocol):
    """Stores the vectors of a gallery outside the release's archive."""

    def check(self, settings: IndexSettings) -> None:
        """Check, before a run starts, that its gallery can be written."""
        ...

    def create(
        self, gallery: GalleryVectors, settings: IndexSettings, queries: EmbeddingBlock, exact: ExactNeighbors
    ) -> Choice:
        """Fill a collection. If ``settings.type`` is not set, choose its type on ``queries``."""
        ...

    def open(self, collection: Collection, shape: tuple[int, int], search: str) -> VectorIndex:
        """Open a collection of ``shape`` (vectors, dimensions) with the parameters ``search``."""
        ...

    def drop(self, collection: Collection) -> None:
        """Delete a collection if it exists."""
        ...


@contextmanager
def index_backend(name: str) -> Generator[IndexBackend]:
    """The backend that ``index.backend`` or a release names. Reports a missing library."""
    for plugin in plugins():
        if make := plugin.backends.get(name):
            with plugin.installed():
                yield make()
            return
    raise SettingsError(f"The index backend {name} is unknown here; known: {', '.join(backend_names())}.")
