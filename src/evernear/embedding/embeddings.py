"""Embeddings on disk. This module does not import torch, so that building an index does not load it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import sha256_file
from evernear.common.frozen import Frozen
from evernear.data.manifest import Split
from evernear.errors import IntegrityError

DESCRIPTION_FILE = "embeddings.json"


class EmbeddingShard(Frozen):
    """One file of embeddings."""

    file: str
    sha256: str
    split: Split
    count: int


class EmbeddingsDescription(Frozen):
    """`DESCRIPTION_FILE`: the network and the dataset of the embeddings, and their shards."""

    remedy = "run the embed step again"

    network_sha256: str
    dataset_digest: str
    dim: int
    shards: tuple[EmbeddingShard, ...]
    reused: int = 0
    """Embeddings that came from the cache."""

    @property
    def count(self) -> int:
        """Number of embeddings."""
        return sum(shard.count for shard in self.shards)


@dataclass(frozen=True)
class EmbeddingBlock:
    """Unit-length embeddings (N, D) of float32, label indices (N,) and image digests (N, 32)."""

    embeddings: NDArray[np.float32]
    labels: NDArray[np.int64]
    digests: NDArray[np.uint8]


class Embeddings:
    """The embeddings that `embed` wrote; verified, and read in blocks."""

    def __init__(self, directory: Path, description: EmbeddingsDescription) -> None:
        self.directory = directory
        self.description = description
        self.network_sha256 = description.network_sha256
        self.dim = description.dim

    @staticmethod
    def open(directory: Path) -> "Embeddings":
        """Open the embeddings in ``directory``.

        Raises:
            IntegrityError: the description is missing or invalid, or a shard is missing or changed.
        """
        description = EmbeddingsDescription.load(directory / DESCRIPTION_FILE)
        for shard in description.shards:
            path = directory / shard.file
            if not path.is_file() or sha256_file(path) != shard.sha256:
                raise IntegrityError(f"{path} is missing or has changed since it was written; {description.remedy}.")
        return Embeddings(directory, description)

    def count(self, split: Split) -> int:
        """Number of embeddings of ``split``."""
        return sum(shard.count for shard in self.description.shards if shard.split == split)

    def blocks(self, split: Split) -> Iterator[EmbeddingBlock]:
        """Yield the embeddings of ``split`` in the dataset's order, one shard at a time."""
        for shard in self.description.shards:
            if shard.split == split:
                rows = np.load(self.directory / shard.file, allow_pickle=False)
                yield EmbeddingBlock(
                    np.ascontiguousarray(rows["embedding"]),
                    rows["label"].astype(np.int64),
                    np.ascontiguousarray(rows["digest"]),
                )
