"""Count test leakage, the test images that a release was built from."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from evernear.data.manifest import Split
from evernear.data.shards import Dataset

SEEN: tuple[Split, ...] = ("train", "gallery", "query")
"""Splits that the weights, index and threshold of a release are built from."""
BLOCK_SIZE = 1_000_000
"""Largest number of digests in memory, 32 MB. A larger test split is processed in
blocks of this size, with one pass over the images per block.
"""
Digests = NDArray[np.bytes_]


def count_leakage(dataset: Dataset, training_dataset: Dataset, splits: Sequence[Split] = SEEN) -> dict[str, int]:
    """Count the images of ``splits`` of ``training_dataset`` that are in the test split
    of ``dataset``.

    The images are read from the shards rather than from the ledger that assigned the
    splits. Images are equal if their pixels at source resolution are equal. Two scans
    of the same digit are two images.
    """
    leakage = dict.fromkeys(splits, 0)
    for test in _merge_blocks(_digests(dataset, "test")):
        test.sort()
        for split in splits:
            for seen in _digests(training_dataset, split):
                positions = np.minimum(np.searchsorted(test, seen), len(test) - 1)
                leakage[split] += int((test[positions] == seen).sum())
    return {str(split): count for split, count in leakage.items()}


def _digests(dataset: Dataset, split: Split) -> Iterator[Digests]:
    for block in dataset.blocks(split):
        # NumPy compares byte strings without trailing zeros,
        # which is harmless at equal lengths.
        yield block.digests.view("S32").ravel()


def _merge_blocks(blocks: Iterator[Digests]) -> Iterator[Digests]:
    pending: list[Digests] = []
    for block in blocks:
        pending.append(block)
        if sum(map(len, pending)) >= BLOCK_SIZE:
            yield np.concatenate(pending)
            pending = []
    if pending:
        yield np.concatenate(pending)
