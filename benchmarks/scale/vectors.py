"""A large set of real embeddings: random affine variations of a source's images, embedded by a
trained network."""

import io
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evernear.common.disk import sha256_bytes, write_atomically
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Split, save_manifest
from evernear.data.shards import Block, Dataset
from evernear.embedding.augmentation import Draws, random_affine
from evernear.embedding.data_loader import embed_images, to_tensor
from evernear.embedding.embeddings import DESCRIPTION_FILE, Embeddings, EmbeddingsDescription, EmbeddingShard
from evernear.embedding.export import describe_network, export_network, load_network
from evernear.embedding.train import train_network
from evernear.settings import DataSettings, TrainSettings

IMAGES_OF: dict[Split, tuple[Split, ...]] = {"gallery": ("gallery", "train"), "query": ("query",), "test": ("test",)}
"""The splits of the dataset whose images become embeddings of a split:
no query is a variation of a gallery image."""
TRAIN = TrainSettings(epochs=3, min_steps=0, patch_px=2, width=16)
"""The longer schedule of `benchmarks.time_to_accuracy`."""
SHARD_SIZE = 65_536
BATCH_SIZE = 256


def embed_variations(source: str, directory: Path, counts: dict[Split, int]) -> Embeddings:
    """Train briefly and embed ``counts`` images of each split into ``directory``, unless they
    exist."""
    out_dir = directory / "embeddings"
    if not (out_dir / DESCRIPTION_FILE).is_file():
        save_manifest(ingest_source(DataSettings(source=source), (directory / "store").as_uri()), directory)
        dataset = Dataset.open(directory)
        train_network(dataset, TRAIN, directory / "trained")
        export_network(directory / "trained", dataset, directory / "network")
        _embed(directory / "network", dataset, counts, out_dir)
    return Embeddings.open(out_dir)


def _embed(network_dir: Path, dataset: Dataset, counts: dict[Split, int], out_dir: Path) -> None:
    described, network = describe_network(network_dir), load_network(network_dir)
    dtype = row_dtype(described.embedding_dim)
    generator = torch.Generator().manual_seed(0)
    shards: list[EmbeddingShard] = []
    for split, count in counts.items():
        blocks = _repeat_blocks(dataset, IMAGES_OF[split])
        for first in range(0, count, SHARD_SIZE):
            rows = np.empty(min(SHARD_SIZE, count - first), dtype)
            filled = 0
            while filled < len(rows):
                block = next(blocks)
                size = min(len(block), len(rows) - filled)
                part = rows[filled : filled + size]
                part["embedding"] = embed_images(network, vary(block.images[:size], generator))
                part["label"], part["digest"] = block.labels[:size], block.digests[:size]
                filled += size
            shards.append(write_shard(out_dir / f"{split}-{first // SHARD_SIZE:05d}.npy", split, rows))
    EmbeddingsDescription(
        network_sha256=described.sha256,
        dataset_digest=dataset.digest,
        dim=described.embedding_dim,
        shards=tuple(shards),
    ).save(out_dir / DESCRIPTION_FILE)


def _repeat_blocks(dataset: Dataset, splits: Sequence[Split]) -> Iterator[Block]:
    while True:
        yield from chain.from_iterable(dataset.blocks(split, BATCH_SIZE) for split in splits)


def vary(images: NDArray[np.uint8], generator: torch.Generator) -> NDArray[np.uint8]:
    """Apply a random affine map to each image (N, H, W, C)."""
    varied = random_affine(to_tensor(images), Draws(generator)).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(varied.numpy().transpose(0, 2, 3, 1))


def row_dtype(dim: int) -> np.dtype[np.void]:
    """Data type of a row in a shard of embeddings."""
    return np.dtype([("embedding", "<f4", (dim,)), ("label", "<i4"), ("digest", "u1", (32,))])


def write_shard(path: Path, split: Split, rows: NDArray[np.void]) -> EmbeddingShard:
    """Write embeddings, labels and digests as the embed step does."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    data = buffer.getvalue()
    write_atomically(path, data)
    return EmbeddingShard(file=path.name, sha256=sha256_bytes(data), split=split, count=len(rows))
