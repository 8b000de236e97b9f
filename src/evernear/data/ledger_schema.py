"""The tables of a ledger, and the settings of its connections."""

import sqlite3

from evernear.data.group_table import SCHEMA as GROUPS_SCHEMA
from evernear.data.reviewed import SCHEMA as REVIEWED_SCHEMA
from evernear.data.sources.named_groups import SCHEMA as NAMED_GROUPS_SCHEMA

_CACHE_KIB = 64 * 2**10  # digests are random, so writes are spread over a whole large ledger

SCHEMA = """
CREATE TABLE labels (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE sources (id INTEGER PRIMARY KEY, uri TEXT NOT NULL UNIQUE);
CREATE TABLE shards (slot INTEGER PRIMARY KEY, shard TEXT NOT NULL);
CREATE TABLE empty_folders (source INTEGER NOT NULL, name TEXT NOT NULL);
CREATE TABLE files (
  source INTEGER NOT NULL,
  name TEXT NOT NULL,
  etag TEXT NOT NULL,        -- changes when the file's content may have changed
  label TEXT NOT NULL,
  given TEXT,                -- the explicit split; NULL: ingest chooses one
  size_bytes INTEGER NOT NULL,
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
CREATE TABLE hidden_folders (source INTEGER NOT NULL, name TEXT NOT NULL);
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
""" + ";\n".join([GROUPS_SCHEMA, REVIEWED_SCHEMA, NAMED_GROUPS_SCHEMA])
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
    """Normalize a source URI, because ``s3://bucket/prefix/`` and ``s3://bucket/prefix`` are the
    same source."""
    return source.rstrip("/")
