"""The groups of a dataset's images, as the shards tell them by numbers
(`evernear.data.writer.group_number`)."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset


class GroupNumbers:
    """The groups of a dataset, at least one of whose images has one."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def independent(self, queries: NDArray[np.uint8]) -> float:
        """Estimate the number of independent images among N digests of the query split, where N is
        at least 1 (Kish 1965, section 8.2). See
        `evernear.evaluation.statistics.effective_totals`."""
        wanted = {digest.tobytes() for digest in queries}
        groups = [
            group
            for block in self._dataset.blocks("query")
            for digest, group in zip(block.digests, block.groups.tolist(), strict=True)
            if digest.tobytes() in wanted
        ]
        sizes = np.unique(groups, return_counts=True)[1]
        return float(sizes.sum() ** 2 / (sizes**2).sum())

    def seen_queries(self) -> frozenset[bytes]:
        """Digests of the query images whose group is also in train or gallery, which they resemble
        more than images of a new group do. Such groups were ingested before ``data.group`` was set,
        or the source specifies the splits."""
        seen = np.array(self._dataset.manifest.seen_groups, np.int64)
        if not len(seen):
            return frozenset()
        return frozenset(
            digest.tobytes()
            for block in self._dataset.blocks("query")
            for digest in block.digests[np.isin(block.groups, seen)]
        )

    def label_counts(self) -> dict[int, dict[str, int]]:
        """The number of images by group and label."""
        counts = defaultdict[int, dict[str, int]](dict)
        for split in SPLITS:
            for block in self._dataset.blocks(split):
                pairs, images = np.unique(np.stack([block.groups, block.labels]), axis=1, return_counts=True)
                for group, label, count in zip(*pairs.tolist(), images.tolist(), strict=True):
                    name = self._dataset.labels[label]
                    counts[group][name] = counts[group].get(name, 0) + count
        return counts

    def has_explicit_test_images(self) -> bool:
        return "test" in self._dataset.manifest.given_splits


def group_numbers(dataset: Dataset) -> GroupNumbers | None:
    """The groups of a dataset's images, or None if the images are independent."""
    return GroupNumbers(dataset) if dataset.manifest.groups else None
