"""Test leakage: images of the test split that a release was built from."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from evernear.data.manifest import Split
from evernear.data.shards import Dataset

SEEN: tuple[Split, ...] = ("train", "gallery", "query")
"""Splits that a release is built from: its weights, its index, its threshold."""
TEST_IMAGES_AT_ONCE = 1_000_000
"""Digests in memory at a time, 32 MB. A larger test split takes one pass over the images for each such part."""
Digests = NDArray[np.bytes_]


def count_leakage(dataset: Dataset, made_from: Dataset, splits: Sequence[Split] = SEEN) -> dict[str, int]:
    """Count the images of ``splits`` of ``made_from`` that are in the test split of ``dataset``.

    Counts images in the shards, not in the ledger that assigned the splits. Images are equal if their pixels at source
    resolution are: two scans of the same digit count as two images.
    """
    leakage = dict.fromkeys(splits, 0)
    for test in _gathered(_digests(dataset, "test")):
        test.sort()
        for split in splits:
            for seen in _digests(made_from, split):
                places = np.minimum(np.searchsorted(test, seen), len(test) - 1)
                leakage[split] += int((test[places] == seen).sum())
    return {str(split): count for split, count in leakage.items()}


def _digests(dataset: Dataset, split: Split) -> Iterator[Digests]:
    for block in dataset.blocks(split):
        # NumPy compares byte strings as wholes. It ignores trailing zeros, which is harmless at equal lengths.
        yield block.digests.view("S32").ravel()


def _gathered(pieces: Iterator[Digests]) -> Iterator[Digests]:
    pending: list[Digests] = []
    for piece in pieces:
        pending.append(piece)
        if sum(map(len, pending)) >= TEST_IMAGES_AT_ONCE:
            yield np.concatenate(pending)
            pending = []
    if pending:
        yield np.concatenate(pending)
