"""Embeddings, stored as a description file and objects in a store.

This module does not import torch, so building an index does not either.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import sha256_file
from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.common.store import FileStore, open_store
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
