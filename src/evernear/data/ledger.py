"""The ledger of a dataset records every file and every image in SQLite, so that memory
does not grow with the data.

``files`` mirrors the sources. It has one row per file, with the digest of the image
once decoded. ``images`` locates each distinct image. Problems that involve several
images (duplicates, conflicts) are queries over both tables.
"""

import hashlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

from evernear.common.class_names import class_name
from evernear.data import ledger_changes
from evernear.data.group_table import SCHEMA as GROUPS_SCHEMA
from evernear.data.group_table import GroupTable
from evernear.data.manifest import Problem, Shard, Split
from evernear.data.members import members
from evernear.data.preprocess import Flaw, Resize, choose_resize
from evernear.data.reviewed import SCHEMA as REVIEWED_SCHEMA
from evernear.data.reviewed import ReviewedImages
from evernear.data.sources import FileEntry, NameSample
from evernear.data.sources.names import exported_position
from evernear.data.sqlite import batched, marks, sqlite_errors

# Maximum number of rows of one query, because SQLite limits the parameters of a
# statement.
_PAGE = 500
_CACHE_KIB = 64 * 2**10  # digests are random, so writes are spread over a whole large ledger
# Maximum number of problems of each kind in a manifest. Problems that stop a run have a
# higher limit, because each must be fixed.
_MAX_LISTED = {"undecodable": 1000, "conflicting_labels": 1000}
_MAX_LISTED_OF_OTHERS = 20
_MAX_NAMES = 5
_FLAWS = {
    "constant_image": (Flaw.CONSTANT, "has one value in all its pixels"),
    "low_contrast": (Flaw.FAINT, "lost its contrast when it was reduced to 8 bits"),
    "clipped": (Flaw.CLIPPED, "has values beyond the bit depth of the dataset"),
}
_RESIZED = {"cropped": "crop", "letterboxed": "letterbox", "stretched": "stretch"}
_NOTES = {
    "not_an_image": "is not an image",
    "litter": "is hidden, or left behind by a system or program",
    "no_class": "is in no class folder",
    "merged_folders": "are one class",
    "no_label": "has no label",
    "duplicate_row": "is in several rows",
    "nested_folder": "is the label of the images in these folders",
    "outside_link": "leads out of the source",
}

# Published ledgers have these columns, so renaming a column would need a migration.
# Only earlier versions read ``state`` and ``seen``.
_SCHEMA = """
CREATE TABLE state (run INTEGER NOT NULL);
INSERT INTO state VALUES (0);
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
  seen INTEGER NOT NULL,
  pending INTEGER NOT NULL,  -- 1: to be decoded
  digest BLOB,               -- of its image; NULL while pending, if broken, and if it is no image
  fault TEXT,                -- why it cannot be decoded
  PRIMARY KEY (source, name)
) WITHOUT ROWID;
CREATE INDEX files_by_digest ON files (digest) WHERE digest IS NOT NULL;
CREATE INDEX files_by_turn ON files (source, turn, name) WHERE pending;
CREATE TABLE images (
  digest BLOB PRIMARY KEY,
  label INTEGER NOT NULL,
  slot INTEGER NOT NULL,
  width INTEGER NOT NULL,
  height INTEGER NOT NULL,
  constant INTEGER NOT NULL  -- the image's flaws; once there was only one
) WITHOUT ROWID;
"""

# Files under names that are unique across sources.
_NAMED = """
CREATE TEMP VIEW named AS
SELECT CASE WHEN (SELECT COUNT(*) FROM sources) > 1 THEN uri || '/' || name ELSE name END AS name,
  digest, label, given, fault, pending
FROM files JOIN sources ON sources.id = files.source
"""

# Notes from the listings, and files whose content is not an image.
_NOTED = """
CREATE TEMP VIEW noted AS
SELECT rule, CASE WHEN (SELECT COUNT(*) FROM sources) > 1 THEN uri || '/' || name ELSE name END AS name, count
FROM notes JOIN sources ON sources.id = notes.source
UNION ALL SELECT 'not_an_image', name, 1 FROM named WHERE digest IS NULL AND fault IS NULL AND NOT pending
"""

# Images with more than one file.
_TWINS = """
CREATE TEMP TABLE twins AS
SELECT MIN(name) AS name, digest,
  COUNT(DISTINCT label) AS labels, COUNT(DISTINCT COALESCE(given, '')) AS splits
FROM named
WHERE digest IN (SELECT digest FROM files WHERE digest IS NOT NULL GROUP BY digest HAVING COUNT(*) > 1)
GROUP BY digest
"""

