"""The second stage of an ingest: compare the listing with the files of the previous snapshot, to
find those that must be read.

The working tables of an ingest are in a scratch database:

- ``old_files``, ``old_images``, ``old_removed`` and ``old_notes``: those of the previous snapshot;
- ``listed``: what the source lists now (`evernear.data.list`);
- ``changed``: those of its files that are not as in the previous snapshot, and those that are gone;
- ``pending``: those of them that must be read;
- ``results``: the results of the parts (`evernear.data.parts`);
- ``read``: the files of all sources, as they are now (`evernear.data.combine`);
- ``images``, ``removed`` and ``notes``: those of the new snapshot (`evernear.data.combine`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import pyarrow as pa

from evernear.common.store import FileStore, Store
from evernear.data.books import local_tables, source_uri
from evernear.data.database import ArrowTable, Database
from evernear.data.list import Listing
from evernear.data.manifest import Manifest, Shard
from evernear.data.sources import FileEntry
from evernear.data.tables import SCHEMAS, TABLES

# Images of a source that moved are those of the new location. If they were already ingested from
# there, the files of the old location are left out.
_OLD = """
CREATE TABLE renamed (source VARCHAR, current VARCHAR);
CREATE VIEW old_files AS
SELECT f.* REPLACE (coalesce(r.current, f.source) AS source) FROM stored_files f LEFT JOIN renamed r USING (source)
WHERE r.source IS NULL OR r.current IS NOT NULL;
CREATE VIEW old_notes AS
SELECT n.* REPLACE (coalesce(r.current, n.source) AS source) FROM stored_notes n LEFT JOIN renamed r USING (source)
WHERE r.source IS NULL OR r.current IS NOT NULL;
CREATE VIEW old_removed AS SELECT * FROM stored_removed;
CREATE TABLE slots (slot INTEGER, shard VARCHAR);
CREATE VIEW old_images AS SELECT i.*, slot FROM stored_images i JOIN slots USING (shard);
"""
# Files of the source that are new, ``gone``, or not as before. With the same etag, a file is
# ``unchanged``, so it keeps its image and its time. A broken file is read again, because it may
# have been mended without a change that the listing shows.
_CHANGED = """
CREATE TABLE changed AS
SELECT $source AS source, name, l.etag, l.label, l.given_split, l.size_bytes, l.given_group, l."group",
  CASE WHEN o.etag = l.etag THEN o.modified ELSE l.modified END AS modified,
  o.etag IS NOT DISTINCT FROM l.etag AND NOT o.again AS unchanged,
  CASE WHEN o.etag = l.etag THEN o.digest END AS former, o.digest AS old_digest, l.name IS NULL AS gone
FROM listed l FULL JOIN (
  SELECT *, $reread OR unread OR fault IS NOT NULL AS again FROM old_files WHERE source = $source AND NOT waiting
) o USING (name)
WHERE l.name IS NULL OR o.name IS NULL OR o.again OR o.etag <> l.etag OR o.label <> l.label
  OR o.size_bytes <> l.size_bytes OR o.given_split IS DISTINCT FROM l.given_split
  OR o.given_group IS DISTINCT FROM l.given_group OR o."group" IS DISTINCT FROM l."group";
"""
# Without a previous snapshot, these are all files.
_ALL_CHANGED = """
CREATE VIEW changed AS
SELECT *, false AS unchanged, NULL::BLOB AS former, NULL::BLOB AS old_digest, false AS gone FROM listed;
"""
_PENDING = "CREATE VIEW pending AS SELECT * FROM changed WHERE NOT gone AND NOT unchanged"
# Files that wait and were decoded before are remembered, so that `evernear forget` does not treat
# their images as removed.
_WAITING = """
CREATE TABLE waiting AS
SELECT o.* REPLACE (true AS waiting) FROM old_files o JOIN (SELECT DISTINCT name FROM left_out) USING (name)
WHERE o.source = $source AND o.digest IS NOT NULL;
INSERT INTO waiting SELECT * FROM old_files WHERE source <> $source AND waiting;
"""
_NOTES = """
CREATE TABLE notes AS SELECT * FROM old_notes WHERE source <> $source;
INSERT INTO notes SELECT $source, rule, name, count FROM listed_notes;
"""


@dataclass(frozen=True)
class Draft:
    """The working tables of an ingest, and what else the previous snapshot says."""

    db: Database
    source: str
    labels: tuple[str, ...]
    decoders: dict[str, str]
    """For each source, a hash of the code that decoded its images."""
    is_new: bool

    @property
    def other_sources(self) -> list[str]:
        return [source for source in self.decoders if source != self.source]

    def members(self, file: str, etag: str) -> Iterator[FileEntry]:
        """The images of a packed file, sorted by name, if it had this ``etag`` in its last
        listing."""
        return members(self.db, self.source, file, etag)


_MEMBERS_OF_ANOTHER = """
SELECT count(*) FROM old_files
WHERE source = $source AND name > $after AND name < $before AND etag <> $etag AND NOT waiting
"""
_MEMBERS = """
SELECT name, etag, label, given_split, size_bytes, coalesce(given_group, ''),
  coalesce(epoch_us(modified), 0)
