"""Changes of a ledger as a file: an ingest that adds little to a large dataset stores little."""
# ruff: noqa: S608 - the names of tables and columns are constants

import sqlite3
from pathlib import Path

# Tables whose changed rows are stored, with their primary keys; the other tables are small and stored whole.
_KEYS = {
    "files": ("source", "name"),
    "images": ("digest",),
    "removed": ("digest",),
    "labels": ("id",),
    "shards": ("slot",),
}
_SMALL_TABLES = ("state", "sources", "empty_folders", "hidden_folders", "notes")
# An ingest of decoded images writes their rows again, which is no change.
_FILE_COLUMNS = ("etag", "label", "given", "size_bytes", "pending", "digest", "fault")


def track(db: sqlite3.Connection) -> None:
    """From here on, collect the keys of changed rows in temporary tables."""
    unchanged = " AND ".join(f"OLD.{column} IS NEW.{column}" for column in _FILE_COLUMNS)
    for table, keys in _KEYS.items():
        columns = ", ".join(keys)
        db.execute(f"CREATE TEMP TABLE IF NOT EXISTS changed_{table} ({columns}, PRIMARY KEY ({columns}))")
        db.execute(f"DELETE FROM changed_{table}")
        for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
            when = f"WHEN NOT ({unchanged})" if (table, event) == ("files", "UPDATE") else ""
            values = ", ".join(f"{row}.{key}" for key in keys)
            db.execute(
                f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON main.{table} {when}"
                f" BEGIN INSERT OR IGNORE INTO changed_{table} VALUES ({values}); END"
            )


def save(db: sqlite3.Connection, path: Path) -> None:
    """Write what changed since `track` to ``path``; call this outside of a transaction."""
    db.execute("ATTACH ? AS part", (str(path),))
    db.execute("BEGIN")
    for table, keys in _KEYS.items():
        joined = f"temp.changed_{table} c LEFT JOIN main.{table} t USING ({', '.join(keys)})"
        db.execute(f"CREATE TABLE part.{table} AS SELECT t.* FROM {joined} WHERE t.{keys[0]} IS NOT NULL")
        db.execute(f"CREATE TABLE part.gone_{table} AS SELECT c.* FROM {joined} WHERE t.{keys[0]} IS NULL")
    for table in _SMALL_TABLES:
        db.execute(f"CREATE TABLE part.{table} AS SELECT * FROM main.{table}")
    db.execute("COMMIT")
    db.execute("DETACH part")


def apply(db: sqlite3.Connection, path: Path) -> None:
    """Apply a file of `save` to the ledger that it was written for."""
    db.execute("ATTACH ? AS part", (str(path),))
    db.execute("BEGIN")
    for table, keys in _KEYS.items():
        columns = ", ".join(keys)
        db.execute(f"DELETE FROM main.{table} WHERE ({columns}) IN (SELECT {columns} FROM part.gone_{table})")
        db.execute(f"INSERT OR REPLACE INTO main.{table} SELECT * FROM part.{table}")
    stored = {name for (name,) in db.execute("SELECT name FROM part.sqlite_master")}
    for table in _SMALL_TABLES:
        if table in stored:  # earlier versions lack the newest tables
            db.execute(f"DELETE FROM main.{table}")
            db.execute(f"INSERT INTO main.{table} SELECT * FROM part.{table}")
    db.execute("COMMIT")
    db.execute("DETACH part")
