"""Synthetic embeddings with known neighbors, in the format of the embed step."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from evernear.common.disk import sha256_file
from evernear.data.manifest import Split
from evernear.embedding.embeddings import DESCRIPTION_FILE, Embeddings, EmbeddingsDescription, EmbeddingShard

NETWORK = "n" * 64
Vectors = NDArray[np.float32]
Numbers = NDArray[np.int64]


class MakeEmbeddings(Protocol):
    def __call__(
        self,
        splits: Mapping[Split, tuple[Vectors, Numbers]],
        rows_per_shard: int = 50,
        digests: Mapping[Split, NDArray[np.uint8]] = ...,
    ) -> Embeddings: ...


def blobs(seed: int, count: int, classes: int = 5, dim: int = 16, spread: float = 0.35) -> tuple[Vectors, Numbers]:
    """Unit vectors around one center per class. The centers do not depend on the seed, and every
    class occurs."""
    centers = np.random.default_rng(99).normal(size=(classes, dim))
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, count - classes)])
    return unit(centers[labels] + spread * np.sqrt(dim) * rng.normal(size=(count, dim))), labels


def unit(vectors: NDArray[np.float64]) -> Vectors:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="session")
def make_embeddings(tmp_path_factory: pytest.TempPathFactory) -> MakeEmbeddings:
    numbers = itertools.count()

    def make(
        splits: Mapping[Split, tuple[Vectors, Numbers]],
        rows_per_shard: int = 50,
        digests: Mapping[Split, NDArray[np.uint8]] = MappingProxyType({}),
    ) -> Embeddings:
        directory = tmp_path_factory.mktemp(f"embeddings{next(numbers)}")
        dim = next(iter(splits.values()))[0].shape[1]
        dtype = np.dtype([("embedding", "<f4", (dim,)), ("label", "<i4"), ("digest", "u1", (32,))])
        shards: list[EmbeddingShard] = []
        for split, (vectors, labels) in splits.items():
            rows = np.zeros(len(labels), dtype)
            rows["embedding"], rows["label"], rows["digest"] = vectors, labels, digests.get(split, 0)
            for start in range(0, len(rows), rows_per_shard):
                path = Path(directory) / f"{split}-{start:05d}.npy"
                part = rows[start : start + rows_per_shard]
                np.save(path, part)
                shards.append(EmbeddingShard(file=path.name, sha256=sha256_file(path), split=split, count=len(part)))
        description = EmbeddingsDescription(
            network_sha256=NETWORK, dataset_digest="d" * 64, dim=dim, shards=tuple(shards)
        )
        (directory / DESCRIPTION_FILE).write_text(description.model_dump_json())
        return Embeddings.open(directory)

    return make
