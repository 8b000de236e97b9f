"""Has the system seen images of the test split before?"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from evernear.data.manifest import Split
from evernear.data.shards import Dataset

SEEN: tuple[Split, ...] = ("train", "gallery", "query")
"""Splits that go into a release: its weights, its index, its threshold."""
TEST_IMAGES_AT_ONCE = 1_000_000
"""Digests held at a time, 32 MB; a larger test split takes another pass over the images for each."""
Digests = NDArray[np.bytes_]


def count_leaks(dataset: Dataset, made_from: Dataset, splits: Sequence[Split] = SEEN) -> dict[str, int]:
    """How many images of ``splits`` of ``made_from``, which go into a release, are in ``dataset``'s test split.

    Read from the shards themselves, image by image, and not from the ledger that made the splits. Equal means
    equal pixels at source resolution: two scans of the same digit count as two images.
    """
    leaks = dict.fromkeys(splits, 0)
    for test in _gathered(_digests(dataset, "test")):
        test.sort()
        for split in splits:
            for seen in _digests(made_from, split):
                places = np.minimum(np.searchsorted(test, seen), len(test) - 1)
                leaks[split] += int((test[places] == seen).sum())
    return {str(split): count for split, count in leaks.items()}


def _digests(dataset: Dataset, split: Split) -> Iterator[Digests]:
    for block in dataset.blocks(split):
        # As bytes numpy sorts and compares them whole; trailing zeros do not count, which at one length is
        # harmless.
        yield block.digests.view("S32").ravel()


def _gathered(pieces: Iterator[Digests]) -> Iterator[Digests]:
    held: list[Digests] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= TEST_IMAGES_AT_ONCE:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)