FROM old_files WHERE source = $source AND name > $after AND name < $before AND NOT waiting ORDER BY name
"""


def members(db: Database, source: str, file: str, etag: str) -> Iterator[FileEntry]:
    """The images of a packed file in ``old_files``, sorted by name, if it had this ``etag``."""
    values = {"source": source, "after": f"{file}/", "before": f"{file}0"}  # the character after the slash
    if not db.value(_MEMBERS_OF_ANOTHER, etag=etag, **values):
        yield from starmap(FileEntry, db.stream(_MEMBERS, **values))


def open_working(scratch: Path, store: Store, dataset: str) -> Database:
    """The database of an ingest, which may read the tables of the dataset."""
    tables = [store.path(f"datasets/{dataset}/{table}") for table in TABLES] if isinstance(store, FileStore) else []
    return Database(scratch, tables)


def earlier_shards(draft: Draft, parent: Manifest | None) -> dict[int, Shard]:
    """The shards with images of the previous snapshot, by slot."""
    if parent is None:
        return {}
    slots = {slot for (slot,) in draft.db.rows("SELECT DISTINCT slot FROM old_images")}
    return {slot: shard for slot, shard in enumerate(parent.shards) if slot in slots}


def open_draft(
    db: Database, store: Store, parent: Manifest | None, source: str, moved_from: str, scratch: Path
) -> Draft:
    """Name the tables of ``parent`` in ``db``, for an ingest of ``source``, whose images were in
    ``moved_from``."""
    source, moved_from = source_uri(source), source_uri(moved_from)
    files = local_tables(store, parent, TABLES, scratch) if parent else {}
    for table in TABLES:
        db.attach(f"stored_{table}", files.get(table, []), SCHEMAS[table])
    db.run(_OLD)
    decoders = dict(parent.decoders) if parent else {}
    if moved_from in decoders and source != moved_from:
        both = source in decoders
        db.insert(
            "renamed", pa.table({"source": [moved_from], "current": pa.array([None if both else source], pa.string())})
        )
        moved = decoders.pop(moved_from)
        decoders = decoders if both else {source: moved, **decoders}
    shards = [shard.sha256 for shard in parent.shards] if parent else []
    db.insert(
        "slots", pa.table({"slot": pa.array(range(len(shards)), pa.int32()), "shard": pa.array(shards, pa.string())})
    )
    return Draft(db, source, parent.labels if parent else (), decoders, parent is None)


def plan(draft: Draft, listing: Listing, *, reread: bool) -> int:
    """Find the files that must be read, and those that wait. Return the number of the former."""
    db = draft.db
    db.run(_ALL_CHANGED if draft.is_new else _CHANGED, source=draft.source, reread=reread)
    db.run(_PENDING)
    _name(db, "left_out", pa.table({"name": pa.array(listing.admission.left_out, pa.string())}))
    db.run(_WAITING, source=draft.source)
    rows = [(rule, name, 1) for rule, note in listing.notes.items() for name in note.names]
    rows += [(rule, None, note.count - len(note.names)) for rule, note in listing.notes.items()]
    noted = pa.Table.from_pylist(
        [dict(zip(("rule", "name", "count"), row, strict=True)) for row in rows if row[2]],
        pa.schema([("rule", pa.string()), ("name", pa.string()), ("count", pa.int64())]),
    )
    _name(db, "listed_notes", noted)
    db.run(_NOTES, source=draft.source)
    return db.value("SELECT count(*) FROM pending")


def _name(db: Database, table: str, rows: ArrowTable) -> None:
    db.create(table, rows.schema)
    db.insert(table, rows)


_TO_DECODE = """
SELECT name, etag, label, given_split, size_bytes FROM pending p ANTI JOIN decoded d USING (name, etag)
ORDER BY turn(given_split, name), name
"""


DECODED_FILES = pa.schema([("name", pa.string()), ("etag", pa.string())])


def to_decode(db: Database, decoded: Iterable[ArrowTable]) -> Iterator[FileEntry]:
    """Yield the pending files in the order of decoding, without those that are ``decoded`` (names
    and etags)."""
    with db.written("decoded", DECODED_FILES) as write:
        for files in decoded:
            write(files)
    return starmap(FileEntry, db.stream(_TO_DECODE))


def sample(db: Database, count: int) -> list[FileEntry]:
    """``count`` of the source's files, in the mixed order of decoding."""
    query = """
        SELECT name, etag, label, given_split, size_bytes FROM listed
        ORDER BY turn(given_split, name) & ((1::BIGINT << 56) - 1), name LIMIT $n
    """
    return list(starmap(FileEntry, db.rows(query, n=count)))


def first_by_name(db: Database, count: int) -> list[FileEntry]:
    query = "SELECT name, etag, label, given_split, size_bytes FROM listed ORDER BY name LIMIT $n"
    return list(starmap(FileEntry, db.rows(query, n=count)))
