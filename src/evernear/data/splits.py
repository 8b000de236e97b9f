"""Assign images and groups to splits. The assignment is stratified by class, and is mostly
determined by a hash."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from evernear.data.manifest import SPLITS, Split
from evernear.data.reviewed import TRAINING
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
    fractions = {split: fraction for split, fraction in fractions.items() if split in candidates and fraction}
    return {**fractions, "train": 1.0 - sum(fractions.values())}


def images_of_all_splits(settings: DataSettings) -> float:
    """The number of images from which on a class has one in each split: enough for a test image."""
    return 1 / settings.test_fraction if settings.test_fraction else math.inf


def choose_split(
    digest: bytes, counts: Mapping[Split, int], fractions: Mapping[Split, float], complete: float = math.inf
) -> Split:
    """Choose a split from ``fractions`` for a new image. ``counts`` contains the number of images
    of the image's class in each split, and ``complete`` is that of `images_of_all_splits`.

    The first image of a class goes to the gallery, because a class without gallery images cannot be
    recognized, and from ``complete`` images on, each split has one. For later images, the digest
    determines the split, unless a split has fallen behind its share of the class: by any amount in
    a class with fewer than 20 images, by more than 1 image in a class with up to 40 images, and by
    more than 2 images in a larger class. In a large class, the order of the images hardly matters.
    """
    if not counts["gallery"] and fractions.get("gallery"):
        return "gallery"
    present = [counts[split] for split in fractions]
    total = 1 + sum(present)
    if 0 in present and total >= complete:
        return next(split for split, count in zip(fractions, present, strict=True) if not count)
    furthest, most_behind = None, min(_MAX_BEHIND, total // _EXACT_IMAGES)
    for (split, fraction), count in zip(fractions.items(), present, strict=True):
        behind = total * fraction - count
        if behind > most_behind:
            furthest, most_behind = split, behind
    return furthest or hash_split(digest, fractions)


def choose_group_split(
    digest: bytes, counts: Sequence[Mapping[Split, int]], fractions: Mapping[Split, float], complete: float
) -> Split:
    """``digest`` is of the group's name, and ``counts`` are the groups of each of its classes in
    each split, that of its first image first. The first three groups of a class go to train, test
    and gallery, so that even a class of two is tested with another scene. Later, `choose_split`
    uses the digest."""
    for split in _FIRST_GROUPS:
        if fractions.get(split) and not all(of_class[split] for of_class in counts):
            return split
    return choose_split(digest, counts[0], fractions, complete)


def hash_split(digest: bytes, fractions: Mapping[Split, float]) -> Split:
    """The split that is determined by the digest alone. ``fractions`` add up to 1."""
    position = int.from_bytes(digest[:8]) / 2.0**64
    for split, fraction in fractions.items():
        if position < fraction:
            return split
        position -= fraction
    return "train"


Members = Counter[tuple[str, Split]]
"""Number of images in a group by label and split. Removed images have an empty label."""


class Placer:
    """Each group counts as one image, so that a class with few large groups has test images."""

    def __init__(
        self,
        settings: DataSettings,
        candidates: tuple[Split, ...],
        counts: Mapping[str, Counter[Split]],
        members: Mapping[str, Members],
        labels: Mapping[str, Sequence[str]],
    ) -> None:
        """``counts`` are the earlier groups of each class, and images without a group, in each
        split. ``members`` are the earlier images of each group with new ones, and ``labels`` its
        classes."""
        self._candidates = candidates
        self._fractions = cache(lambda candidates: split_fractions(candidates, settings))
        self._chosen = self._fractions(candidates)
        self._complete = images_of_all_splits(settings)
        self._counts = defaultdict[str, Counter[Split]](Counter, counts)
        self._members = defaultdict[str, Members](Counter, members)
        self._labels = labels

    def place(
        self,
        labels: Sequence[str],
        digests: Sequence[bytes],
        groups: Sequence[str | None],
        given: Sequence[Split | None],
        earlier: Sequence[Split | None],
        reviewed: Sequence[bool],
    ) -> list[Split]:
        """The splits of new images. ``earlier`` are those of images that were removed, or are
        decoded again."""
        images = zip(labels, digests, groups, given, earlier, reviewed, strict=True)
        return [self._place(*image) for image in images]

    def _place(
        self, label: str, digest: bytes, group: str | None, given: Split | None, earlier: Split | None, reviewed: bool
    ) -> Split:
        counts = self._counts[label]
        split = earlier or given
        candidates, fractions = self._candidates, self._chosen
        if reviewed:
            candidates: tuple[Split, ...] = tuple(each for each in candidates if each in TRAINING) or TRAINING[:1]
            fractions = self._fractions(candidates)
            split = split if split in TRAINING else None
        if group:
            members = self._members[group]
            split = split or self._choose_for_group(label, group, members, candidates)
            counts[split] += (label, split) not in members
            members[label, split] += 1
            return split
        split = split or choose_split(digest, counts, fractions, self._complete)
        counts[split] += 1
        return split

    def _choose_for_group(self, label: str, group: str, members: Members, candidates: tuple[Split, ...]) -> Split:
        if followed := _followed(members, candidates):
            return followed
        others = [other for other in self._labels.get(group, ()) if other != label]
        counts = [self._counts[each] for each in (label, *others)]
        digest = hashlib.sha256(group.encode(errors="surrogateescape")).digest()
        split = choose_group_split(digest, counts, self._fractions(candidates), self._complete)
        for other in others:  # counts the group in all its classes at once
            members[other, split] = 0
            self._counts[other][split] += 1
        return split


def _followed(members: Members, candidates: Sequence[Split]) -> Split | None:
    """The split with most images of a group, or None if no candidate has one."""
    images: Counter[Split] = Counter()
    for (_, split), count in members.items():
        images[split] += count
    present: list[Split] = [split for split in SPLITS if images[split] and split in candidates]
    return max(present, key=lambda split: images[split], default=None)
