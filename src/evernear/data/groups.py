"""Images that belong together, such as the frames of one scene, form a group. All images of a group
are in one split.

``data.group`` defines the groups with a regular expression, or with the name of a predefined
pattern that is suitable for many sources. The expression is applied to the name of a file in its
source, as it appears in messages. A group key applies to all classes and sources of a dataset,
because a scene may show several classes. Labeled queries
(`evernear.data.sources.names.is_reviewed`) do not belong to any group.
"""

import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np
from numpy.typing import NDArray

from evernear.common.output import quantity
from evernear.common.text import class_name
from evernear.data.group_table import FEWEST_GROUPS
from evernear.data.shards import Dataset
from evernear.data.snapshots import opened_ledger
from evernear.data.sources.names import is_reviewed
from evernear.data.stored_ledger import PublishedLedger
from evernear.settings.data import COLUMN, GROUP_FORMS

Grouping = Callable[[str, str], str]
"""Maps the file name and the label of an image to its group, or to an empty string."""

_RUNNING_NUMBER = re.compile(r"[^0-9A-Za-z/]*\d+[^0-9/]*$")


def grouping(setting: str, column: Callable[[str], str] = lambda name: "") -> Grouping:
    """The grouping that a valid value of ``data.group`` defines. If ``setting`` is empty, no image
    belongs to a group. ``column`` returns the group that the source itself specifies for a file."""
    if not setting:
        return lambda name, label: ""
    if setting == COLUMN:
        return lambda name, label: class_name(column(name))
    if setting in GROUP_FORMS:
        form = _folder if setting == "folder" else _stem
        return lambda name, label: "" if is_reviewed(name) else form(below_class(name, label))
    pattern = re.compile(setting)

    def group(name: str, label: str) -> str:
        found = None if is_reviewed(name) else pattern.search(name)
        parts = [part or "" for part in found.groups()] if found else []
        return "/".join(parts) if any(parts) else ""

    return group


def below_class(name: str, label: str) -> str:
    """The file's name below its class folder, or the whole name if it has none."""
    folders = name.split("/")[:-1]
    depth = next((depth for depth, folder in enumerate(folders, 1) if class_name(folder) == label), 0)
    return "/".join(name.split("/")[depth:])


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _stem(path: str) -> str:
    """The part before the last number, with the folders below the class folder."""
    stem = posixpath.splitext(path)[0]
    found = _RUNNING_NUMBER.search(stem)
    return stem[: found.start()].rstrip("/") if found else ""


