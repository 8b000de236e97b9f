"""The only module that imports FAISS. It hides the differences between index types."""

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import atomic_file
from evernear.common.processes import ROOT
from evernear.index.description import VECTORS_FILE

CORE_TYPE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def core_type(root: Path = ROOT) -> str | None:
    """OpenBLAS's core type of an Intel processor with AVX2 and FMA. ``root`` contains ``proc``."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    # All processors of a machine are the same, so the last one's lines count.
    about = {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(about.get("flags", ()))
    if about.get("vendor_id") != ["GenuineIntel"] or not {"avx2", "fma"} <= flags:
        return None
    return "SKYLAKEX" if flags >= AVX512 else "HASWELL"


@contextmanager
def _newer_processors() -> Generator[None]:
    """While FAISS loads OpenBLAS, set ``OPENBLAS_CORETYPE``, unless the user has set it.

    The FAISS 1.15 wheels contain OpenBLAS 0.3.15 from 2021, which treats newer Intel processors,
    such as Sapphire Rapids, as Prescott processors from 2004, which have no AVX. Without the
    variable, assigning vectors to 4,096 lists takes 3.2 times as long.
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

# Above this number of queries times dimensions, FAISS uses BLAS, which is also exact. It is faster
# for three or more queries of 128 dimensions.
faiss.cvar.distance_compute_blas_threshold = 300


class FaissIndex:
    """Implements `evernear.index.vectors.VectorIndex`."""

    def __init__(self, index: faiss.Index) -> None:
        self._index = index

    @staticmethod
    def open(path: Path) -> "FaissIndex":
        """Map the file into memory, where processes that open it share its pages. It must not
        change while the index is open."""
        return FaissIndex(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC))

    @property
    def shape(self) -> tuple[int, int]:
        return self._index.ntotal, self._index.d

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `VectorIndex`."""
        scores, rows = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)
        distances = np.sqrt(2 - 2 * np.clip(scores, -1, 1))
        return np.where(rows >= 0, distances, np.float32(np.inf)), rows

    def set_search(self, parameters: str) -> None:
        """The parameters are saved with the index."""
        faiss.ParameterSpace().set_index_parameters(self._index, parameters)

    def save(self, directory: Path) -> None:
        """Write the index to `VECTORS_FILE` in ``directory``.

        FAISS does not open the file itself: it would raise RuntimeError if the disk were full, and
        no error if that happened while it closed the file.
        """
        with atomic_file(directory / VECTORS_FILE) as file:
            writer = faiss.PyCallbackIOWriter(file.write)  # pyright: ignore[reportAttributeAccessIssue] (its stubs lack it)
            faiss.write_index(self._index, writer)
