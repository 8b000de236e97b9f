"""The last stage of an ingest: write the tables of the new snapshot, and describe it.

A table is sorted on disk and written partition by partition, so that memory use does not grow with
it. A partition that did not change has the same content and the same name as before.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from evernear.common.store import Store
from evernear.data.database import ArrowBatch, Database
from evernear.data.manifest import Manifest, Partition, Shard, Split
from evernear.data.tables import ROW_GROUP_ROWS, Table, digits_for, table_key, write_partition
from evernear.data.writer import group_number

# A file with an image whose labels conflict is read again, because they may agree by then.
_FILES = """
CREATE OR REPLACE VIEW files_out AS
SELECT source, name, etag, size_bytes, modified, label, given_split, given_group, "group", digest, fault,
  unread OR digest IS NOT NULL AND digest IN (
    SELECT digest FROM copies GROUP BY digest HAVING min(label) <> max(label)
  ) AS unread, false AS waiting
FROM read
UNION ALL SELECT * FROM waiting;
"""
_IMAGES = """
CREATE OR REPLACE TABLE shards (slot INTEGER, shard VARCHAR);
CREATE OR REPLACE VIEW images_out AS
SELECT digest, label, split, "group", width_px, height_px, flaws, reviewed, shard, row
FROM images JOIN shards USING (slot);
CREATE OR REPLACE VIEW removed_out AS SELECT digest, split, "group", reviewed FROM removed;
CREATE OR REPLACE VIEW notes_out AS SELECT source, rule, name, count FROM notes;
"""
# Whether the tables differ from those of the previous snapshot.
_DIFFER = """
SELECT EXISTS (FROM changed) OR EXISTS (FROM renamed)
  OR (SELECT count(*) FROM old_files WHERE waiting) <> (SELECT count(*) FROM waiting)
  OR EXISTS (FROM notes EXCEPT ALL FROM old_notes) OR EXISTS (FROM old_notes EXCEPT ALL FROM notes)
"""
_SORTED: Mapping[Table, str] = {
    "files": """
        SELECT *, CASE WHEN $digits > 0 THEN left(sha256(name), $digits) ELSE '' END AS prefix FROM files_out
        ORDER BY prefix, source, name
    """,
    "images": "SELECT *, left(lower(hex(digest)), $digits) AS prefix FROM images_out ORDER BY digest",
    "removed": "SELECT *, '' AS prefix FROM removed_out ORDER BY digest",
    "notes": "SELECT *, '' AS prefix FROM notes_out ORDER BY source, rule, name, count",
}
_SEEN_GROUPS = """
SELECT "group" FROM images WHERE "group" IS NOT NULL GROUP BY 1
HAVING count(DISTINCT split) FILTER (split <> 'test') > 1 ORDER BY 1
"""
_LEFT_MEASUREMENT = """
SELECT reviewed, label, count(*) FROM images WHERE reviewed <> '' GROUP BY 1, 2 ORDER BY 1
"""
"""Of the images from review, those that left a measured split."""


def write_tables(
    db: Database, shards: Mapping[int, Shard], store: Store, parent: Manifest | None, name: str, scratch: Path
) -> dict[str, tuple[Partition, ...]]:
    """Store the tables of an ingest, after `evernear.data.combine.combine`, if they changed."""
    if parent is not None and not db.value(_DIFFER):
        return parent.tables
    db.run(_FILES)
    db.run(_IMAGES)
    numbers, names = [*shards], [shard.sha256 for shard in shards.values()]
    db.insert("shards", pa.table({"slot": pa.array(numbers, pa.int32()), "shard": pa.array(names, pa.string())}))
    return store_tables(db, store, parent, name, scratch)


def store_tables(
    db: Database, store: Store, parent: Manifest | None, name: str, scratch: Path
) -> dict[str, tuple[Partition, ...]]:
    """Store the partitions of ``files_out``, ``images_out``, ``removed_out`` and ``notes_out`` that
    the previous snapshot does not have."""
    known = {part.sha256 for partitions in parent.tables.values() for part in partitions} if parent else set[str]()
    written: defaultdict[str, list[Partition]] = defaultdict(list)
    counts = db.row("SELECT (SELECT count(*) FROM files_out), (SELECT count(*) FROM images_out)")
    digits = dict(zip(("files", "images"), map(digits_for, counts), strict=True))
    for table, query in _SORTED.items():
        values = {"digits": digits[table]} if table in digits else {}
        slices = _slices(db.batches(query, ROW_GROUP_ROWS, **values))
        for prefix, group in groupby(slices, key=itemgetter(0)):
            path = scratch / "partition.parquet"
            partition = write_partition(path, table, prefix, (rows for _, rows in group))
            written[table].append(partition)
            if partition.sha256 not in known:
                store.put(table_key(name, table, partition.sha256), path)
            path.unlink()
    return {table: tuple(partitions) for table, partitions in written.items()}


def _slices(batches: Iterable[ArrowBatch]) -> Iterator[tuple[str, ArrowBatch]]:
    """The prefix of a partition with rows of it, in order."""
    for batch in batches:
        prefixes = batch.column("prefix").dictionary_encode()
        starts = [0, *(np.flatnonzero(np.diff(prefixes.indices)) + 1).tolist()]
        rows = batch.drop_columns("prefix")
        for start, end in zip(starts, [*starts[1:], len(batch)], strict=True):
            yield prefixes[start].as_py(), rows.slice(start, end - start)


def describe(db: Database, labels: tuple[str, ...]) -> dict[str, Any]:
    """The fields of the manifest that are counted in the tables."""
    groups, reviewed = db.row('SELECT count(DISTINCT "group"), count(reviewed) FROM images')
    seen = db.rows(_SEEN_GROUPS) if groups else []
    left: defaultdict[Split, dict[str, int]] = defaultdict(dict)
    rows = db.rows(_LEFT_MEASUREMENT) if reviewed else []
    for split, label, count in sorted(rows, key=lambda row: (row[0], labels.index(row[1]))):
        left[split][label] = count
    return {
        "labels": labels,
        "groups": groups,
        "seen_groups": tuple(sorted(group_number(name) for (name,) in seen)),
        "given_splits": tuple(
            split
            for (split,) in db.rows("SELECT DISTINCT given_split FROM read WHERE given_split IS NOT NULL ORDER BY 1")
        ),
        "reviewed": reviewed,
        "reviewed_left_out": dict(left),
    }