class GroupNumbers:
    """Assigns numbers to the groups of a snapshot's images on demand."""

    def __init__(self, ledger: PublishedLedger, divided: bool) -> None:
        """``divided`` states whether any group has images in several splits."""
        self._ledger, self._divided = ledger, divided
        self._numbers: dict[str | bytes, int] = {}

    def of(self, digests: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The group number of each image (N,). An image without a group counts as one."""
        images = [digest.tobytes() for digest in digests]
        keys = self._ledger.groups(images)
        of_image: list[str | bytes] = [keys.get(image) or image for image in images]
        numbers = (self._numbers.setdefault(key, len(self._numbers)) for key in of_image)
        return np.fromiter(numbers, np.int32, len(images))

    def independent(self, digests: NDArray[np.uint8]) -> float:
        """Estimate the number of independent images among N images, where N is at least 1 (Kish
        1965, section 8.2). See `evernear.evaluation.statistics.effective_totals`."""
        sizes = np.unique(self.of(digests), return_counts=True)[1]
        return float(sizes.sum() ** 2 / (sizes**2).sum())

    def seen_queries(self) -> frozenset[bytes]:
        """Digests of the query images whose group is also in train or gallery, which they resemble
        more than images of a new group do. Such groups were ingested before ``data.group`` was set,
        or the source specifies the splits."""
        return self._ledger.queries_of_seen_groups() if self._divided else frozenset()

    def label_counts(self) -> dict[str, dict[str, int]]:
        counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for group, label, images in self._ledger.label_counts():
            counts[group][label] = images
        return counts

    def has_explicit_test_images(self) -> bool:
        return self._ledger.has_explicit_test_images()


@contextmanager
def group_numbers(dataset: Dataset) -> Generator[GroupNumbers | None]:
    """Yield the groups of a dataset's images, or None if the images are independent."""
    if not dataset.manifest.groups:
        yield None
        return
    divided = bool(dataset.manifest.problem_counts.get("split_group"))
    with opened_ledger(dataset) as ledger:
        yield GroupNumbers(ledger, divided)


CANDIDATES = ("stem", "folder", r"([^/]*\d)\d\.\w+$")
"""The last one finds ten successive numbers, as cameras count."""
_ENOUGH = 0.8
"""Share of the pairs beyond which a pattern with more groups is better."""
_MAX_LEFT = 0.2
"""Largest share of the test images that may still have a near-duplicate."""
_FILLS_EVERY_SPLIT = 10
_PLACES = {"huggingface": "a column group of the files", "webdataset": "the field group of its .json"}
_ELSEWHERE = "in another --workdir or store, because images of an existing dataset never change their splits"


def propose_group(dataset: Dataset, pairs: Sequence[tuple[bytes, bytes]], share: float, current: str) -> str:
    """Return advice for a dataset that has near-duplicates in different splits. ``pairs`` contains
    digests of near-duplicates, ``share`` is the share of the test images that have one, and
    ``current`` is the value of ``data.group``."""
    with opened_ledger(dataset) as ledger:
        divided_by_source = ledger.have_other_explicit_splits(pairs)
        proposed = None if divided_by_source else _best(ledger, pairs, share, current)
        examples = [ledger.files_of(pair) for pair in pairs[:1]]
    names = " and ".join(name for files in examples for name, _ in files.values())
    divided = dataset.manifest.problem_counts.get("split_group", 0)
    if divided_by_source:
        return (
            f"The source itself puts them into different splits, such as {names}, and data.group does not change that."
            f" Give all images of a scene one split there, and ingest them {_ELSEWHERE}."
        )
    if current and divided:
        groups = quantity(divided, "group has", "groups have")
        return (
            f"With data.group={current}, {groups} images in several splits, since they were ingested before it was set."
            f" Ingest them again {_ELSEWHERE}."
        )
    kind = dataset.manifest.source.partition(":")[0]
    name_scenes = f"and ingest them with --set data.group={COLUMN}, {_ELSEWHERE}."
    if kind == "table" and current != COLUMN:
        return f"Name the scene of each image in the column group of the table, {name_scenes}"
    if proposed:
        setting, groups = proposed
        return (
            f"Ingest them with --set {shlex.quote(f'data.group={setting}')}, which makes {quantity(groups, 'group')} of"
            f" their names, {_ELSEWHERE}."
        )
    if kind in _PLACES and current != COLUMN:
        return f"Name the scene of each image in {_PLACES[kind]}, {name_scenes}"
    pattern = f"another pattern than data.group={current}" if current else "data.group to a pattern"
    return (
        f"Set {pattern} that finds the scene in names such as {names}, or rename the files, and ingest them"
        f" {_ELSEWHERE}."
    )


def _best(
    ledger: PublishedLedger, pairs: Sequence[tuple[bytes, bytes]], share: float, current: str
) -> tuple[str, int] | None:
    """The setting that puts the most pairs into one group each and, of those with enough pairs,
    makes the most groups, with their number. It fits only if few near-duplicates are left, and
    classes have enough groups for all splits."""
    files = ledger.files_of([digest for pair in pairs for digest in pair])
    best, found = (0.0, 0), None
    for setting in CANDIDATES:
        group = grouping(setting)
        groups = [tuple(group(*files[digest]) for digest in pair if digest in files) for pair in pairs]
        alike = sum(len(pair) == 2 and pair[0] == pair[1] != "" for pair in groups) / len(pairs)
        if setting == current or (1 - alike) * share > _MAX_LEFT:
            continue
        of_class: defaultdict[str, set[int]] = defaultdict(set)
        for name, label in ledger.image_files():
            of_class[label].add(hash(group(name, label)))
        counts = [len(keys) for keys in of_class.values()]
        rank = min(alike, _ENOUGH), len(set.union(*of_class.values()))
        if median(counts) >= FEWEST_GROUPS and max(counts) >= _FILLS_EVERY_SPLIT and rank > best:
            best, found = rank, (setting, rank[1])
    return found