# ``resized`` is called once per size, because most images have the same size.
_SIZES = """
CREATE TEMP TABLE sizes AS
SELECT width, height, resized(width, height) AS resize FROM (SELECT DISTINCT width, height FROM images)
"""


class NewImage(NamedTuple):
    """A row of ``images``."""

    digest: bytes
    label: int
    slot: int
    width_px: int
    height_px: int
    flaws: Flaw


class Ledger:
    """The ledger of one dataset, in a local file. All methods raise `StoreError` if the
    disk is full.
    """

    def __init__(self, path: Path, source: str, moved_from: str = "") -> None:
        """Open or create the ledger for one ingest of ``source``, whose images were
        previously at ``moved_from``.
        """
        is_new = not path.exists()
        self._db = sqlite3.connect(path, isolation_level=None)
        with sqlite_errors():
            _without_journal(self._db)
            self._db.execute("BEGIN")
            if is_new:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
            _add_missing_tables(self._db)
            if not is_new:
                ledger_changes.track_changes(self._db)
            self._has_moved = bool(moved_from) and self._move_source(_source_uri(moved_from), _source_uri(source))
            self._db.execute("INSERT OR IGNORE INTO sources (uri) VALUES (?)", (_source_uri(source),))
            row = self._db.execute("SELECT id FROM sources WHERE uri = ?", (_source_uri(source),)).fetchone()
            self._source = cast(int, row[0])
            self._db.execute(_NAMED)
            self._db.execute(_NOTED)
            self._db.execute("CREATE TEMP TABLE listed (name TEXT PRIMARY KEY) WITHOUT ROWID")
            self._db.execute("CREATE TEMP TABLE changes (digest BLOB PRIMARY KEY, slot INTEGER, label INTEGER)")
            self._db.execute("CREATE TEMP TABLE decoded (name TEXT PRIMARY KEY) WITHOUT ROWID")
        self.groups = GroupTable(self._db, self._source)
        self.reviewed = ReviewedImages(self._db)

    def save(self, path: Path) -> None:
        """Write a compact copy to ``path``."""
        with sqlite_errors():
            self._db.execute("COMMIT")
            self._db.execute("VACUUM INTO ?", (str(path),))
            self._db.execute("BEGIN")
            ledger_changes.track_changes(self._db)

    def save_changes(self, path: Path) -> None:
        """Write the changes since the ledger was opened or last saved to ``path``, for
        `apply_changes`.
        """
        with sqlite_errors():
            self._db.execute("COMMIT")
            ledger_changes.save(self._db, path)
            self._db.execute("BEGIN")
            ledger_changes.track_changes(self._db)

    def has_changed(self) -> bool:
        """Whether anything changed since the ledger was opened or last saved."""
        with sqlite_errors():
            return self._has_moved or ledger_changes.any_changed(self._db)

    def size_bytes(self) -> int:
        """The size of the whole ledger."""
        return self._int("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")

    def close(self) -> None:
        """Close the file. Unpublished changes are lost."""
        self._db.close()

    def other_sources(self) -> list[str]:
        """The other sources of the dataset."""
        return [row[0] for row in self._all("SELECT uri FROM sources WHERE id != ? ORDER BY id", self._source)]

    def _move_source(self, old: str, new: str) -> bool:
        """Move the files of one source to a different source, and return whether
        anything changed.

        If both sources have files, because the images were already ingested from the
        new location, the old files are deleted.
        """
        (both,) = self._db.execute("SELECT COUNT(*) FROM sources WHERE uri IN (?, ?)", (old, new)).fetchone()
        if old == new or not self._db.execute("SELECT 1 FROM sources WHERE uri = ?", (old,)).fetchone():
            return False
        if both == 2:
            self._db.execute("DELETE FROM files WHERE source = (SELECT id FROM sources WHERE uri = ?)", (old,))
            self._db.execute("DELETE FROM sources WHERE uri = ?", (old,))
        else:
            self._db.execute("UPDATE sources SET uri = ? WHERE uri = ?", (new, old))
        return True

    # Files

    def members(self, file: str, etag: str) -> Iterator[FileEntry]:
        """The images in an unchanged packed file, see `evernear.data.members`."""
        return members(self._db, self._source, file, etag)

    def list_files(self, entries: Iterable[FileEntry], in_order: bool = False) -> None:
        """Record files of the source. New, changed and broken files become pending.
        They are decoded ``in_order`` or in mixed order.

        Rows of unchanged files are not written, because most files of a large source
        are unchanged.
        """
        for page in batched(entries, _PAGE):
            names = [entry.name for entry in page]
            self._note_listed(names)
            query = "SELECT name, etag, label, given, size_bytes FROM files WHERE source = ? AND fault IS NULL"
            unchanged = set(self._all(f"{query} AND name IN ({marks(names)})", self._source, *names))
            self._many(
                "INSERT INTO files (source, name, etag, label, given, size_bytes, turn, seen, pending)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 0, 1) ON CONFLICT (source, name) DO UPDATE SET"
                " pending = pending OR fault IS NOT NULL OR etag != excluded.etag,"
                " digest = CASE WHEN etag = excluded.etag THEN digest END,"
                " fault = NULL, etag = excluded.etag, label = excluded.label, given = excluded.given,"
                " size_bytes = excluded.size_bytes, turn = excluded.turn",
                ((self._source, *entry, decode_order(entry, in_order)) for entry in page if entry not in unchanged),
            )

    def list_decoded(self, rows: Iterable[tuple[str, str, Split | None, bytes]]) -> None:
        """Record decoded images as (name, label, explicit split, digest)."""
        for page in batched(rows, _PAGE):
            self._note_listed(name for name, *_ in page)
            self._many(
                "INSERT INTO files (source, name, etag, label, given, size_bytes, turn, seen, pending, digest)"
                " VALUES (?, ?, '', ?, ?, 0, 0, 0, 0, ?) ON CONFLICT (source, name) DO UPDATE SET"
                " label = excluded.label, given = excluded.given, pending = 0, digest = excluded.digest",
                ((self._source, *row) for row in page),
            )

    def decoder(self) -> str | None:
        """The code that decoded the source's images, as `set_decoder` recorded it, or
        None before the first ingest.
        """
        rows = self._all("SELECT decoder FROM decoders WHERE source = ?", self._source)
        return rows[0][0] if rows else None

    def set_decoder(self, decoder: str) -> None:
        """Record the code that decodes the source's images."""
        self._all("INSERT OR REPLACE INTO decoders VALUES (?, ?)", self._source, decoder)

    def decode_all_again(self) -> None:
        """Remove all images of the source so that they are decoded and stored again.
        The `changed_slots` must be rewritten.

        `removed_splits` and `former_splits` remember the splits of the images, as for
        removed images.
        """
        self._all(
            "INSERT INTO changes SELECT digest, slot, NULL FROM images"
            " WHERE digest IN (SELECT digest FROM files WHERE source = ?)",
            self._source,
        )
        self._remove_changed()
        self.read_all_again()

    def read_all_again(self) -> None:
        """Make all files of the source pending."""
        self._all("UPDATE files SET pending = 1 WHERE source = ?", self._source)

    def forget_unlisted(self) -> None:
        """Delete files that the source no longer lists."""
        query = "DELETE FROM files WHERE source = ? AND name NOT IN (SELECT name FROM listed)"
        self._all(query, self._source)

    def _note_listed(self, names: Iterable[str]) -> None:
        self._many("INSERT OR IGNORE INTO listed VALUES (?)", ((name,) for name in names))

    def record_empty_folders(self, names: Iterable[str]) -> None:
        """Replace the list of class folders without an image."""
        self._all("DELETE FROM empty_folders WHERE source = ?", self._source)
        self._many("INSERT INTO empty_folders VALUES (?, ?)", ((self._source, name) for name in names))

    def record_hidden_folders(self, names: Iterable[str]) -> None:
        """Replace the list of class folders that are ignored because their names begin
        with a dot.
        """
        self._all("DELETE FROM hidden_folders WHERE source = ?", self._source)
        self._many("INSERT INTO hidden_folders VALUES (?, ?)", ((self._source, name) for name in names))

    def record_notes(self, notes: Mapping[str, NameSample]) -> None:
        """Replace the notes of the source's listing."""
        self._all("DELETE FROM notes WHERE source = ?", self._source)
        for rule, note in notes.items():
            rows = [(self._source, rule, name, 1) for name in note.names]
            self._many("INSERT INTO notes VALUES (?, ?, ?, ?)", rows)
            if rest := note.count - len(rows):
                self._all("INSERT INTO notes VALUES (?, ?, NULL, ?)", self._source, rule, rest)

    def count_listed(self) -> int:
        """The number of files that the source lists."""
        return self._int("SELECT COUNT(*) FROM files WHERE source = ?", self._source)

    def count_pending(self) -> int:
        """The number of files that are not in the dataset yet,
        or have changed since.
        """
        return self._int("SELECT COUNT(*) FROM files WHERE pending AND source = ?", self._source)

    def pending(self, names: Sequence[str]) -> dict[str, FileEntry]:
        """The pending files among ``names``, at most 500, as currently listed."""
        query = "SELECT name, etag, label, given, size_bytes FROM files WHERE pending AND source = ?"
        rows = self._all(f"{query} AND name IN ({marks(names)})", self._source, *names)
        return {row[0]: FileEntry(*row) for row in rows}

    def note_decoded(self, files: Iterable[tuple[str, str]]) -> None:
        """Exclude pending files with these names and etags from `to_decode`, because a
        part has decoded them.
        """
        self._many(
            "INSERT OR IGNORE INTO decoded"
            " SELECT name FROM files WHERE pending AND source = ? AND (name, etag) = (?, ?)",
            ((self._source, *file) for file in files),
        )

    def count_to_decode(self) -> int:
        """The number of files that `to_decode` yields."""
        return self.count_pending() - self._int("SELECT COUNT(*) FROM decoded")

    def to_decode(self, page: int) -> Iterator[FileEntry]:
        """Yield the pending files that no part has decoded, held-out splits first, in
        an order that mixes the classes.
        """
        after: tuple[int, str] = (-1, "")
        query = (
            # Without the index, each page would sort all pending files.
            "SELECT name, etag, label, given, size_bytes, turn FROM files INDEXED BY files_by_turn"
            " WHERE pending AND source = ? AND (turn, name) > (?, ?) AND name NOT IN (SELECT name FROM decoded)"
            " ORDER BY turn, name LIMIT ?"
        )
        while rows := self._all(query, self._source, *after, page):
            after = (rows[-1][5], rows[-1][0])
            yield from (FileEntry(*row[:5]) for row in rows)

    def in_order(self) -> Iterator[FileEntry]:
        """Yield the source's files, sorted by name."""
        query = (
            "SELECT name, etag, label, given, size_bytes FROM files"
            " WHERE source = ? AND name > ? ORDER BY name LIMIT 64"
        )
        after = ""
        while rows := self._all(query, self._source, after):
            after = rows[-1][0]
            yield from (FileEntry(*row) for row in rows)

    def sample(self, count: int) -> list[FileEntry]:
        """Return ``count`` of the source's files, evenly spaced in name order, or all
        files if the source has fewer.
        """
        query = (
            "SELECT name, etag, label, given, size_bytes FROM"
            " (SELECT *, ROW_NUMBER() OVER (ORDER BY name) - 1 AS number FROM files WHERE source = ?)"
            " WHERE number * ? / ? != (number - 1) * ? / ? OR number = 0"
        )
        total = self.count_listed()
        count = min(count, total)
        return [FileEntry(*row) for row in self._all(query, self._source, count, total, count, total)]

    def record_results(self, decoded: Iterable[tuple[str, bytes | None, str | None]]) -> None:
        """Record results of decoding as (name, digest or None, fault or None). A file
        with neither is not an image.

        The next ingest reads broken files again, but reads other files only if they
        change.
        """
        self._many(
            "UPDATE files SET pending = 0, digest = ?, fault = ? WHERE source = ? AND name = ?",
            ((digest, fault, self._source, name) for name, digest, fault in decoded),
        )

    # Labels

    def labels_listed(self) -> list[str]:
        """The distinct labels of all files."""
        return [row[0] for row in self._all("SELECT DISTINCT label FROM files")]

    def normalize_labels(self) -> None:
        """Rename classes that an earlier version recorded with a different spelling,
        for the files of all sources.
        """
        for label in self.labels_listed():
            if label != class_name(label):
                self._all("UPDATE files SET label = ? WHERE label = ?", class_name(label), label)

    def labels(self) -> list[str]:
        """The labels, sorted by number."""
        return [row[0] for row in self._all("SELECT name FROM labels ORDER BY id")]

    def add_labels(self, names: Sequence[str]) -> None:
        """Append labels."""
        first = len(self.labels())
        self._many("INSERT INTO labels VALUES (?, ?)", enumerate(names, first))

    # Images

    def stored_digests(self, digests: Sequence[bytes]) -> set[bytes]:
        """The ``digests`` whose images are in a shard."""
        return {row[0] for row in self._of_digests("SELECT digest FROM images", digests)}

    def removed_splits(self, digests: Sequence[bytes]) -> dict[bytes, Split]:
        """Maps each of ``digests`` whose image was removed to its former split."""
        return dict(self._of_digests("SELECT digest, split FROM removed", digests))

    def former_splits(self, names: Sequence[str]) -> dict[str, Split]:
        """Maps each of ``names``, at most 500, whose unchanged file is decoded again to
        its former split.
        """
        query = (
            f"SELECT name, split FROM files JOIN removed USING (digest) WHERE source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
        )
        return dict(self._all(query, self._source, *names))

    def add_images(self, images: Iterable[NewImage]) -> None:
        """Record images that were written to a shard."""
        self._many("INSERT INTO images VALUES (?, ?, ?, ?, ?, ?)", images)

    # Shards

    def shards(self) -> dict[int, Shard]:
        """The shards for each slot. A later ingest may replace the shard in a slot."""
        rows = self._all("SELECT slot, shard FROM shards ORDER BY slot")
        return {slot: Shard.from_json(text, "The dataset's ledger") for slot, text in rows}

    def put_shard(self, slot: int, shard: Shard | None) -> None:
        """Set the shard in a slot. None empties the slot."""
        self._all("DELETE FROM shards WHERE slot = ?", slot)
        if shard is not None:
            self._all("INSERT INTO shards VALUES (?, ?)", slot, shard.model_dump_json())

    def lose_shards(self, sha256s: Collection[str]) -> None:
        """Remove lost shards and their images, so that the next ingest reads the images
        from the source again into the same splits.
        """
        self._all("DELETE FROM changes")
        for slot, shard in self.shards().items():
            if shard.sha256 in sha256s:
                self._all("INSERT INTO changes SELECT digest, slot, NULL FROM images WHERE slot = ?", slot)
        self._remove_changed()
        for slot in self.changed_slots():
            self.put_shard(slot, None)

    def remember_splits(self, digests: Iterable[bytes], split: Split) -> None:
        """Record the split of images as if the images had been removed, so that they
        return to this split.
        """
        self._many("INSERT OR REPLACE INTO removed VALUES (?, ?)", ((digest, split) for digest in digests))

    # Comparison of files with shards

    def reconcile(self) -> None:
        """Update ``images`` from the files. The `changed_slots` must be rewritten.

        An image without files is removed. An image whose files all have a new label is
        relabeled. An image whose files have conflicting labels is removed until the
        labels agree, and is then decoded again.
        """
        self._all("DELETE FROM changes")
        self._all(
            "INSERT INTO changes SELECT digest, slot, NULL FROM images"
            " WHERE NOT EXISTS (SELECT 1 FROM files WHERE files.digest = images.digest)"
        )
        self._all(
            "INSERT INTO changes"
            " SELECT i.digest, i.slot, CASE WHEN COUNT(DISTINCT every.label) = 1 THEN l.id END"
            " FROM files f JOIN images i ON i.digest = f.digest JOIN labels l ON l.name = f.label"
            " JOIN files every ON every.digest = f.digest WHERE l.id != i.label GROUP BY i.digest"
        )
        self._all("DROP TABLE IF EXISTS relabeled")
        self._all(
            "CREATE TEMP TABLE relabeled AS SELECT i.label AS old, c.label AS new, COUNT(*) AS count"
            " FROM images i LEFT JOIN changes c USING (digest) WHERE c.digest IS NULL OR c.label IS NOT NULL"
            " GROUP BY 1, 2"
        )
        self._remove_changed()
        self._all(
            "UPDATE images SET label = c.label FROM changes c WHERE c.digest = images.digest AND c.label IS NOT NULL"
        )
        self._all("DELETE FROM removed WHERE digest IN (SELECT digest FROM images)")

    def swapped_classes(self) -> list[str]:
        """A sentence about each pair of classes that exchanged most of their images.
        Call this after `reconcile`.
        """
        rows = self._all(
            "SELECT a.name, r.count, (SELECT SUM(count) FROM relabeled WHERE old = r.old),"
            " b.name, s.count, (SELECT SUM(count) FROM relabeled WHERE old = s.old)"
            " FROM relabeled r JOIN relabeled s ON r.old = s.new AND r.new = s.old AND r.old < r.new"
            " JOIN labels a ON a.id = r.old JOIN labels b ON b.id = s.old ORDER BY 1"
        )
        return [
            f"{moved:,} of {of:,} images of {a} are now {b}, and {back:,} of {total:,} of {b} are now {a}: these "
            "classes seem to have swapped their names"
            for a, moved, of, b, back, total in rows
            if 2 * moved > of and 2 * back > total
        ]

    def _remove_changed(self) -> None:
        """Remove the images that have no label in ``changes``, and remember their
        splits.
        """
        self._all("UPDATE files SET pending = 1 WHERE digest IN (SELECT digest FROM changes WHERE label IS NULL)")
        self._all(
            "INSERT OR REPLACE INTO removed SELECT digest, json_extract(shard, '$.split')"
            " FROM changes JOIN shards USING (slot) WHERE label IS NULL"
        )
        self._all("DELETE FROM images WHERE digest IN (SELECT digest FROM changes WHERE label IS NULL)")

    def changed_slots(self) -> list[int]:
        """The slots of the changed images. Call this after `reconcile` or
        `decode_all_again`.
        """
        return [row[0] for row in self._all("SELECT DISTINCT slot FROM changes ORDER BY slot")]

    def changes(self, slot: int) -> dict[bytes, int | None]:
        """Maps each changed image in a slot to its new label, or to None if it is
        removed. Call this after `reconcile` or `decode_all_again`.
        """
        return dict(self._all("SELECT digest, label FROM changes WHERE slot = ?", slot))

    # Problems

    def problems(self, height_px: int, width_px: int, resize: Resize) -> tuple[list[Problem], dict[str, int]]:
        """Return some problems of each kind, and the total counts, for a dataset with
        images of this size.
        """

        def resized(width: int, height: int) -> str | None:
            return choose_resize((width, height), height_px, width_px, resize)

        with sqlite_errors():
            self._db.create_function("resized", 2, resized, deterministic=True)
        self._all(_SIZES)
        problems: list[Problem] = []
        counts: dict[str, int] = {}
        self._all(_TWINS)
        for kind, query, values in self._problem_queries(height_px, width_px):
            count = self._int(f"SELECT COUNT(*) FROM ({query})", *values)  # noqa: S608 - our own words
            if count:
                counts[kind] = count
            limit = _MAX_LISTED.get(kind, _MAX_LISTED_OF_OTHERS)
            for name, digest, text in self._all(f"{query} ORDER BY 1 LIMIT {limit}", *values):
                names = self._names(name, digest)
                detail = text if kind == "undecodable" else f"{', '.join(names)} {text}."
                problems.append(Problem(kind=kind, names=names, detail=detail))
        for kind, names, count, text in self.groups.problems(_MAX_LISTED_OF_OTHERS):
            counts[kind] = count
            problems += [Problem(kind=kind, names=(name,), detail=f"{name} {text}.") for name in names]
        for rule, count in self._all("SELECT rule, SUM(count) FROM noted GROUP BY rule ORDER BY rule"):
            counts[rule] = count
            query = "SELECT name FROM noted WHERE rule = ? AND name IS NOT NULL ORDER BY name LIMIT ?"
            for (name,) in self._all(query, rule, _MAX_LISTED_OF_OTHERS):
                problems.append(Problem(kind=rule, names=(name,), detail=f"{name} {_NOTES[rule]}."))
        return problems, counts

    def _problem_queries(self, height_px: int, width_px: int) -> Iterator[tuple[str, str, tuple[object, ...]]]:
        """Yield the kind of problem, a query, and the query's values. The query returns
        (name, digest if several files share it, description).
        """
        yield "undecodable", "SELECT name, NULL, fault FROM named WHERE fault IS NOT NULL", ()
        no_image = "'contains no image'"
        unusable = f"SELECT label, NULL, {no_image} FROM files GROUP BY label HAVING COUNT(digest) = 0"  # noqa: S608 - our own words
        yield "tiny_class", f"SELECT name, NULL, {no_image} FROM empty_folders UNION {unusable}", ()  # noqa: S608
        hidden = "'begins with a dot, so its images were left out'"
        yield "hidden_folder", f"SELECT name, NULL, {hidden} FROM hidden_folders", ()  # noqa: S608 - our own words
        twins = "SELECT name, digest, {} FROM twins WHERE {}"
        yield "conflicting_labels", twins.format("'are copies of one image under several labels'", "labels > 1"), ()
        across = twins.format("'are copies of one image in several splits'", "labels = 1 AND splits > 1")
        yield "duplicate_across_splits", across, ()
        yield "duplicate", twins.format("'are one image'", "labels = 1 AND splits = 1"), ()
        name = "(SELECT MIN(name) FROM named WHERE named.digest = images.digest)"
        for kind, (flaw, text) in _FLAWS.items():
            yield kind, f"SELECT {name}, NULL, '{text}' FROM images WHERE constant & ?", (int(flaw),)  # noqa: S608
        size = f"SELECT {name}, NULL, 'has ' || width || ' x ' || height || ' pixels' FROM images"  # noqa: S608
        for problem, kind in _RESIZED.items():
            yield problem, f"{size} JOIN sizes USING (width, height) WHERE resize = ?", (kind,)
        yield "upscaled", f"{size} WHERE width < ? OR height < ?", (width_px, height_px)

    def _names(self, name: str, digest: bytes | None) -> tuple[str, ...]:
        if digest is None:
            return (name,)
        query = "SELECT name FROM named WHERE digest = ? ORDER BY name LIMIT ?"
        return tuple(row[0] for row in self._all(query, digest, _MAX_NAMES))

    # SQLite

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite_errors():
            return self._db.execute(query, values).fetchall()

    def _of_digests(self, query: str, digests: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
        for page in batched(digests, _PAGE):
            yield from self._all(f"{query} WHERE digest IN ({marks(page)})", *page)

    def _int(self, query: str, *values: object) -> int:
        return cast(int, self._all(query, *values)[0][0])

    def _many(self, query: str, rows: Iterable[Sequence[object]]) -> None:
        with sqlite_errors():
            self._db.executemany(query, rows)


def apply_changes(ledger: Path, changes: Path) -> None:
    """Apply a file from `Ledger.save_changes` to a copy of the ledger that the changes
    belong to.

    Raises:
        StoreError: a file cannot be read or written.
    """
    with sqlite_errors(), closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        _without_journal(db)
        _add_missing_tables(db)
        ledger_changes.apply_row_changes(db, changes)


def stored_digests(ledger: Path) -> list[bytes]:
    """The digests of all images in the shards that a ledger lists.

    Raises:
        StoreError: the file cannot be read.
    """
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        return [row[0] for row in db.execute("SELECT digest FROM images")]


def read_slot(ledger: Path, slot: int) -> dict[bytes, tuple[int, list[tuple[str, FileEntry]]]]:
    """Maps the digests of a slot's images, in decoding order, to the label number and
    the files with their sources.

    Raises:
        StoreError: the ledger cannot be read.
    """
    query = (
        "SELECT i.digest, i.label, uri, name, etag, f.label, given, size_bytes FROM images i"
        " JOIN files f ON f.digest = i.digest JOIN sources s ON s.id = f.source WHERE slot = ? ORDER BY turn, name"
    )
    images: dict[bytes, tuple[int, list[tuple[str, FileEntry]]]] = {}
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        for digest, label, uri, *entry in db.execute(query, (slot,)):
            images.setdefault(digest, (label, []))[1].append((uri, FileEntry(*entry)))
    return images


def find_slot(ledger: Path, sha256: str) -> int | None:
    """The slot of a shard, or None if the ledger does not name the shard.

    Raises:
        StoreError: the ledger cannot be read.
    """
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        query = "SELECT slot FROM shards WHERE json_extract(shard, '$.sha256') = ?"
        row = db.execute(query, (sha256,)).fetchone()
    return row[0] if row else None


def decoders(ledger: Path) -> list[tuple[str, str]]:
    """The code that decoded the images of each source,
    as `Ledger.set_decoder` recorded it.

    Raises:
        StoreError: the ledger cannot be read.
    """
    with sqlite_errors(), closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        _add_missing_tables(db)
        return db.execute("SELECT source, decoder FROM decoders ORDER BY source").fetchall()


def save_compact(ledger: Path, path: Path) -> None:
    """Write a compact ledger to ``path``, without deleted rows and without the splits,
    groups and reviews of removed images.

    Raises:
        StoreError: a file cannot be read or written.
    """
    with sqlite_errors(), closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        _without_journal(db)
        _add_missing_tables(db)
        db.execute("DELETE FROM removed")
        for table in ("groups", "reviewed"):
            db.execute(f"DELETE FROM {table} WHERE digest NOT IN (SELECT digest FROM images)")  # noqa: S608 - our own words
        db.execute("VACUUM INTO ?", (str(path),))


def _without_journal(db: sqlite3.Connection) -> None:
    """Turn off the journal, because the file is a scratch copy until it is
    published.
    """
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")


def _add_missing_tables(db: sqlite3.Connection) -> None:
    """Add the tables that ledgers from earlier versions lack."""
    db.execute("CREATE TABLE IF NOT EXISTS hidden_folders (source INTEGER NOT NULL, name TEXT NOT NULL)")
    db.execute("CREATE TABLE IF NOT EXISTS decoders (source INTEGER PRIMARY KEY, decoder TEXT NOT NULL)")
    db.execute("CREATE TABLE IF NOT EXISTS removed (digest BLOB PRIMARY KEY, split TEXT NOT NULL) WITHOUT ROWID")
    db.execute(GROUPS_SCHEMA)
    db.execute(REVIEWED_SCHEMA)
    # A row without a name has the count of the names that are not listed.
    columns = "source INTEGER NOT NULL, rule TEXT NOT NULL, name TEXT, count INTEGER NOT NULL"
    db.execute(f"CREATE TABLE IF NOT EXISTS notes ({columns})")


class ReadFile(NamedTuple):
    """A file as it was last read. Without a digest, the file is broken or not an
    image.
    """

    etag: str
    size_bytes: int
    digest: bytes | None


class PublishedLedger:
    """The files of one source in a published, immutable ledger. Close the object after
    use.
    """

    def __init__(self, path: Path, source: str) -> None:
        with sqlite_errors():
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            row = self._db.execute("SELECT id FROM sources WHERE uri = ?", (_source_uri(source),)).fetchone()
        self._source = row[0] if row else None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def count(self) -> int:
        """The number of files, or 0 if the dataset does not have this source."""
        with sqlite_errors():
            query = "SELECT COUNT(*) FROM files WHERE source = ?"
            return cast(int, self._db.execute(query, (self._source,)).fetchone()[0])

    def members(self, file: str, etag: str) -> Iterator[FileEntry]:
        """The images in an unchanged packed file, see `evernear.data.members`."""
        return members(self._db, self._source, file, etag)

    def listed(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Maps the ``names``, at most 500, that the ledger contains to etag and label,
        including broken files.
        """
        query = f"SELECT name, etag, label FROM files WHERE source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
        with sqlite_errors():
            rows = self._db.execute(query, (self._source, *names)).fetchall()
        return {name: (etag, class_name(label)) for name, etag, label in rows}

    def as_read(self, names: Sequence[str]) -> dict[str, ReadFile]:
        """Maps the ``names``, at most 500, that were read to the file as last read."""
        query = (
            f"SELECT name, etag, size_bytes, digest FROM files WHERE source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
            " AND (digest IS NOT NULL OR NOT pending)"
        )
        with sqlite_errors():
            return {name: ReadFile(*row) for name, *row in self._db.execute(query, (self._source, *names))}

    def image_labels(self, digests: Sequence[bytes]) -> dict[bytes, str]:
        """Maps the ``digests``, at most 500, whose images are in the snapshot to
        labels.
        """
        query = f"SELECT digest, name FROM images JOIN labels ON id = label WHERE digest IN ({marks(digests)})"  # noqa: S608 - question marks only
        with sqlite_errors():
            return {digest: class_name(label) for digest, label in self._db.execute(query, tuple(digests))}

    def own_classes(self) -> dict[str, int]:
        """The number of the source's files in each class that has images from no other
        source.
        """
        query = (
            "SELECT label, COUNT(*) FROM files WHERE source = ? AND digest IS NOT NULL AND label NOT IN"
            " (SELECT label FROM files WHERE source != ? AND digest IS NOT NULL) GROUP BY label"
        )
        with sqlite_errors():
            return {class_name(label): count for label, count in self._db.execute(query, (self._source, self._source))}

    def names(self, digests: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        """Maps each of ``digests``, at most 500, to the names of its files."""
        query = f"SELECT digest, name FROM files WHERE source = ? AND digest IN ({marks(digests)}) ORDER BY name"  # noqa: S608 - question marks only
        names: dict[bytes, tuple[str, ...]] = {}
        with sqlite_errors():
            for digest, name in self._db.execute(query, (self._source, *digests)):
                names[digest] = (*names.get(digest, ()), name)
        return names


def _source_uri(source: str) -> str:
    """Normalize a source URI, because ``s3://bucket/prefix/`` and
    ``s3://bucket/prefix`` are the same source.
    """
    return source.rstrip("/")


def decode_order(entry: FileEntry, in_order: bool) -> int:
    """The decoding sort key of an image. Held-out splits come first, so an image that
    is also in ``train`` is held out.

    Within a split, images are sorted by a hash of the name, or by name if ``in_order``.
    Exported images keep their order.
    """
    if in_order:
        mixed = 0
    elif (exported := exported_position(entry.name)) is not None:
        mixed = exported
    else:
        mixed = int.from_bytes(hashlib.sha256(entry.name.encode()).digest()[:7])
    held_out = ("test", "query", "gallery")
    rank = held_out.index(entry.explicit_split) if entry.explicit_split in held_out else len(held_out)
    return rank << 56 | mixed
