"""Assign images and groups to splits. The assignment is stratified by class, and is mostly
determined by a hash."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from evernear.data.group_table import Members
from evernear.data.groups import Grouping
from evernear.data.ledger import Ledger
from evernear.data.manifest import SPLITS, Split
from evernear.data.reviewed import TRAINING
from evernear.data.sources.names import is_reviewed
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
    if fractions.get("gallery") and not counts["gallery"]:
        return "gallery"
    total = 1  # plain loops, because this function is called for each image
    for split in fractions:
        total += counts[split]
    if total >= complete:
        for split in fractions:
            if not counts[split]:
                return split
    furthest, most_behind = None, float(min(_MAX_BEHIND, total // _EXACT_IMAGES))
    for split, fraction in fractions.items():
        behind = total * fraction - counts[split]
        if behind > most_behind:
            furthest, most_behind = split, behind
    return furthest or hash_split(digest, fractions)


def choose_group_split(
    group: str, counts: Sequence[Mapping[Split, int]], fractions: Mapping[Split, float], complete: float
) -> Split:
    """``counts`` are the groups of each of its classes in each split, that of its first image
    first. The first three groups of a class go to train, test and gallery, so that even a class of
    two is tested with another scene. Later, `choose_split` uses the hash of the name."""
    for split in _FIRST_GROUPS:
        if fractions.get(split) and not all(of_class[split] for of_class in counts):
            return split
    digest = hashlib.sha256(group.encode(errors="surrogateescape")).digest()
    return choose_split(digest, counts[0], fractions, complete)


def hash_split(digest: bytes, fractions: Mapping[Split, float]) -> Split:
    """The split that is determined by the digest alone. ``fractions`` add up to 1."""
    position = int.from_bytes(digest[:8]) / 2.0**64
    for split, fraction in fractions.items():
        if position < fraction:
            return split
        position -= fraction
    return "train"


class Placer:
    """Each group counts as one image, so that a class with few large groups has test images."""

    def __init__(self, settings: DataSettings, candidates: tuple[Split, ...], ledger: Ledger, group: Grouping) -> None:
        self._candidates, self._ledger, self._group = candidates, ledger, group
        self._fractions = cache(lambda candidates: split_fractions(candidates, settings))
        self._complete = images_of_all_splits(settings)
        self._counts: defaultdict[str, Counter[Split]] = defaultdict(Counter)
        for shard in ledger.shards().values():
            for label, count in shard.label_counts.items():
                self._counts[label][shard.split] += count
        ledger.groups.start_placing()
        for label, split, groups, images in ledger.groups.units():
            self._counts[label][split] += groups - images

    def place(
        self,
        names: Sequence[str],
        labels: Sequence[str],
        digests: Sequence[bytes],
        explicit_splits: Sequence[Split | None],
        former_splits: Mapping[str, Split],
    ) -> dict[int, Split]:
        """Map the positions of new images, at most 500, to their splits. ``former_splits`` maps the
        names of unchanged files that are decoded again to their splits."""
        known = self._ledger.stored_digests(digests)
        reviewed = self._ledger.reviewed.among(digests)
        earlier = self._ledger.removed_splits(digests)
        groups = [self._group(name, label) for name, label in zip(names, labels, strict=True)]
        keys = set(groups) - {""}
        placed, listed = self._ledger.groups.placed(keys), self._ledger.groups.labels(keys)
        splits: dict[int, Split] = {}
        rows = zip(names, labels, digests, groups, explicit_splits, strict=True)
        for row, (name, label, digest, group, explicit) in enumerate(rows):
            if digest in known:
                continue
            known.add(digest)
            candidates: tuple[Split, ...] = self._candidates
            counts = self._counts[label]
            split = explicit or earlier.get(digest) or former_splits.get(name)
            if digest in reviewed or is_reviewed(name):
                candidates = tuple(each for each in candidates if each in TRAINING) or TRAINING[:1]
                split = split if split in TRAINING else None
            if group:
                members = placed[group]
                split = split or self._choose_for_group(label, group, members, listed[group], candidates)
                counts[split] += (label, split) not in members
                members[label, split] += 1
            else:
                split = split or choose_split(digest, counts, self._fractions(candidates), self._complete)
                counts[split] += 1
            splits[row] = split
        self._ledger.groups.place(placed)
        return splits

    def _choose_for_group(
        self, label: str, group: str, members: Members, labels: Sequence[str], candidates: tuple[Split, ...]
    ) -> Split:
        if followed := _followed(members, candidates):
            return followed
        others = [other for other in labels if other != label]
        counts = [self._counts[each] for each in (label, *others)]
        split = choose_group_split(group, counts, self._fractions(candidates), self._complete)
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
