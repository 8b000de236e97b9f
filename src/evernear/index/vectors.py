"""The protocols for gallery backends, which number the vectors by row."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evernear.common.plugins import backend_names, plugins
from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.errors import SettingsError
from evernear.index.description import Collection
from evernear.index.exact import ExactNeighbors, select_labels
from evernear.settings import IndexSettings


class VectorIndex(Protocol):
    """The unit vectors of a gallery, open for search."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of vectors, and of dimensions."""
        ...

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """L2 distances and rows (N, k) of the vectors nearest to each of ``vectors`` (N, D),
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
    owner: str = ""
    """The store that owns a collection with these vectors
    (`evernear.common.store.base.owner_of`)."""

    def blocks(self) -> Iterator[EmbeddingBlock]:
        """The vectors, in the order of their rows."""
        return select_labels(self.embeddings.blocks("gallery"), self.known)


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
