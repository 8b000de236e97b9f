"""Save changes to a ledger as a file, so that an ingest that adds few images to a large dataset
stores little data."""
# ruff: noqa: S608 - names of tables and columns are constants

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from evernear.data.group_table import SCHEMA as GROUPS_SCHEMA
from evernear.data.reviewed import SCHEMA as REVIEWED_SCHEMA
from evernear.data.sources.base import FileEntry
from evernear.data.sqlite import sqlite_errors

# Tables for which the changed rows are stored, with their primary keys and the columns that are
# compared. The other tables are small, so all of their rows are stored.
_TABLES = {
    "files": (("source", "name"), ("etag", "label", "given", "size_bytes", "grp", "pending", "digest", "fault")),
    "images": (("digest",), ("label", "slot", "width", "height", "constant")),
    "removed": (("digest",), ("split",)),
    "groups": (("digest",), ("name",)),
    "reviewed": (("digest",), ("split",)),
    "waiting": (("source", "name"), ("digest",)),
    "labels": (("id",), ("name",)),
    "shards": (("slot",), ("shard",)),
    "decoders": (("source",), ("decoder",)),
}
TOUCHED_IMAGES = "temp.touched CROSS JOIN images i ON i.digest = touched.digest"
"""Images with changed files since `track_images`. `CROSS JOIN` avoids reading all."""
_SMALL_TABLES = ("sources", "notes", "stamp")


def track_changes(db: sqlite3.Connection) -> None:
    """Record written rows and their previous content, since some of them are unchanged, such as
    those of files that are read again."""
    for table, (keys, _) in _TABLES.items():
        columns = ", ".join(keys)
        db.execute(f"CREATE TEMP TABLE IF NOT EXISTS written_{table} ({columns}, before, PRIMARY KEY ({columns}))")
        db.execute(f"DELETE FROM written_{table}")
        for event, row, before in (
            ("INSERT", "NEW", "NULL"),
            ("UPDATE", "OLD", _content(table, "OLD")),
            ("DELETE", "OLD", _content(table, "OLD")),
        ):
            values = ", ".join(f"{row}.{key}" for key in keys)
            db.execute(
                f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON main.{table}"
                f" BEGIN INSERT OR IGNORE INTO written_{table} VALUES ({values}, {before}); END"
            )


def track_images(db: sqlite3.Connection) -> None:
    """Start to record the `TOUCHED_IMAGES`."""
    db.execute("CREATE TEMP TABLE touched (digest BLOB PRIMARY KEY) WITHOUT ROWID")
    relabeled = " WHEN OLD.digest IS NOT NEW.digest OR OLD.label != NEW.label"
    for table, event, condition, rows in (
        ("images", "INSERT", "", ("NEW",)),
        ("files", "INSERT", "", ("NEW",)),
        ("files", "UPDATE", relabeled, ("OLD", "NEW")),
        ("files", "DELETE", "", ("OLD",)),
    ):
        # OR IGNORE has no effect if the statement that fires the trigger is an upsert.
        touch = " ".join(
            f"INSERT INTO touched SELECT {row}.digest"
            f" WHERE {row}.digest IS NOT NULL AND {row}.digest NOT IN (SELECT digest FROM touched);"
            for row in rows
        )
        db.execute(
            f"CREATE TEMP TRIGGER {table}_{event}_touches AFTER {event} ON main.{table}{condition} BEGIN {touch} END"
        )


def any_changed(db: sqlite3.Connection) -> bool:
    """Whether a row differs from its content when `track_changes` was called."""
    return any(db.execute(f"SELECT 1 FROM {_changed(table)} LIMIT 1").fetchone() for table in _TABLES)


def save(db: sqlite3.Connection, path: Path) -> None:
    """Write the changes since `track_changes`. Call this outside a transaction."""
    db.execute("ATTACH ? AS part", (str(path),))
    db.execute("BEGIN")
    for table, (keys, _) in _TABLES.items():
        changed = _changed(table)
        gone = ", ".join(f"w.{key}" for key in keys)
        db.execute(f"CREATE TABLE part.{table} AS SELECT t.* FROM {changed} AND t.{keys[0]} IS NOT NULL")
        db.execute(f"CREATE TABLE part.gone_{table} AS SELECT {gone} FROM {changed} AND t.{keys[0]} IS NULL")
    for table in _SMALL_TABLES:
        db.execute(f"CREATE TABLE part.{table} AS SELECT * FROM main.{table}")
    db.execute("COMMIT")
    db.execute("DETACH part")


