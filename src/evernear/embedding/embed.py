"""Images to embeddings, in batches and in flat memory, written to shards."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from evernear.data.manifest import Split
from evernear.data.shards import Dataset
from evernear.embedding.export import describe_network, load_network
from evernear.embedding.images import to_tensor
from evernear.errors import IntegrityError
from evernear.store import sha256_bytes, sha256_file, write_atomically

DESCRIPTION_FILE = "embeddings.json"
Rows = NDArray[np.void]
SHARD_SIZE = 8_192
"""Embeddings in a shard: 4.5 MB at 128 dimensions."""
BATCH_SIZE = 256


class EmbeddingShard(BaseModel):
    """One file of embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    sha256: str
    split: Split
    count: int


class EmbeddingsDescription(BaseModel):
    """`DESCRIPTION_FILE`: which network made the embeddings of which dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    network_sha256: str
    dataset_digest: str
    dim: int
    shards: tuple[EmbeddingShard, ...]


@dataclass(frozen=True)
class EmbeddingBlock:
    """Embeddings (N, D) of float32 and unit length, label numbers (N,) and image digests (N, 32)."""

    embeddings: NDArray[np.float32]
    labels: NDArray[np.int64]
    digests: NDArray[np.uint8]


def embed(
    network_dir: Path,
    dataset: Dataset,
    out_dir: Path,
    splits: Sequence[Split] = ("gallery", "query"),
    batch_size: int = BATCH_SIZE,
) -> EmbeddingsDescription:
    """Embed ``splits`` of ``dataset`` with the network that `export` left in ``network_dir``; write to
    ``out_dir``.

    Raises:
        IntegrityError: the network is not what its description says, or is for images of another shape.
    """
    described = describe_network(network_dir)
    height, width, channels = dataset.shape
    made_for = described.preprocessing
    if (made_for.height_px, made_for.width_px, made_for.channels) != (height, width, channels):
        raise IntegrityError(
            f"The network in {network_dir} takes images of {made_for.height_px}x{made_for.width_px}x"
            f"{made_for.channels}, but those of {dataset.manifest.name} are {height}x{width}x{channels}."
        )
    network = load_network(network_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    shards: list[EmbeddingShard] = []
    for split in splits:
        batches = _embedded(network, dataset, split, batch_size, described.embedding_dim)
        for number, rows in enumerate(_gather(batches, SHARD_SIZE)):
            shards.append(_write_shard(out_dir, split, number, rows))
    description = EmbeddingsDescription(
        network_sha256=described.sha256,
        dataset_digest=dataset.digest,
        dim=described.embedding_dim,
        shards=tuple(shards),
    )
    write_atomically(out_dir / DESCRIPTION_FILE, description.model_dump_json(indent=2))
    return description


@torch.inference_mode()
def embed_images(network: nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """One batch of images (N, H, W, C) of uint8 as unit vectors (N, D) of float32."""
    return network(to_tensor(images)).numpy()


class Embeddings:
    """What `embed` wrote, its hashes checked; read in blocks."""

    def __init__(self, directory: Path, description: EmbeddingsDescription) -> None:
        self.directory = directory
        self.description = description

    @staticmethod
    def open(directory: Path) -> "Embeddings":
        """The embeddings in ``directory``.

        Raises:
            IntegrityError: there are none, or a shard is missing or changed.
        """
        try:
            description = EmbeddingsDescription.model_validate_json((directory / DESCRIPTION_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise IntegrityError(f"{directory} holds no embeddings; run the embed step again.") from error
        for shard in description.shards:
            path = directory / shard.file
            if not path.is_file() or sha256_file(path) != shard.sha256:
                raise IntegrityError(f"{path} is missing or changed since it was written; run the embed step again.")
        return Embeddings(directory, description)

    @property
    def network_sha256(self) -> str:
        """The network that made them."""
        return self.description.network_sha256

    @property
    def dim(self) -> int:
        """Coordinates of an embedding."""
        return self.description.dim

    def count(self, split: Split) -> int:
        """Embeddings of ``split``."""
        return sum(shard.count for shard in self.description.shards if shard.split == split)

    def blocks(self, split: Split) -> Iterator[EmbeddingBlock]:
        """The embeddings of ``split``, in the dataset's order, a shard at a time."""
        for shard in self.description.shards:
            if shard.split == split:
                rows = np.load(self.directory / shard.file, allow_pickle=False)
                yield EmbeddingBlock(
                    np.ascontiguousarray(rows["embedding"]),
                    rows["label"].astype(np.int64),
                    np.ascontiguousarray(rows["digest"]),
                )


def _embedded(network: nn.Module, dataset: Dataset, split: Split, batch_size: int, dim: int) -> Iterator[Rows]:
    dtype = np.dtype([("embedding", "<f4", (dim,)), ("label", "<i4"), ("digest", "u1", (32,))])
    for block in dataset.blocks(split, batch_size):
        rows = np.empty(len(block.labels), dtype)
        rows["embedding"] = embed_images(network, block.images)
        rows["label"] = block.labels
        rows["digest"] = block.digests
        yield rows


def _gather(batches: Iterator[Rows], size: int) -> Iterator[Rows]:
    """The same rows in pieces of ``size``, the last one shorter."""
    held: list[Rows] = []
    for batch in batches:
        held.append(batch)
        while sum(map(len, held)) >= size:
            rows = np.concatenate(held)
            yield rows[:size]
            held = [rows[size:]]
    if sum(map(len, held)):
        yield np.concatenate(held)


def _write_shard(directory: Path, split: Split, number: int, rows: Rows) -> EmbeddingShard:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    data = buffer.getvalue()
    file = f"{split}-{number:05d}.npy"
    write_atomically(directory / file, data)
    return EmbeddingShard(file=file, sha256=sha256_bytes(data), split=split, count=len(rows))
