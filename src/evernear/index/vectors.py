"""The protocol for gallery backends, which number the vectors by row."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.index.description import Collection
from evernear.index.exact import select_labels


class VectorIndex(Protocol):
    """The unit vectors of a gallery, open for search."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of vectors, and the number of dimensions."""
        ...

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The L2 distances and the rows of the ``k`` vectors nearest to each of ``vectors`` (N, D),
        nearest first, as two arrays of shape (N, k).

        If the index finds fewer than k vectors, the missing rows are -1 and the missing distances
        are infinite.
        """
        ...

    def set_search(self, parameters: str) -> None:
        """Set the parameters of later searches, such as ``nprobe=16``.

        Raises:
            RuntimeError: the index has no such parameter.
        """
        ...

    def save(self, directory: Path) -> Collection | None:
        """Write the vectors to ``directory``, or return the collection that contains them."""
        ...


@dataclass(frozen=True)
class GalleryVectors:
    """The part of the gallery split to index:
    the images whose label index is in the mask ``known``."""

    embeddings: Embeddings
    labels: tuple[str, ...]
    """The dataset's labels, by number."""
    known: NDArray[np.bool_]
    size: int
    owner: str = ""
    """The store that owns a collection with these vectors
    (`evernear.common.store.identity.owner_of`)."""

    def blocks(self) -> Iterator[EmbeddingBlock]:
        """The vectors in the order of their rows."""
        return select_labels(self.embeddings.blocks("gallery"), self.known)
