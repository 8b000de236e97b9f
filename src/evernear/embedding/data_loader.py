"""Batches of tensors for training and validation, read from a dataset."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evernear.common.output import quantity
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.embedding.embeddings import CachedShard, EmbeddingCache, Vectors
from evernear.embedding.network import Network
from evernear.errors import TrainingError

PAIRED_IMAGES = 4
"""Images of a class that follow each other in `TrainingImages.paired_batches`."""
BLOCK_SIZE_BYTES = 4 * 2**20
"""Maximum size of a validation batch's pixels."""


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Copy uint8 images (N, H, W, C) into a tensor (N, C, H, W), with channels last in memory."""
    return torch.from_numpy(np.array(images, order="C")).permute(0, 3, 1, 2)


class TrainingImages:
    """The train and gallery splits. Labels that are not excluded are numbered from 0 as classes."""

    def __init__(self, dataset: Dataset, exclude_labels: frozenset[str]) -> None:
        included = [index for index, label in enumerate(dataset.labels) if label not in exclude_labels]
        self._dataset = dataset
        self._class_of_label = np.full(len(dataset.labels), -1, dtype=np.int64)
        self._class_of_label[included] = np.arange(len(included))
        self.classes = len(included)
        self.count = int(self._counts("train").sum())
        if self.classes < 2 or self.count < 2:
            raise TrainingError(
                f"Dataset {dataset.manifest.name} has {quantity(self.classes, 'label')} and"
                f" {quantity(self.count, 'image')} to train on; add images until there are at least two of each."
            )
        gallery = self._counts("gallery")
        if gallery.sum() == 0:
            raise TrainingError(
                f"Dataset {dataset.manifest.name} has no images in its gallery split, the validation set; "
                "raise data.gallery_fraction or add images."
            )
        has_several = np.count_nonzero(gallery) > 1
        self.chance_accuracy = float(gallery.max() / gallery.sum()) if has_several else 1 / self.classes
        """Gallery accuracy of always predicting the most frequent class. If the gallery has only
        one class, that of a random guess."""

    def batches(
        self, batch_size: int, seed: int, epoch: int, rank: int, world_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Indefinitely yield exactly ``batch_size`` images (N, C, H, W) and classes (N,).

        The train split is repeated and reshuffled, so a small dataset fills an epoch of any length.
        Every process gets the same number of batches. Unless labels are excluded, the batches of
        all ranks in order make up the batch of a single process.
        """
        pending: list[tuple[NDArray[np.uint8], NDArray[np.int64]]] = []
        shuffle_seed = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
        for repetition in range(2**31):
            for block in self._dataset.shuffled_batches(
                "train", batch_size, shuffle_seed, repetition, rank, world_size
            ):
                pending.append(self._included(block))
                if sum(len(classes) for _, classes in pending) < batch_size:
                    continue
                images, classes = (np.concatenate(parts) for parts in zip(*pending, strict=True))
                yield to_tensor(images[:batch_size]), torch.from_numpy(classes[:batch_size])
                pending = [(images[batch_size:], classes[batch_size:])]

    def paired_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of `batches`, in groups of `PAIRED_IMAGES` of one class, for losses that
        compare the images of a batch. A batch has at least two groups."""
        waiting: dict[int, list[Tensor]] = defaultdict(list)
        groups: list[tuple[Tensor, int]] = []
        for pixels, classes in self.batches(batch_size, seed, epoch, rank=0, world_size=1):
            for image, number in zip(pixels, classes.tolist(), strict=True):
                waiting[number].append(image)
                if len(waiting[number]) == PAIRED_IMAGES:
                    groups.append((torch.stack(waiting.pop(number)), number))
                if len(groups) >= max(2, batch_size // PAIRED_IMAGES):
                    images, numbers = zip(*groups, strict=True)
                    yield torch.cat(images), torch.tensor(numbers).repeat_interleave(PAIRED_IMAGES)
                    groups = []

    def gallery(self, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        return self.in_order("gallery", rank, world_size)

    def in_order(self, split: Split, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rank's share of a split in order, as images (N, C, H, W) and classes (N,)."""
        block_size = max(1, BLOCK_SIZE_BYTES // int(np.prod(self._dataset.shape)))
        share = math.ceil(self._dataset.count(split) / world_size)
        for block in self._dataset.blocks(split, min(512, block_size, share), rank, world_size):
            images, classes = self._included(block)
            if len(classes):
                yield to_tensor(images), torch.from_numpy(classes)

    def classes_of(self, block: Block) -> NDArray[np.int64]:
        """Class numbers (N,), or -1 where the label is excluded."""
        return self._class_of_label[block.labels]

    def _included(self, block: Block) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        classes = self.classes_of(block)
        if (classes >= 0).all():
            return block.images, classes
        return block.images[classes >= 0], classes[classes >= 0]

    def _counts(self, split: Split) -> NDArray[np.int64]:
        counts = self._dataset.manifest.label_counts(split)
        return np.array([counts[label] for label in counts], dtype=np.int64)[self._class_of_label >= 0]


ShardBlocks = tuple[Iterator[Block], int]
"""The blocks of a shard, and its number of images."""
OnImages = Callable[[int], None]
"""Called with the number of images that were completed since the previous call."""


@torch.inference_mode()
def embed_images(network: Network, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute float32 vectors (N, D) for one batch of uint8 images (N, H, W, C)."""
    return network(to_tensor(images)).numpy()


class ImageVectors:
    """Computes the vectors that are not cached, and counts those that are. The network is loaded
    when the first must be computed."""

    def __init__(
        self,
        cache: EmbeddingCache,
        load: Callable[[], Network],
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
        return self._view(block.select(selected))

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
    def _network(self) -> Network:
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