def apply_row_changes(db: sqlite3.Connection, path: Path) -> None:
    """Apply a file from `save` to the ledger to which the changes belong."""
    db.execute("ATTACH ? AS part", (str(path),))
    db.execute("BEGIN")
    for table, (keys, _) in _TABLES.items():
        columns = ", ".join(keys)
        db.execute(f"DELETE FROM main.{table} WHERE ({columns}) IN (SELECT {columns} FROM part.gone_{table})")
        db.execute(f"INSERT OR REPLACE INTO main.{table} SELECT * FROM part.{table}")
    for table in _SMALL_TABLES:
        db.execute(f"DELETE FROM main.{table}")
        db.execute(f"INSERT INTO main.{table} SELECT * FROM part.{table}")
    db.execute("COMMIT")
    db.execute("DETACH part")


def _content(table: str, row: str) -> str:
    return " || ',' || ".join(f"quote({row}.{column})" for column in _TABLES[table][1])


def _changed(table: str) -> str:
    """FROM and WHERE of a table's changed rows: ``w`` is a row before, and ``t`` the current
    one."""
    keys = _TABLES[table][0]
    now = f"CASE WHEN t.{keys[0]} IS NOT NULL THEN {_content(table, 't')} END"
    return f"temp.written_{table} w LEFT JOIN main.{table} t USING ({', '.join(keys)}) WHERE w.before IS NOT {now}"


_PAGE_ROWS = 500
_CACHE_KIB = 64 * 2**10  # digests are random, so writes are spread over a whole large ledger

SCHEMA = """
CREATE TABLE stamp (format INTEGER NOT NULL, evernear_version TEXT NOT NULL);
CREATE TABLE labels (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE sources (id INTEGER PRIMARY KEY, uri TEXT NOT NULL UNIQUE);
CREATE TABLE shards (slot INTEGER PRIMARY KEY, shard TEXT NOT NULL);
CREATE TABLE files (
  source INTEGER NOT NULL,
  name TEXT NOT NULL,
  etag TEXT NOT NULL,        -- changes when the file's content may have changed
  label TEXT NOT NULL,
  given TEXT,                -- the explicit split; NULL: ingest chooses one
  size_bytes INTEGER NOT NULL,
  grp TEXT NOT NULL,         -- the group that the source specifies, or empty
  turn INTEGER NOT NULL,     -- the order of decoding
  pending INTEGER NOT NULL,  -- 1: to be decoded
  digest BLOB,               -- of its image; NULL while pending, if broken, and if it is no image
  fault TEXT,                -- why it cannot be decoded
  PRIMARY KEY (source, name)
) WITHOUT ROWID;
CREATE TABLE images (
  digest BLOB PRIMARY KEY,
  label INTEGER NOT NULL,
  slot INTEGER NOT NULL,
  width INTEGER NOT NULL,
  height INTEGER NOT NULL,
  constant INTEGER NOT NULL  -- the image's flaws
) WITHOUT ROWID;
CREATE TABLE decoders (source INTEGER PRIMARY KEY, decoder TEXT NOT NULL);
CREATE TABLE removed (digest BLOB PRIMARY KEY, split TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE waiting (
  source INTEGER NOT NULL,
  name TEXT NOT NULL,
  digest BLOB NOT NULL,
  PRIMARY KEY (source, name)
) WITHOUT ROWID;
CREATE TABLE notes (
  source INTEGER NOT NULL,
  rule TEXT NOT NULL,
  name TEXT,                 -- NULL: the number of names that are not listed
  count INTEGER NOT NULL
);
""" + ";\n".join([GROUPS_SCHEMA, REVIEWED_SCHEMA])
INDEXES = (
    "CREATE INDEX IF NOT EXISTS files_by_digest ON files (digest) WHERE digest IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS files_by_turn ON files (source, turn, name) WHERE pending",
)


def without_journal(db: sqlite3.Connection) -> None:
    """Turn off the journal, because the file is a scratch copy until it is published."""
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA temp.journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")


def source_uri(source: str) -> str:
    """``s3://bucket/prefix/`` and ``s3://bucket/prefix`` are the same source."""
    return source.rstrip("/")


def members(db: sqlite3.Connection, source: int | None, file: str, etag: str) -> Iterator[FileEntry]:
    """The images of a packed file, sorted by name, if it had this ``etag`` in its last listing."""
    query = (
        "SELECT name, etag, label, given, size_bytes, grp FROM files"
        " WHERE source = ? AND name > ? AND name < ? ORDER BY name LIMIT ?"
    )
    after, end = f"{file}/", f"{file}0"  # the character after the slash
    while True:
        with sqlite_errors():  # a page at a time, because the caller writes to the table
            rows = db.execute(query, (source, after, end, _PAGE_ROWS)).fetchall()
        if not rows or any(row[1] != etag for row in rows):
            return
        after = rows[-1][0]
        yield from (FileEntry(*row) for row in rows)
