"""Read cached vectors of images from the store, and compute missing ones in parallel batches.

A vector is an embedding, or the features of a frozen backbone (`evernear.embedding.features`).
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evernear.data.shards import Block
from evernear.embedding.data_loader import to_tensor
from evernear.embedding.embedding_cache import CachedShard, EmbeddingCache, Vectors

ShardBlocks = tuple[Iterator[Block], int]
"""The blocks of a shard, and its number of images."""
OnImages = Callable[[int], None]
"""Called with the number of images that were completed since the previous call."""


@torch.inference_mode()
def embed_images(network: nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute float32 vectors (N, D) for one batch of uint8 images (N, H, W, C)."""
    return network(to_tensor(images)).numpy()


class ImageVectors:
    """Computes the vectors that are not cached, and counts those that are. The network is loaded
    when the first must be computed."""

    def __init__(
        self,
        cache: EmbeddingCache,
        load: Callable[[], nn.Module],
        on_images: OnImages | None = None,
        view: Callable[[Block], NDArray[np.uint8]] | None = None,
    ) -> None:
        self._cache, self._load, self._on_images, self._view = cache, load, on_images, view
        self.reused = 0
        """Vectors from the cache."""

    def load(self) -> None:
        _ = self._network

    def of(self, shards: Iterable[ShardBlocks]) -> Iterator[tuple[Block, Vectors]]:
        """Yield each block with its vectors (N, D)."""
        with one_torch_thread() as threads, ThreadPoolExecutor(threads) as pool:
            for blocks, count in shards:
                yield from self._of_shard(blocks, count, pool, threads)

    def _of_shard(
        self, blocks: Iterator[Block], count: int, pool: ThreadPoolExecutor, concurrency: int
    ) -> Iterator[tuple[Block, Vectors]]:
        """Up to ``concurrency`` batches are computed while the next batch is read."""
        first = next(blocks)
        with self._cache.open_shard(first.digests[0], count) as cached:
            pending: deque[_Batch] = deque()
            for block in chain([first], blocks):
                vectors, is_cached = cached.find(block.digests)
                computed = None
                if not is_cached.all():
                    images = self._images(block, ~is_cached)
                    computed = pool.submit(embed_images, self._network, images)
                pending.append(_Batch(block, vectors, is_cached, computed))
                if len(pending) > concurrency:
                    yield self._finish(pending.popleft(), cached)
            while pending:
                yield self._finish(pending.popleft(), cached)

    def _images(self, block: Block, selected: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Runs in the calling thread, because views draw from torch's global random numbers."""
        if self._view is None:
            return block.images[selected]
        return self._view(Block(block.images[selected], block.labels[selected], block.digests[selected]))

    def _finish(self, batch: "_Batch", cached: CachedShard) -> tuple[Block, Vectors]:
        block, vectors = batch.block, batch.vectors
        if batch.computed is not None:
            vectors[~batch.is_cached] = batch.computed.result()
        reused = int(batch.is_cached.sum())
        self.reused += reused
        cached.append(vectors, block.digests, new=len(block) - reused)
        if self._on_images is not None:
            self._on_images(len(block))
        return block, vectors

    @cached_property
    def _network(self) -> nn.Module:
        return self._load()


@dataclass(frozen=True)
class _Batch:
    """A block, its cached vectors, and the pending computation of the others."""

    block: Block
    vectors: Vectors
    is_cached: NDArray[np.bool_]
    computed: Future[Vectors] | None


@contextmanager
def one_torch_thread() -> Generator[int]:
    """Limit torch to one thread per operation, which is faster for small operations and concurrent
    batches, and yield the previous number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
