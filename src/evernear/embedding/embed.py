"""Embed the images of a dataset in batches, in bounded memory."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from evernear.common.disk import sha256_bytes, write_atomically
from evernear.common.store import Store
from evernear.data.gallery import image_blocks, joining_gallery
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.embedding.embedding_cache import EmbeddingCache, Rows, Vectors
from evernear.embedding.embeddings import DESCRIPTION_FILE, EmbeddingsDescription, EmbeddingShard
from evernear.embedding.export import describe_network, load_network, load_parts
from evernear.embedding.image_vectors import ImageVectors, OnImages, ShardBlocks
from evernear.embedding.torchscript import optimized
from evernear.errors import IntegrityError

SHARD_SIZE = 8_192
"""Embeddings per shard: 4.5 MB at 128 dimensions."""
BATCH_SIZE = 256


class ExportedEmbedder:
    """Embeds the images of datasets with the exported network in ``network_dir``, except those that are cached.

    The cache in ``store`` has the network's embeddings or, if the network is frozen, the features of its backbone.
    """

    def __init__(self, network_dir: Path, store: Store | None = None, on_images: OnImages | None = None) -> None:
        described = describe_network(network_dir)
        self._head: nn.Module | None = None
        load: Callable[[], nn.Module] = partial(load_network, network_dir)
        if described.features_dim:
            backbone, self._head = load_parts(network_dir)
            load = partial(optimized, backbone)
        cache = EmbeddingCache(store, described.identity, described.features_dim or described.embedding_dim)
        self._vectors = ImageVectors(cache, load, on_images)

    @property
    def reused(self) -> int:
        """Number of images whose vectors came from the cache."""
        return self._vectors.reused

    def embed(self, shards: Iterable[ShardBlocks]) -> Iterator[tuple[Block, Vectors]]:
        """Yield the blocks of ``shards`` with their embeddings (N, D), unit vectors of float32."""
        for block, vectors in self._vectors.of(shards):
            yield block, vectors if self._head is None else _apply(self._head, vectors)


@torch.inference_mode()
def _apply(head: nn.Module, features: Vectors) -> Vectors:
    return head(torch.from_numpy(features)).numpy()


def embed_dataset(
    network_dir: Path,
    dataset: Dataset,
    out_dir: Path,
    splits: Sequence[Split] = ("gallery", "query"),
    batch_size: int = BATCH_SIZE,
    store: Store | None = None,
    untrained: frozenset[str] = frozenset(),
    on_images: OnImages | None = None,
) -> EmbeddingsDescription:
    """Embed ``splits`` of ``dataset`` with the exported network in ``network_dir``; write shards to ``out_dir``.

    With a ``store``, embeddings are cached there; see `evernear.embedding.embedding_cache`. ``untrained`` are classes
    that the network was not trained on; for a frozen network, all are. Train images join the gallery as
    `joining_gallery` says. ``on_images`` is called after each batch.

    Raises:
        IntegrityError: the network does not match its description or expects images of another shape, or the cache is
            damaged.
    """
    network_description = describe_network(network_dir)
    expected = network_description.preprocessing.shape
    if expected != dataset.shape:
        height, width, channels = dataset.shape
        raise IntegrityError(
            f"The network in {network_dir} takes images of {expected[0]}x{expected[1]}x{expected[2]}, "
            f"but the images of {dataset.manifest.name} are {height}x{width}x{channels}."
        )
    if network_description.frozen:
        untrained = frozenset(dataset.labels)
    joining = joining_gallery(dataset.manifest, untrained)
    dim = network_description.embedding_dim
    dtype = np.dtype([("embedding", "<f4", (dim,)), ("label", "<i4"), ("digest", "u1", (32,))])
    embedder = ExportedEmbedder(network_dir, store, on_images)
    shards: list[EmbeddingShard] = []
    for split in splits:
        embedded = embedder.embed(image_blocks(dataset, split, batch_size, joining))
        batches = (_rows(block, vectors, dtype) for block, vectors in embedded)
        for index, rows in enumerate(_rebatch(batches, SHARD_SIZE)):
            shards.append(_write_shard(out_dir, split, index, rows))
    description = EmbeddingsDescription(
        network_sha256=network_description.sha256,
        dataset_digest=dataset.digest,
        dim=dim,
        shards=tuple(shards),
        reused=embedder.reused,
    )
    description.save(out_dir / DESCRIPTION_FILE)
    return description


def _rows(block: Block, vectors: Vectors, dtype: np.dtype[np.void]) -> Rows:
    rows = np.empty(len(block), dtype)
    rows["embedding"], rows["label"], rows["digest"] = vectors, block.labels, block.digests
    return rows


def _rebatch(batches: Iterator[Rows], size: int) -> Iterator[Rows]:
    """Yield the same rows in batches of ``size``, the last one shorter."""
    pending: list[Rows] = []
    for batch in batches:
        pending.append(batch)
        while sum(map(len, pending)) >= size:
            rows = np.concatenate(pending)
            yield rows[:size]
            pending = [rows[size:]]
    if sum(map(len, pending)):
        yield np.concatenate(pending)


def _write_shard(directory: Path, split: Split, index: int, rows: Rows) -> EmbeddingShard:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    data = buffer.getvalue()
    file = f"{split}-{index:05d}.npy"
    write_atomically(directory / file, data)
    return EmbeddingShard(file=file, sha256=sha256_bytes(data), split=split, count=len(rows))
