"""A dataset's images as the training loop wants them: tensors, in batches, of the labels that take part."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.errors import TrainingError

BLOCK_SIZE_BYTES = 4 * 2**20
"""Pixels read at once where order does not matter."""


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Images (N, H, W, C) of uint8 as a tensor (N, C, H, W) of its own, channels last in memory."""
    return torch.from_numpy(np.array(images, order="C")).permute(0, 3, 1, 2)


def block_size(shape: tuple[int, int, int]) -> int:
    """How many images of ``shape`` (H, W, C) make a block of `BLOCK_SIZE_BYTES`."""
    return max(1, BLOCK_SIZE_BYTES // int(np.prod(shape)))


class TrainingImages:
    """The train and gallery splits without the excluded labels; the others are numbered anew from 0.

    Raises:
        TrainingError: there is nothing to tell apart, or nothing to validate on.
    """

    def __init__(self, dataset: Dataset, exclude_labels: frozenset[str]) -> None:
        kept = [index for index, label in enumerate(dataset.labels) if label not in exclude_labels]
        self._dataset = dataset
        self._class_of_label = np.full(len(dataset.labels), -1, dtype=np.int64)
        self._class_of_label[kept] = np.arange(len(kept))
        self.classes = len(kept)
        self.count = self._count("train")
        if self.classes < 2 or self.count < 2:
            raise TrainingError(
                f"Dataset {dataset.manifest.name} leaves {self.classes} labels and {self.count} images to "
                "train on; give at least two of each."
            )
        if self._count("gallery") == 0:
            raise TrainingError(
                f"Dataset {dataset.manifest.name} has no image in its gallery split, which training is "
                "validated on; raise data.gallery_fraction or give more images."
            )

    def batches(
        self, batch_size: int, seed: int, epoch: int, rank: int, world_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of exactly ``batch_size`` images (N, C, H, W) and classes (N,), without an end.

        The train split is passed over again and again, shuffled anew each time, so a small dataset can fill
        an epoch of any length and every process gets as many batches as the others.
        """
        waiting: list[tuple[NDArray[np.uint8], NDArray[np.int64]]] = []
        shuffle_seed = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
        for each_pass in range(2**31):
            for block in self._dataset.shuffled_batches("train", batch_size, shuffle_seed, each_pass, rank, world_size):
                waiting.append(self._kept(block))
                if sum(len(classes) for _, classes in waiting) < batch_size:
                    continue
                images, classes = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
                yield to_tensor(images[:batch_size]), torch.from_numpy(classes[:batch_size])
                waiting = [(images[batch_size:], classes[batch_size:])]

    def gallery(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The gallery split in order: images (N, C, H, W) and classes (N,), in blocks of bounded size."""
        for block in self._dataset.blocks("gallery", min(512, block_size(self._dataset.shape))):
            images, classes = self._kept(block)
            if len(classes):
                yield to_tensor(images), torch.from_numpy(classes)

    def _kept(self, block: Block) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        classes = self._class_of_label[block.labels]
        if (classes >= 0).all():
            return block.images, classes
        return block.images[classes >= 0], classes[classes >= 0]

    def _count(self, split: Split) -> int:
        counts = self._dataset.manifest.label_counts(split)
        return sum(counts[label] for label, kept in zip(counts, self._class_of_label >= 0, strict=True) if kept)
