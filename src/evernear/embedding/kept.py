"""Embeddings kept in the store, so that one network embeds one image once.

::

    embeddings/<sha256 of the network>/<digest of a shard's first image>.npy

There is one object for each shard of a dataset. A shard grows at its end, so that the first image of it that was
embedded names it from one snapshot to the next; should that image leave the dataset, the shard's images are embedded
once more. Within the object an image is found by its digest, never by its place. Labels are not kept: those are the
dataset's, and may have been corrected since.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from evernear.disk import disk_errors
from evernear.errors import IntegrityError
from evernear.store import Store

Rows = NDArray[np.void]
Vectors = NDArray[np.float32]


class KeptEmbeddings:
    """The embeddings that a store keeps of one network; without a store there are none."""

    def __init__(self, store: Store | None, network_sha256: str, dim: int) -> None:
        self._store = store
        self._folder = f"embeddings/{network_sha256}/"
        self._dtype = np.dtype([("embedding", "<f4", (dim,)), ("digest", "u1", (32,))])
        self._keys = {found.key for found in store.list(self._folder)} if store else set[str]()

    @contextmanager
    def of_shard(self, first: NDArray[np.uint8], count: int) -> Generator["KeptShard"]:
        """What is kept of a shard, by the digest (32,) of its first image; what is added, ``count`` rows, stays kept.

        Raises:
            IntegrityError: what the store has is damaged. StoreError: store or disk refuse.
        """
        if self._store is None:
            yield KeptShard(np.empty(0, self._dtype))
            return
        key = f"{self._folder}{first.tobytes().hex()}.npy"
        with TemporaryDirectory(prefix="evernear-kept-") as scratch:
            earlier, path = np.empty(0, self._dtype), Path(scratch) / "rows.npy"
            if key in self._keys:
                earlier = self._open(self._store.fetch(key, Path(scratch) / "earlier.npy"), key)
            with disk_errors(path), path.open("wb") as file:
                header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
                kept = KeptShard(earlier, file)
                yield kept
            if kept.added:
                self._store.put(key, path)

    def _open(self, path: Path, key: str) -> Rows:
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            rows = None
        if rows is None or rows.dtype != self._dtype or rows.ndim != 1:
            raise IntegrityError(f"{key} in the store holds no embeddings of this network; delete it and run again.")
        return rows


class KeptShard:
    """The embeddings of one shard: those of earlier runs to look up, and all of this run written to ``file``."""

    def __init__(self, earlier: Rows, file: BinaryIO | None = None) -> None:
        self._earlier, self._file = earlier, file
        digests = _as_bytes(earlier["digest"])
        self._order = np.argsort(digests)
        self._digests = digests[self._order]
        self.added = 0
        """Embeddings that were not kept before."""

    def find(self, digests: NDArray[np.uint8]) -> tuple[Vectors, NDArray[np.bool_]]:
        """Embeddings (N, D) of the images of ``digests`` (N, 32), and which (N,) of them are kept; the rest is zero."""
        vectors = np.zeros((len(digests), self._earlier["embedding"].shape[1]), np.float32)
        wanted = _as_bytes(digests)
        places = np.searchsorted(self._digests, wanted)
        found = places < len(self._digests)
        found[found] = self._digests[places[found]] == wanted[found]
        vectors[found] = self._earlier["embedding"][self._order[places[found]]]
        return vectors, found

    def add(self, vectors: Vectors, digests: NDArray[np.uint8], new: int) -> None:
        """Write the next embeddings of the shard, ``new`` of them made just now; an `OSError` if the disk is full."""
        self.added += new
        if self._file is not None:
            rows = np.empty(len(digests), self._earlier.dtype)
            rows["embedding"], rows["digest"] = vectors, digests
            self._file.write(rows.tobytes())


def _as_bytes(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Digests (N, 32) as N words, which numpy sorts and compares whole; trailing zeros do not count, which at one
    length is harmless.
    """
    return np.ascontiguousarray(digests).view("S32").ravel()
