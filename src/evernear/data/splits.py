"""The assignment of images to splits by content hash: it never changes as data is added, and copies stay together."""

from collections.abc import Collection, Mapping

from evernear.data.manifest import Split
from evernear.settings import DataSettings


def split_fractions(candidates: Collection[Split], settings: DataSettings) -> dict[Split, float]:
    """The expected share of each of ``candidates``; ``train`` gets the remainder."""
    fractions: dict[Split, float] = {
        "test": settings.test_fraction,
        "gallery": settings.gallery_fraction,
        "query": settings.query_fraction,
    }
    fractions = {split: fraction for split, fraction in fractions.items() if split in candidates}
    return {**fractions, "train": 1.0 - sum(fractions.values())}


def hash_split(digest: bytes, candidates: Collection[Split], settings: DataSettings) -> Split:
    """The split, out of ``candidates``, of the image with this digest."""
    position = int.from_bytes(digest[:8]) / 2.0**64
    for split, fraction in split_fractions(candidates, settings).items():
        if position < fraction:
            return split
        position -= fraction
    return "train"


def balanced_split(counts: Mapping[Split, int], candidates: Collection[Split], settings: DataSettings) -> Split:
    """The split, out of ``candidates``, that lacks most of its share of a class with ``counts`` images and one more."""
    fractions = split_fractions(candidates, settings)
    total = sum(counts[split] for split in fractions) + 1
    return max(fractions, key=lambda split: total * fractions[split] - counts[split])
