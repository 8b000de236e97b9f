"""Assign images and groups to splits. The assignment is stratified by class, and is mostly
determined by a hash."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

from evernear.data.manifest import Split
from evernear.settings import DataSettings

_FIRST_GROUPS: tuple[Split, ...] = ("train", "test", "gallery")
_MAX_BEHIND = 2
_EXACT_IMAGES = 20


def split_fractions(candidates: Collection[Split], settings: DataSettings) -> dict[Split, float]:
    """The expected share of each split in ``candidates``. ``train`` gets the remainder."""
    fractions: dict[Split, float] = {
        "test": settings.test_fraction,
        "gallery": settings.gallery_fraction,
        "query": settings.query_fraction,
    }
    fractions = {split: fraction for split, fraction in fractions.items() if split in candidates}
    return {**fractions, "train": 1.0 - sum(fractions.values())}


def choose_split(digest: bytes, counts: Mapping[Split, int], fractions: Mapping[Split, float]) -> Split:
    """Choose a split from ``fractions`` for a new image. ``counts`` contains the number of images
    of the image's class in each split.

    The first image of a class goes to the gallery, because a class without gallery images cannot be
    recognized. For later images, the digest determines the split, unless a split has fallen behind
    its share of the class: by any amount in a class with fewer than 20 images, by more than 1 image
    in a class with up to 40 images, and by more than 2 images in a larger class. As a result, a
    class with ten images has test images. In a large class, the order of the images hardly matters.
    """
    if fractions.get("gallery") and not counts["gallery"]:
        return "gallery"
    total = 1  # plain loops, because this function is called for each image
    for split in fractions:
        total += counts[split]
    furthest, most_behind = None, float(min(_MAX_BEHIND, total // _EXACT_IMAGES))
    for split, fraction in fractions.items():
        behind = total * fraction - counts[split]
        if behind > most_behind:
            furthest, most_behind = split, behind
    return furthest or hash_split(digest, fractions)


def choose_group_split(group: str, counts: Sequence[Mapping[Split, int]], fractions: Mapping[Split, float]) -> Split:
    """Choose the split for a new group. ``counts`` contains, for each class of the group, the
    number of groups in each split. The class of the group's first image is the first.

    The first three groups of a class are assigned to train, test and gallery. Even a class with two
    groups is therefore tested with images from a different scene. If the gallery is empty, it is
    filled with train images. For later groups, `choose_split` uses the hash of the group's name.
    """
    for split in _FIRST_GROUPS:
        if fractions.get(split) and not all(of_class[split] for of_class in counts):
            return split
    digest = hashlib.sha256(group.encode(errors="surrogateescape")).digest()
    return choose_split(digest, counts[0], fractions)


def hash_split(digest: bytes, fractions: Mapping[Split, float]) -> Split:
    """The split that is determined by the digest alone. ``fractions`` add up to 1."""
    position = int.from_bytes(digest[:8]) / 2.0**64
    for split, fraction in fractions.items():
        if position < fraction:
            return split
        position -= fraction
    return "train"
