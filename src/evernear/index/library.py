"""FAISS, imported in this one place and told how to search."""

import warnings
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

with warnings.catch_warnings():
    # SWIG's own types have no __module__, which Python 3.12 and later call deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import faiss

# FAISS compares the number of queries times their dimensions with this; beyond it they go through BLAS together,
# which is still exact. From three queries of 128 dimensions on that is the faster way.
faiss.cvar.distance_compute_blas_threshold = 300

__all__ = ["faiss", "nearest_rows", "write_index"]


def write_index(index: faiss.Index, file: BinaryIO) -> None:
    """Write ``index`` to ``file``; an `OSError` says what is wrong with the disk.

    Given a path, FAISS raises a RuntimeError for a disk that is full, and nothing if it is found full on closing.
    """
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # pyright: ignore[reportAttributeAccessIssue] (its stubs lack it)


def nearest_rows(
    index: faiss.Index, embeddings: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """L2 distances and rows, both (N, k), of what ``index`` finds for unit vectors (N, D), nearest first.

    Where it finds fewer, the row is -1 and the distance infinite. Of unit vectors, |a - b|^2 = 2 - 2 ab; releases
    of evernear 0.1.0 hold indexes of L2.
    """
    scores, rows = index.search(np.ascontiguousarray(embeddings, dtype=np.float32), k)
    squared = scores if index.metric_type == faiss.METRIC_L2 else 2 - 2 * np.clip(scores, -1, 1)
    return np.where(rows >= 0, np.sqrt(np.maximum(squared, 0)), np.float32(np.inf)), rows
