"""Find an embedding's nearest neighbor, which gives it a label, and call it unknown by distance."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.errors import IntegrityError
from evernear.index.description import (
    LABELS_FILE,
    MAX_DISTANCE,
    VECTORS_FILE,
    IndexDescription,
    check_parts,
    describe_index,
)
from evernear.index.vectors import VectorIndex, index_backend

NO_LABEL = -1
"""Replaces the label number of a neighbor that an approximate index did not find."""
SETTLED_BY = 100
"""Number of neighbors that `Gallery.is_settled` checks. If all could be the nearest, nothing is
settled."""
Embedded = NDArray[np.float32]


class Neighbor(NamedTuple):
    """``dist`` is the distance (0 to 2), and ``row`` the row in the index."""

    label: str
    dist: float
    row: int


class Recognition(NamedTuple):
    """``dist`` is the distance (0 to 2) of the query to its nearest neighbor."""

    pred: str
    dist: float
    unknown: bool
    neighbors: tuple[Neighbor, ...]


@dataclass(frozen=True)
class Neighbors:
    """Label indices, distances and index rows (N, k) of the vectors nearest to N queries,
    nearest first. Missing ones have label `NO_LABEL`, infinite distance and row -1."""

    labels: NDArray[np.int32]
    distances: NDArray[np.float32]
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Classifications:
    """Label indices, nearest-neighbor distances and unknown flags (N,) for N queries."""

    labels: NDArray[np.int32]
    distances: NDArray[np.float32]
    unknown: NDArray[np.bool_]


class Gallery:
    def __init__(self, description: IndexDescription, index: VectorIndex, label_indices: NDArray[np.int32]) -> None:
        self.description = description
        self._index = index
        self._label_indices = label_indices

    @staticmethod
    def open(directory: Path, network_sha256: str) -> "Gallery":
        """Open the index in ``directory`` for queries embedded by the network ``network_sha256``.

        Raises:
            IntegrityError: the vectors belong to a different network, a file is missing or was
                changed, or the files do not match each other. Hashes are checked before parsing.
            StoreError: the collection's server is unreachable or rejects the request.
            SettingsError: the collection's backend is unknown or not installed.
        """
        described = describe_index(directory)
        if described.network_sha256 != network_sha256:
            raise IntegrityError(
                f"The index in {directory} contains vectors of network {described.network_sha256[:12]}, not of "
                f"{network_sha256[:12]}: distances between them are meaningless; run embed and index again."
            )
        check_parts(directory, described)
        try:
            index = _open_vectors(directory, described)
            label_indices = _read_array(directory / LABELS_FILE)
            counts = np.bincount(label_indices, minlength=len(described.labels)).tolist()
        except (RuntimeError, ValueError, TypeError) as error:
            raise IntegrityError(f"The index in {directory} cannot be read; {described.remedy}.") from error
        shapes = index.shape, label_indices.shape
        if shapes != ((described.size, described.dim), (described.size,)) or counts != list(described.counts):
            raise IntegrityError(f"The files of the index in {directory} do not match each other; {described.remedy}.")
        return Gallery(described, index, label_indices)

    @property
    def label_indices(self) -> NDArray[np.int32]:
        """The label number of each index row."""
        return self._label_indices

    def recognize(self, embeddings: Embedded, k: int | None = None) -> list[Recognition]:
        """Recognize unit vectors (N, D). Each lists ``k`` neighbors, by default
        ``description.k``."""
        neighbors = self.search(embeddings, self.description.k if k is None else k)
        answers = self.classify(neighbors)
        names = (*self.description.labels, "")  # the last name is for NO_LABEL, which is removed below
        return [
            Recognition(
                names[label],
                distance,
                unknown,
                tuple(Neighbor(names[n], d, row) for n, d, row in zip(*nearest, strict=True) if n != NO_LABEL),
            )
            for label, distance, unknown, *nearest in zip(
                answers.labels.tolist(),
                answers.distances.tolist(),
                answers.unknown.tolist(),
                neighbors.labels.tolist(),
                neighbors.distances.tolist(),
                neighbors.rows.tolist(),
                strict=True,
            )
        ]

    def search(self, embeddings: Embedded, k: int) -> Neighbors:
        """The ``k`` vectors nearest to each unit vector (N, D), or all if the gallery has fewer."""
        if embeddings.ndim != 2 or embeddings.shape[1] != self.description.dim:
            raise IntegrityError(
                f"The index compares vectors of {self.description.dim} coordinates; "
                f"an array of shape {embeddings.shape} cannot be looked up."
            )
        distances, rows = self._index.search(embeddings, min(k, self.description.size))
        labels = np.where(rows >= 0, self._label_indices[rows], np.int32(NO_LABEL))
        return Neighbors(labels=labels, distances=distances, rows=rows)

    def classify(self, neighbors: Neighbors) -> Classifications:
        """Classify queries by the nearest of the neighbors that `search` found. A query without
        neighbors is unknown, at `MAX_DISTANCE`, and gets the label of the largest class."""
        labels = neighbors.labels[:, 0].copy()
        no_neighbors = labels == NO_LABEL
        labels[no_neighbors] = np.argmax(self.description.counts)
        distances = np.where(
            no_neighbors, np.float32(MAX_DISTANCE), np.minimum(neighbors.distances[:, 0], MAX_DISTANCE)
        )
        return Classifications(labels, distances, (distances > self.description.threshold) | no_neighbors)

    def is_settled(self, embeddings: Embedded, tolerance: float) -> NDArray[np.bool_]:
        """For each unit vector (N, D), whether no change of distances by up to ``tolerance``
        changes the prediction."""
        neighbors = self.search(embeddings, SETTLED_BY)
        predicted = self.classify(neighbors)
        is_clear = np.abs(predicted.distances - self.description.threshold) > tolerance
        if self.description.threshold >= MAX_DISTANCE:  # unknown is switched off
            is_clear[:] = True
        may_be_nearest = neighbors.distances <= neighbors.distances[:, :1] + 2 * tolerance
        others = may_be_nearest & (neighbors.labels != predicted.labels[:, None])
        is_complete = neighbors.distances.shape[1] == self.description.size or ~may_be_nearest[:, -1]
        return is_clear & is_complete & ~others.any(axis=1)


def _open_vectors(directory: Path, described: IndexDescription) -> VectorIndex:
    if described.collection is None:
        from evernear.index.faiss_compat import FaissIndex

        return FaissIndex.open(directory / VECTORS_FILE)
    with index_backend(described.collection.backend) as backend:
        return backend.open(described.collection, (described.size, described.dim), described.search)


def _read_array(path: Path) -> NDArray[Any]:
    """`numpy.load` would also accept an archive or a pickle."""
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)
