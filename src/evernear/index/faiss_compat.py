"""The only import of FAISS, with its settings and the differences between its index types."""

import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from evernear.disk import atomic_file
from evernear.index.description import VECTORS_FILE

with warnings.catch_warnings():
    # SWIG's own types have no __module__, which Python 3.12 and later call deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import faiss

# Above this number of queries times dimensions, FAISS uses BLAS, which is also exact. It is faster from three
# queries of 128 dimensions.
faiss.cvar.distance_compute_blas_threshold = 300

__all__ = ["FaissIndex", "faiss", "nearest_rows", "open_index", "set_search_parameters", "write_index"]


class FaissIndex:
    """An index of FAISS. It implements `evernear.index.vectors.VectorIndex`."""

    def __init__(self, index: faiss.Index) -> None:
        self._index = index

    @property
    def shape(self) -> tuple[int, int]:
        """Number of vectors and of dimensions."""
        return self._index.ntotal, self._index.d

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Search as `nearest_rows`."""
        return nearest_rows(self._index, vectors, k)

    def set_search(self, parameters: str) -> None:
        """Set search parameters as `set_search_parameters`."""
        set_search_parameters(self._index, parameters)

    def save(self, directory: Path) -> None:
        """Write the index to `VECTORS_FILE` in ``directory``.

        Raises:
            StoreError: the disk is full, or ``directory`` cannot be written.
        """
        with atomic_file(directory / VECTORS_FILE) as file:
            write_index(self._index, file)


def write_index(index: faiss.Index, file: BinaryIO) -> None:
    """Write ``index`` to ``file``. Raises `OSError` if the disk is full.

    With a path, FAISS raises RuntimeError for a full disk, and nothing if the disk is full when the file is closed.
    """
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # pyright: ignore[reportAttributeAccessIssue] (its stubs lack it)


def open_index(path: Path) -> faiss.Index:
    """Open the index in ``path`` for search, mapped into memory: processes that open one file share its pages.

    The file must not change while the index is open.

    Raises:
        RuntimeError: it is not an index.
    """
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)


def set_search_parameters(index: faiss.Index, search: str) -> None:
    """Set parameters such as ``nprobe=16``, which are saved with the index.

    Raises:
        RuntimeError: the index has no such parameter.
    """
    faiss.ParameterSpace().set_index_parameters(index, search)


def nearest_rows(
    index: faiss.Index, embeddings: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search unit vectors (N, D): L2 distances and rows of the nearest vectors, both (N, k), nearest first.

    If the index finds fewer than k, rows are -1 and distances infinite. For unit vectors, |a - b|^2 = 2 - 2 ab.
    Releases of evernear 0.1.0 have L2 indexes.
    """
    scores, rows = index.search(np.ascontiguousarray(embeddings, dtype=np.float32), k)
    squared = scores if index.metric_type == faiss.METRIC_L2 else 2 - 2 * np.clip(scores, -1, 1)
    return np.where(rows >= 0, np.sqrt(np.maximum(squared, 0)), np.float32(np.inf)), rows
