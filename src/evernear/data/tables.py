"""The tables of a snapshot: their columns, and how they are stored.

Each table is stored in partitions, which are Parquet files with the rows of one prefix of a hash::

    datasets/<name>/<table>/<sha256>.parquet

A partition is named after its content and never changes. The manifest of a snapshot lists the
partitions of its tables, so several snapshots share those that did not change between them. A
change writes again the partitions that it touches.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.parquet import stamped
from evernear.data.database import ArrowBatch, ArrowSchema, ArrowTable
from evernear.data.manifest import Partition

Table = Literal["files", "images", "removed", "notes"]
TABLES: tuple[Table, ...] = get_args(Table)
PARTITION_ROWS = 1_000_000
"""Most rows of a partition, on average, which takes at most about 100 MB."""
ROW_GROUP_ROWS = 20_000


def _schema(**columns: tuple[Any, str]) -> ArrowSchema:
    """The type and the meaning of each column. The meanings are stored in the Parquet files."""
    fields = [pa.field(name, kind, metadata={"meaning": meaning}) for name, (kind, meaning) in columns.items()]
    return stamped(pa.schema(fields))


SCHEMAS: Mapping[Table, ArrowSchema] = {
    "files": _schema(
        source=(pa.string(), "The source that lists the file, as in data.source."),
        name=(pa.string(), "The name of the file in its source."),
        etag=(pa.string(), "Changes when the content of the file may have changed."),
        size_bytes=(pa.int64(), "The size of the file, or 0 if the source does not tell it."),
        modified=(pa.timestamp("us"), "When the source says that the file was changed, in UTC, or null."),
        label=(pa.string(), "The class that the source gives to the file."),
        given_split=(pa.string(), "The split that the source gives to the file, or null: ingest chooses one."),
        given_group=(pa.string(), "The group that the source itself names for the file, or null."),
        group=(pa.string(), "The group of the file according to data.group, or null."),
        digest=(pa.binary(), "The sha256 of the decoded image, or null if the file contains none."),
        fault=(pa.string(), "Why the file cannot be decoded and was left out, or null."),
        unread=(pa.bool_(), "Whether the next ingest reads the file even if it has not changed."),
        waiting=(pa.bool_(), "Whether the file waits for more images of its class, which came by review."),
    ),
    "images": _schema(
        digest=(pa.binary(), "The sha256 of the decoded image, in its original size."),
        label=(pa.string(), "The class of the image."),
        split=(pa.string(), "The split of the image: train, test, gallery or query."),
        group=(pa.string(), "The group of the image, which is in one split, or null."),
        width_px=(pa.int32(), "The width of the image before it was resized."),
        height_px=(pa.int32(), "The height of the image before it was resized."),
        flaws=(
            pa.int32(),
            "Bits: 1 for one value in all pixels, 2 for lost contrast, 4 for clipped values, 8 for lost color.",
        ),
        reviewed=(pa.string(), "Of an image from review, the measured split that it left, or empty; otherwise null."),
        shard=(pa.string(), "The sha256 of the shard that contains the pixels: shards/<shard>.npy."),
        row=(pa.int32(), "The row of the image in its shard, from 0."),
    ),
    "removed": _schema(
        digest=(pa.binary(), "The sha256 of an image whose files are gone. If it returns, so does its split."),
        split=(pa.string(), "The split that the image was in."),
        group=(pa.string(), "The group that the image was in, or null."),
        reviewed=(pa.string(), "As in images."),
    ),
    "notes": _schema(
        source=(pa.string(), "The source with the file or folder."),
        rule=(pa.string(), "The rule of validation that reports it."),
        name=(pa.string(), "The file or folder, or null: as many others as count says."),
        count=(pa.int64(), "How many files or folders the row stands for."),
    ),
}
_ORDER: Mapping[Table, tuple[str, ...]] = {
    "files": ("source", "name"),
    "images": ("digest",),
    "removed": ("digest",),
    "notes": ("source", "rule", "name"),
}
_REPEATED = frozenset({"source", "label", "given_split", "given_group", "group", "fault", "split", "reviewed", "shard"})
"""Columns in which values are repeated. The others are hashes, names and numbers."""


def table_key(dataset: str, table: str, sha256: str) -> str:
    return f"datasets/{dataset}/{table}/{sha256}.parquet"


def digits_for(rows: int) -> int:
    """The number of hexadecimal digits in the prefixes of the partitions of ``rows`` rows."""
    digits = 0
    while rows > PARTITION_ROWS * 16**digits:
        digits += 1
    return digits


def write_partition(path: Path, table: Table, prefix: str, batches: Iterable[ArrowBatch]) -> Partition:
    """Write sorted rows. The same rows give the same file, whatever the size of the batches."""
    schema, rows = SCHEMAS[table], 0
    compressed = [name for name in schema.names if name != "digest"]
    options: dict[str, Any] = {
        "use_dictionary": [name for name in schema.names if name in _REPEATED],
        "compression": {name: "ZSTD" if name in compressed else "NONE" for name in schema.names},
        "compression_level": dict.fromkeys(compressed, 1),
    }
    with disk_errors(path), pq.ParquetWriter(path, schema, **options) as file:
        for group in _row_groups(batches, schema):
            file.write_table(group, ROW_GROUP_ROWS)
            rows += len(group)
    return Partition(sha256=sha256_file(path), prefix=prefix, rows=rows, size_bytes=path.stat().st_size)


def _row_groups(batches: Iterable[ArrowBatch], schema: ArrowSchema) -> Iterator[ArrowTable]:
    pending: list[ArrowBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(map(len, pending)) >= ROW_GROUP_ROWS:
            table = _cast(pending, schema)
            whole = len(table) // ROW_GROUP_ROWS * ROW_GROUP_ROWS
            yield table.slice(0, whole)
            pending = table.slice(whole).to_batches() if whole < len(table) else []
    if pending:
        yield _cast(pending, schema)


def _cast(batches: list[ArrowBatch], schema: ArrowSchema) -> ArrowTable:
    return pa.Table.from_batches(batches).cast(schema)
