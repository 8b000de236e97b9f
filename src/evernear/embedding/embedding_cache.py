"""Cache embeddings in the store, so that a network embeds each image only once.

::

    embeddings/<identity of the network>/<digest of a shard's first image>.npy
    embeddings/<identity of a frozen backbone>/[<view>/]<digest of a shard's first image>.npy

For a frozen network, the cache has the backbone's features (`evernear.embedding.features`), which
all heads on it share. There is one object for each shard of a dataset. New images are appended to a
shard, so its first embedded image identifies it in later snapshots. If that is removed from the
dataset, the shard is embedded again. Within an object, images are looked up by digest, not
position. Labels belong to the dataset and may be corrected, so they are not cached.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors
from evernear.common.store import Store
from evernear.errors import IntegrityError

EMBEDDINGS_PREFIX = "embeddings/"
MAX_BYTES = 16 * 2**30
"""Maximum size of the cached vectors of one network or view, enough for 3 million images with 1,280
features. Vectors of shards beyond it are computed again in each run."""
Rows = NDArray[np.void]
Vectors = NDArray[np.float32]


class EmbeddingCache:
    """Without a store, nothing is cached."""

    def __init__(self, store: Store | None, identity: str, dim: int, read_only: bool = False) -> None:
        self._store, self._read_only = store, read_only
        self._prefix = f"{EMBEDDINGS_PREFIX}{identity}/"
        self._dtype = np.dtype([("embedding", "<f4", (dim,)), ("digest", "u1", (32,))])
        listed = store.list(self._prefix) if store else ()
        self._sizes = {info.key: info.size_bytes for info in listed if info.key.count("/") == self._prefix.count("/")}

    @contextmanager
    def open_shard(self, first_digest: NDArray[np.uint8], count: int) -> Generator["CachedShard"]:
        """Open the shard whose first image has ``first_digest`` (32,).

        The body of the ``with`` statement appends the shard's ``count`` embeddings. On exit, the
        cached object is replaced if any embedding is new.
        """
        if self._store is None:
            yield CachedShard(np.empty(0, self._dtype))
            return
        key = f"{self._prefix}{first_digest.tobytes().hex()}.npy"
        with TemporaryDirectory(prefix="evernear-embeddings-") as scratch:
            cached, path = np.empty(0, self._dtype), Path(scratch) / "rows.npy"
            if key in self._sizes:
                cached = self._read(self._store.fetch(key, Path(scratch) / "cached.npy"), key)
            with disk_errors(path), path.open("wb") as file:
                header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
                shard = CachedShard(cached, file)
                yield shard
            if shard.new and not self._read_only:
                self._put(key, path)

    def _put(self, key: str, path: Path) -> None:
        """Store the file, unless the cache would exceed `MAX_BYTES`."""
        sizes = self._sizes | {key: path.stat().st_size}
        if self._store is not None and sum(sizes.values()) <= MAX_BYTES:
            self._store.put(key, path)
            self._sizes = sizes

    def _read(self, path: Path, key: str) -> Rows:
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            rows = None
        if rows is None or rows.dtype != self._dtype or rows.ndim != 1:
            raise IntegrityError(f"{key} in the store has no embeddings of this network; delete it and run again.")
        return rows


class CachedShard:
    """A shard's cached embeddings, and a file to which all of its embeddings are written."""

    def __init__(self, cached: Rows, file: BinaryIO | None = None) -> None:
        self._cached, self._file = cached, file
        digests = _as_bytes(cached["digest"])
        self._order = np.argsort(digests)
        self._digests = digests[self._order]
        self.new = 0
        """Appended embeddings that were not cached."""

    def find(self, digests: NDArray[np.uint8]) -> tuple[Vectors, NDArray[np.bool_]]:
        """Embeddings (N, D) of images by ``digests`` (N, 32), and whether each is cached (N,)."""
        vectors = np.zeros((len(digests), self._cached["embedding"].shape[1]), np.float32)
        queries = _as_bytes(digests)
        positions = np.searchsorted(self._digests, queries)
        is_cached = positions < len(self._digests)
        is_cached[is_cached] = self._digests[positions[is_cached]] == queries[is_cached]
        vectors[is_cached] = self._cached["embedding"][self._order[positions[is_cached]]]
        return vectors, is_cached

    def append(self, vectors: Vectors, digests: NDArray[np.uint8], new: int) -> None:
        """Append the shard's next embeddings, ``new`` of which were not cached."""
        self.new += new
        if self._file is not None:
            rows = np.empty(len(digests), self._cached.dtype)
            rows["embedding"], rows["digest"] = vectors, digests
            self._file.write(rows.tobytes())


def cached_digests(path: Path, key: str) -> NDArray[np.bytes_]:
    """The image digests (N,) in ``path``, a copy of the cached object ``key``."""
    try:
        return _as_bytes(np.load(path, mmap_mode="r", allow_pickle=False)["digest"])
    except (ValueError, IndexError):
        raise IntegrityError(f"{key} in the store has no embeddings; delete it and run again.") from None


def _as_bytes(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """N byte strings of digests (N, 32). NumPy ignores trailing zeros, which is harmless because
    all digests have the same length."""
    return np.ascontiguousarray(digests).view("S32").ravel()
