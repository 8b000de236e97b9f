"""Embeddings, stored as a description file and objects in a store.

This module does not import torch, so building an index does not either.
"""

import shutil
import tempfile
import weakref
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.common.store import FileStore, Store, open_store
from evernear.data.manifest import Split
from evernear.errors import IntegrityError, MissingObjectError

DESCRIPTION_FILE = "embeddings.json"
BLOCK_SIZE = 8_192
"""Maximum number of embeddings in a block (4.5 MB at 128 dimensions)."""
_FETCHES_IN_FLIGHT = 4


class EmbeddingShard(Frozen):
    file: str
    """The key in the store, or empty if the embeddings are only cached."""
    sha256: str
    split: Split
    count: int
    reused: int = 0
    """Embeddings from the cache."""


class EmbeddingsDescription(Frozen):
    remedy = "run the embed step again"

    network_sha256: str
    dataset_digest: str
    dim: int
    store_uri: str = ""
    """The store of the shards, or empty if they are beside the description."""
    shards: tuple[EmbeddingShard, ...]

    @property
    def reused(self) -> int:
        return sum(shard.reused for shard in self.shards)

    @property
    def count(self) -> int:
        return sum(shard.count for shard in self.shards)

    def summary(self) -> str:
        computed = quantity(self.count - self.reused, "embedding")
        return f"{computed} of {self.dim} dimensions computed, {self.reused:,} reused"


@dataclass(frozen=True)
class EmbeddingBlock:
    """Unit-length float32 embeddings (N, D), label indices (N,) and image digests (N, 32)."""

    embeddings: NDArray[np.float32]
    labels: NDArray[np.int64]
    digests: NDArray[np.uint8]


class Embeddings:
    """The output of the embed step, verified and read in blocks."""

    def __init__(self, description: EmbeddingsDescription, files: dict[str, Path]) -> None:
        self.description = description
        self.network_sha256 = description.network_sha256
        self.dim = description.dim
        self._files = files

    @staticmethod
    def open(directory: Path) -> "Embeddings":
        """Embeddings in a bucket are copied to this machine. Hashes are checked."""
        description = EmbeddingsDescription.load(directory / DESCRIPTION_FILE)
        store = open_store(description.store_uri) if description.store_uri else FileStore(directory)
        if isinstance(store, FileStore):
            files = {shard.file: store.path(shard.file) for shard in description.shards}
            for shard in description.shards:
                if not files[shard.file].is_file() or sha256_file(files[shard.file]) != shard.sha256:
                    raise _damaged(description, str(files[shard.file]))
            return Embeddings(description, files)

        scratch = Path(tempfile.mkdtemp(prefix="evernear-embeddings-"))

        def fetch(shard: EmbeddingShard) -> tuple[str, Path]:
            try:
                return shard.file, store.fetch(shard.file, scratch / f"{shard.sha256}.npy", shard.sha256)
            except (IntegrityError, MissingObjectError) as error:
                raise _damaged(description, f"{store.uri}/{shard.file}") from error

        try:
            with ThreadPoolExecutor(_FETCHES_IN_FLIGHT, "fetch") as pool:
                embeddings = Embeddings(description, dict(pool.map(fetch, description.shards)))
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        weakref.finalize(embeddings, shutil.rmtree, scratch, ignore_errors=True)
        return embeddings

    def count(self, split: Split) -> int:
        return sum(shard.count for shard in self.description.shards if shard.split == split)

    def blocks(self, split: Split) -> Iterator[EmbeddingBlock]:
        """In the dataset's order, at most `BLOCK_SIZE` each."""
        for shard in self.description.shards:
            if shard.split != split:
                continue
            stored = np.load(self._files[shard.file], mmap_mode="r", allow_pickle=False)
            for start in range(0, len(stored), BLOCK_SIZE):
                rows = np.array(stored[start : start + BLOCK_SIZE])
                yield EmbeddingBlock(
                    np.ascontiguousarray(rows["embedding"]),
                    rows["label"].astype(np.int64),
                    np.ascontiguousarray(rows["digest"]),
                )


def _damaged(description: EmbeddingsDescription, name: str) -> IntegrityError:
    return IntegrityError(f"{name} is missing or has changed since it was written; {description.remedy}.")


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
        digests = digest_strings(cached["digest"])
        self._order = np.argsort(digests)
        self._digests = digests[self._order]
        self.new = 0
        """Appended embeddings that were not cached."""

    def find(self, digests: NDArray[np.uint8]) -> tuple[Vectors, NDArray[np.bool_]]:
        """Embeddings (N, D) of images by ``digests`` (N, 32), and whether each is cached (N,)."""
        vectors = np.zeros((len(digests), self._cached["embedding"].shape[1]), np.float32)
        queries = digest_strings(digests)
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
        return digest_strings(np.load(path, mmap_mode="r", allow_pickle=False)["digest"])
    except (ValueError, IndexError):
        raise IntegrityError(f"{key} in the store has no embeddings; delete it and run again.") from None


def digest_strings(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """N byte strings of digests (N, 32). NumPy ignores trailing zeros, which is harmless because
    all digests have the same length."""
    return np.ascontiguousarray(digests).view("S32").ravel()
