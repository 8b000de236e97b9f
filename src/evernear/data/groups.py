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
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from evernear.common.output import quantity
from evernear.common.text import class_name, spelled
from evernear.data.shards import Dataset
from evernear.data.sources.names import is_reviewed
from evernear.settings.data import COLUMN, GROUP_FORMS

if TYPE_CHECKING:
    from evernear.data.database import Database

Grouping = Callable[[str, str], str]
"""Maps the file name and the label of an image to its group, or to an empty string."""

_RUNNING_NUMBER = re.compile(r"[^0-9A-Za-z/]*\d+[^0-9/]*$")


def grouping(setting: str) -> Grouping:
    """The grouping that a valid value of ``data.group`` defines, except the groups that the source
    itself names (``column``). If ``setting`` is empty, no image belongs to a group."""
    if not setting:
        return lambda name, label: ""
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


class LargeGroup(NamedTuple):
    """A large group of several classes. Its value may mean that an image has no group."""

    name: str
    images: int
    total: int
    labels: int

    def __str__(self) -> str:
        share = f"{self.images / self.total:.0%}"
        return f"{spelled(self.name)} with {self.images:,} of {self.total:,} images ({share}), of {self.labels} classes"


FEWEST_GROUPS = 3
"""Minimum number of groups that a class needs to have images in train, test and gallery."""
DOMINANT_SHARE = 0.5
"""Share of the images from which a group that spans several classes stops the first ingest."""
LARGE_GROUPS = """
WITH sizes AS (SELECT name, sum(images)::BIGINT AS images, count(*) AS labels FROM group_labels GROUP BY name),
total AS (SELECT sum(images)::BIGINT AS images FROM sizes),
named AS (SELECT * FROM sizes WHERE name <> ''),
median AS (SELECT images FROM named ORDER BY images LIMIT 1 OFFSET (SELECT (count(*) - 1) // 2 FROM named))
SELECT named.name, named.images, total.images, labels FROM named, total, median
WHERE labels > 1 AND (named.images >= 0.5 * total.images
    OR named.images >= 0.2 * total.images AND named.images > 2 * median.images)
ORDER BY named.images DESC, named.name
"""
"""The groups in ``group_labels`` (name, label, images) that span several classes and have at least
half of the images, or a fifth and more than twice the images of the median group, as one of three
equal scenes has not."""


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
    import pyarrow as pa

    from evernear.data.books import opened_books  # DuckDB must not be in a process that steps are forked from

    with opened_books(dataset.store, dataset.manifest) as books:
        books.run(_PAIRED)
        books.insert("paired", pa.table({"digest": [digest for pair in pairs for digest in pair]}))
        given = defaultdict[bytes, set[str | None]](set)
        files: dict[bytes, tuple[str, str]] = {}
        for digest, name, label, split in books.rows(_FILES_OF_PAIRS):
            given[digest].add(split)
            files.setdefault(digest, (name, label))
        # Without an explicit split, ingest chooses a split that the source gives to no image.
        divided_by_source = 2 * sum(given[test] != given[seen] for test, seen in pairs) > len(pairs)
        proposed = None if divided_by_source else _best(books, files, pairs, share, current)
    names = " and ".join(files[digest][0] for pair in pairs[:1] for digest in pair if digest in files)
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


_PAIRED = "CREATE TABLE paired (digest BLOB)"
_FILES_OF_PAIRS = """
SELECT digest, name, label, given_split FROM files WHERE digest IN (SELECT digest FROM paired) AND NOT waiting
ORDER BY digest, source, name
"""
_IMAGE_FILES = "SELECT name, label FROM files WHERE digest IS NOT NULL AND NOT waiting"


def _best(
    books: "Database",
    files: Mapping[bytes, tuple[str, str]],
    pairs: Sequence[tuple[bytes, bytes]],
    share: float,
    current: str,
) -> tuple[str, int] | None:
    """The setting that puts the most pairs into one group each and, of those with enough pairs,
    makes the most groups, with their number. It fits only if few near-duplicates are left, and
    classes have enough groups for all splits."""
    best, found = (0.0, 0), None
    for setting in CANDIDATES:
        group = grouping(setting)
        groups = [tuple(group(*files[digest]) for digest in pair if digest in files) for pair in pairs]
        alike = sum(len(pair) == 2 and pair[0] == pair[1] != "" for pair in groups) / len(pairs)
        if setting == current or (1 - alike) * share > _MAX_LEFT:
            continue
        of_class: defaultdict[str, set[int]] = defaultdict(set)
        for name, label in books.stream(_IMAGE_FILES):
            of_class[label].add(hash(group(name, label)))
        counts = [len(keys) for keys in of_class.values()]
        rank = min(alike, _ENOUGH), len(set.union(*of_class.values()))
        if median(counts) >= FEWEST_GROUPS and max(counts) >= _FILLS_EVERY_SPLIT and rank > best:
            best, found = rank, (setting, rank[1])
    return found
