"""Import FAISS, apply its settings, and hide the differences between index types. No other module
imports FAISS."""

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.container import ROOT
from evernear.common.disk import atomic_file
from evernear.index.description import VECTORS_FILE

CORE_TYPE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def core_type(root: Path = ROOT) -> str | None:
    """The OpenBLAS core type for this processor, or None if this is not an Intel processor with
    AVX2 and FMA.

    ``root`` is the directory that contains ``proc``.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    # All processors of a machine are the same, so the information about the last processor is used.
    about = {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(about.get("flags", ()))
    if about.get("vendor_id") != ["GenuineIntel"] or not {"avx2", "fma"} <= flags:
        return None
    return "SKYLAKEX" if flags >= AVX512 else "HASWELL"


@contextmanager
def _newer_processors() -> Generator[None]:
    """While FAISS loads OpenBLAS, set the environment variable ``OPENBLAS_CORETYPE`` to this
    processor's core type, unless the user has set the variable.

    The FAISS 1.15 wheels contain OpenBLAS 0.3.15 from 2021. This version treats newer Intel
    processors, such as Sapphire Rapids, as Prescott processors from 2004, which have no AVX.
    Without the variable, assigning vectors to 4,096 lists takes 3.2 times as long.
    """
    name = core_type()
    if name is None or CORE_TYPE in os.environ:
        yield
        return
    os.environ[CORE_TYPE] = name
    try:
        yield
    finally:
        del os.environ[CORE_TYPE]


with _newer_processors(), warnings.catch_warnings():
    # SWIG's types have no __module__, for which Python 3.12 and later emit a DeprecationWarning.
    warnings.simplefilter("ignore", DeprecationWarning)
    import faiss

# If the number of queries times the number of dimensions exceeds this value, FAISS uses BLAS, which
# is also exact. BLAS is faster for three or more queries of 128 dimensions.
faiss.cvar.distance_compute_blas_threshold = 300


class FaissIndex:
    """A FAISS index. It implements `evernear.index.vectors.VectorIndex`."""

    def __init__(self, index: faiss.Index) -> None:
        self._index = index

    @staticmethod
    def open(path: Path) -> "FaissIndex":
        """Open the index at ``path`` for searching. The file is mapped into memory, and processes
        that open the same file share its pages.

        The file must not change while the index is open.

        Raises:
            RuntimeError: the file is not an index.
        """
        return FaissIndex(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC))

    @property
    def shape(self) -> tuple[int, int]:
        """The number of vectors, and the number of dimensions."""
        return self._index.ntotal, self._index.d

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """For each of ``vectors``, an array of shape (N, D), the L2 distances and the rows of the
        ``k`` nearest vectors, as two arrays of shape (N, k). See `VectorIndex`.

        For unit vectors, |a - b|^2 = 2 - 2 ab.
        """
        scores, rows = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)
        distances = np.sqrt(2 - 2 * np.clip(scores, -1, 1))
        return np.where(rows >= 0, distances, np.float32(np.inf)), rows

    def set_search(self, parameters: str) -> None:
        """Set the parameters of later searches, such as ``nprobe=16``. The parameters are saved
        with the index.

        Raises:
            RuntimeError: the index has no such parameter.
        """
        faiss.ParameterSpace().set_index_parameters(self._index, parameters)

    def save(self, directory: Path) -> None:
        """Write the index to `VECTORS_FILE` in ``directory``.

        FAISS does not open the file itself, because FAISS would raise RuntimeError if the disk were
        full. If the disk became full while FAISS closed the file, FAISS would not raise an error.

        Raises:
            StoreError: the disk is full, or ``directory`` is not writable.
        """
        with atomic_file(directory / VECTORS_FILE) as file:
            writer = faiss.PyCallbackIOWriter(file.write)  # pyright: ignore[reportAttributeAccessIssue] (its stubs lack it)
            faiss.write_index(self._index, writer)
