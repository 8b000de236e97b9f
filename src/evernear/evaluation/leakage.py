"""Test leakage: the number of test images that a release was built from."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from evernear.data.manifest import Split
from evernear.data.rebuild import split_digests
from evernear.data.shards import Dataset

SEEN: tuple[Split, ...] = ("train", "gallery", "query")
"""Splits from which the weights, the index and the threshold of a release are built."""
BLOCK_SIZE = 1_000_000
"""Maximum number of digests in memory, 32 MB. A larger test split is processed in blocks, each with
one pass over the images."""
Digests = NDArray[np.bytes_]


def count_leakage(dataset: Dataset, training_dataset: Dataset, splits: Sequence[Split] = SEEN) -> dict[str, int]:
    """For each of ``splits`` of ``training_dataset``, count the images that are also in the test
    split of ``dataset``.

    The images are read from the shards, not from the ledger that assigned the splits, unless a
    shard is lost. Two images are equal if their pixels at source resolution are, so two scans of
    the same digit count as two.
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
    for digests in split_digests(dataset, split):
        # NumPy's comparison ignores trailing zeros, which is harmless for equal lengths
        yield np.ascontiguousarray(digests).view("S32").ravel()


def _merge_blocks(blocks: Iterator[Digests]) -> Iterator[Digests]:
    pending: list[Digests] = []
    for block in blocks:
        pending.append(block)
        if sum(map(len, pending)) >= BLOCK_SIZE:
            yield np.concatenate(pending)
            pending = []
    if pending:
        yield np.concatenate(pending)
