"""Propose a ``data.group`` setting that fits the names of near-duplicate images."""

import shlex
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from evernear.common.output import quantity
from evernear.data.group_table import FEWEST_GROUPS, PublishedGroups
from evernear.data.groups import grouping
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.settings.group import COLUMN

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
    with tempfile.TemporaryDirectory(prefix="evernear-groups-") as scratch:
        path = Path(scratch, "ledger.sqlite")
        Snapshots(dataset.store, dataset.manifest.name).fetch_ledger(dataset.manifest, path)
        ledger = PublishedGroups(path)
        try:
            divided_by_source = ledger.have_other_explicit_splits(pairs)
            proposed = None if divided_by_source else _best(ledger, pairs, share, current)
            examples = [ledger.files(pair) for pair in pairs[:1]]
        finally:
            ledger.close()
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
    ledger: PublishedGroups, pairs: Sequence[tuple[bytes, bytes]], share: float, current: str
) -> tuple[str, int] | None:
    """The setting that puts the most pairs into one group each and, among settings that do so with
    enough pairs, makes the most groups. Also return the number of groups. None if no setting fits.

    A setting fits only if few near-duplicates would be left, most classes have enough groups to be
    trained and tested, and a class has enough for all splits.
    """
    files = ledger.files([digest for pair in pairs for digest in pair])
    best, found = (0.0, 0), None
    for setting in CANDIDATES:
        group = grouping(setting)
        groups = [tuple(group(*files[digest]) for digest in pair if digest in files) for pair in pairs]
        alike = sum(len(pair) == 2 and pair[0] == pair[1] != "" for pair in groups) / len(pairs)
        if setting == current or (1 - alike) * share > _MAX_LEFT:
            continue
        of_class: defaultdict[str, set[int]] = defaultdict(set)
        for name, label in ledger.all_files():
            of_class[label].add(hash(group(name, label)))
        counts = [len(keys) for keys in of_class.values()]
        rank = min(alike, _ENOUGH), len(set.union(*of_class.values()))
        if median(counts) >= FEWEST_GROUPS and max(counts) >= _FILLS_EVERY_SPLIT and rank > best:
            best, found = rank, (setting, rank[1])
    return found
