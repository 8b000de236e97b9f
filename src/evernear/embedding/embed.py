"""Embed the images of a dataset in batches, in bounded memory."""

import io
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evernear.common.disk import sha256_bytes, write_atomically
from evernear.common.store import Store
from evernear.data.gallery import joining_gallery
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.embedding.data_loader import to_tensor
from evernear.embedding.embedding_cache import CachedShard, EmbeddingCache, Rows, Vectors
from evernear.embedding.embeddings import DESCRIPTION_FILE, EmbeddingsDescription, EmbeddingShard
from evernear.embedding.export import describe_network, load_network
from evernear.errors import IntegrityError

SHARD_SIZE = 8_192
"""Embeddings per shard: 4.5 MB at 128 dimensions."""
BATCH_SIZE = 256


def embed_dataset(
    network_dir: Path,
    dataset: Dataset,
    out_dir: Path,
    splits: Sequence[Split] = ("gallery", "query"),
    batch_size: int = BATCH_SIZE,
    store: Store | None = None,
    untrained: frozenset[str] = frozenset(),
) -> EmbeddingsDescription:
    """Embed ``splits`` of ``dataset`` with the exported network in ``network_dir``; write shards to ``out_dir``.

    With a ``store``, embeddings are cached there; see `evernear.embedding.embedding_cache`. ``untrained`` are classes
    that the network was not trained on; for a frozen network, all are. Train images join the gallery as
    `joining_gallery` says.

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
    embedder = _Embedder(EmbeddingCache(store, network_description.identity, dim), dim)
    shards: list[EmbeddingShard] = []
    with _one_torch_thread() as threads, ThreadPoolExecutor(threads) as pool:
        network = load_network(network_dir)
        for split in splits:
            batches = chain.from_iterable(
                embedder.embed(blocks, count, network, pool, threads)
                for blocks, count in image_blocks(dataset, split, batch_size, joining)
            )
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


@torch.inference_mode()
def embed_images(network: nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Embed one batch of images (N, H, W, C) of uint8 as unit vectors (N, D) of float32."""
    return network(to_tensor(images)).numpy()


@contextmanager
def _one_torch_thread() -> Generator[int]:
    """Compute each batch in one thread, which is faster. Yield the number of batches to compute concurrently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def image_blocks(
    dataset: Dataset, split: Split, batch_size: int, joining: Mapping[str, int]
) -> Iterator[tuple[Iterator[Block], int]]:
    """Yield the blocks and image count of each shard to embed for ``split``, in the order of the embeddings.

    The gallery ends with train images: the first ``joining`` of each label, as far as there are so many.
    """
    for shard in dataset.shards(split):
        yield dataset.shard_blocks(shard, batch_size), shard.count
    if split == "gallery":
        missing = Counter(joining)
        for shard in dataset.shards("train"):
            taken = Counter(shard.label_counts) & missing
            missing -= taken
            if taken:
                numbers = Counter({dataset.labels.index(label): count for label, count in taken.items()})
                yield _first(dataset.shard_blocks(shard, batch_size), numbers), taken.total()


def _first(blocks: Iterator[Block], counts: Counter[int]) -> Iterator[Block]:
    """The first ``counts`` images of each label number."""
    for block in blocks:
        rows: list[int] = []
        for row, number in enumerate(block.labels.tolist()):
            if counts[number]:
                counts[number] -= 1
                rows.append(row)
        if rows:
            yield Block(block.images[rows], block.labels[rows], block.digests[rows])


@dataclass(frozen=True)
class _Batch:
    """A block of images, its cached embeddings, and the pending computation of the others."""

    block: Block
    vectors: Vectors
    is_cached: NDArray[np.bool_]
    computed: Future[Vectors] | None


class _Embedder:
    """Embeds one shard at a time, computes embeddings that are not cached, and counts those that are."""

    def __init__(self, cache: EmbeddingCache, dim: int) -> None:
        self._cache = cache
        self._dtype = np.dtype([("embedding", "<f4", (dim,)), ("label", "<i4"), ("digest", "u1", (32,))])
        self.reused = 0

    def embed(
        self, blocks: Iterator[Block], count: int, network: nn.Module, pool: ThreadPoolExecutor, concurrency: int
    ) -> Iterator[Rows]:
        """Yield the rows of each block in order; up to ``concurrency`` batches are computed while one is read."""
        first = next(blocks)
        with self._cache.open_shard(first.digests[0], count) as cached:
            pending: deque[_Batch] = deque()
            for block in chain([first], blocks):
                vectors, is_cached = cached.find(block.digests)
                images = block.images[~is_cached]
                computed = pool.submit(embed_images, network, images) if len(images) else None
                pending.append(_Batch(block, vectors, is_cached, computed))
                if len(pending) > concurrency:
                    yield self._rows(pending.popleft(), cached)
            while pending:
                yield self._rows(pending.popleft(), cached)

    def _rows(self, batch: _Batch, cached: CachedShard) -> Rows:
        block, vectors = batch.block, batch.vectors
        if batch.computed is not None:
            vectors[~batch.is_cached] = batch.computed.result()
        reused = int(batch.is_cached.sum())
        self.reused += reused
        cached.append(vectors, block.digests, new=len(block) - reused)
        rows = np.empty(len(block), self._dtype)
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
