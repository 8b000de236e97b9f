"""The digests of the images in a split, even if a shard is lost.

An image that is read again with the same digest stands in for a lost one in every snapshot: the
tables of a snapshot contain the digests of its images.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from evernear.data.manifest import Shard, Split
from evernear.data.shards import Dataset
from evernear.errors import IntegrityError

_OF_SHARD = "SELECT digest FROM images WHERE shard = $shard"


def split_digests(dataset: Dataset, split: Split) -> Iterator[NDArray[np.uint8]]:
    """The digests (N, 32) of a split. Those of a lost shard come from the tables."""
    for shard in dataset.shards(split):
        try:
            digests = [block.digests for block in dataset.shard_blocks(shard)]
        except IntegrityError as lost:
            digests = [_of_lost(dataset, shard, lost)]
        yield from digests


def _of_lost(dataset: Dataset, shard: Shard, lost: IntegrityError) -> NDArray[np.uint8]:
    if not dataset.manifest.tables.get("images"):
        raise lost
    from evernear.data.books import opened_books  # DuckDB must not be in a process that steps are forked from

    try:
        with opened_books(dataset.store, dataset.manifest, ("images",)) as books:
            digests = [digest for (digest,) in books.rows(_OF_SHARD, shard=shard.sha256)]
    except IntegrityError:
        raise lost from None
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
