"""The ledger of a dataset records every file and every image in SQLite, so that memory use does not
grow with the number of images.

``files`` mirrors the sources. Each row describes one file and contains the digest of the image once
the file is decoded. ``images`` locates each distinct image.
"""

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from evernear.common.frozen import stamp
from evernear.data import ledger_changes
from evernear.data.group_table import GroupTable
from evernear.data.ledger_changes import INDEXES, SCHEMA, members, source_uri, without_journal
from evernear.data.ledger_problems import list_left_out, list_problems
from evernear.data.manifest import Problem, Shard, Split
from evernear.data.preprocess import Resize
from evernear.data.reviewed import ReviewedImages
from evernear.data.sources import FileEntry, NameSample
from evernear.data.sources.names import exported_position
from evernear.data.sqlite import batched, insert_rows, marks, sqlite_errors

# Maximum number of rows per query, because SQLite limits the number of parameters in a statement.
_PAGE = 500
_HELD_OUT: tuple[Split, ...] = ("test", "query", "gallery")
# All files, with names that are unique across sources.
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
_LISTING = """
CREATE TEMP TABLE listing (name TEXT PRIMARY KEY, etag TEXT, label TEXT, given TEXT, size_bytes INTEGER, grp TEXT)
WITHOUT ROWID
"""
"""What the source lists in this ingest."""
_LIST_CHANGED = """
INSERT INTO files (source, name, etag, label, given, size_bytes, grp, turn, pending)
SELECT ?1, l.*, turn(l.name, l.given), 1 FROM listing l LEFT JOIN files f ON f.source = ?1 AND f.name = l.name
WHERE f.fault IS NOT NULL
  OR (f.etag, f.label, f.given, f.size_bytes, f.grp) IS NOT (l.etag, l.label, l.given, l.size_bytes, l.grp)
ON CONFLICT (source, name) DO UPDATE SET
  pending = pending OR fault IS NOT NULL OR etag != excluded.etag,
  digest = CASE WHEN etag = excluded.etag THEN digest END,
  fault = NULL, etag = excluded.etag, label = excluded.label, given = excluded.given,
  size_bytes = excluded.size_bytes, grp = excluded.grp, turn = excluded.turn
"""
_COPIES = (
    "(SELECT digest FROM files GROUP BY digest HAVING COUNT(*) > 1) copies"
    " CROSS JOIN images i ON i.digest = copies.digest"
)
"""The images ``i`` with several files."""


class Ledger:
    """The ledger of one dataset, in a local file. Methods raise `StoreError` if the disk is
    full."""

    def __init__(self, path: Path, source: str, moved_from: str = "") -> None:
        """Open or create it for one ingest of ``source``, whose images were in ``moved_from``."""
        self.is_new = is_new = not path.exists()
        self._db = sqlite3.connect(path, isolation_level=None)
        with sqlite_errors():
            without_journal(self._db)
            self._db.execute("BEGIN")
            if is_new:
                for statement in SCHEMA.split(";\n"):
                    self._db.execute(statement)
            else:
                ledger_changes.track_changes(self._db)
                ledger_changes.track_images(self._db)
            self._db.execute("DELETE FROM stamp")
            self._db.execute("INSERT INTO stamp VALUES (:format, :evernear_version)", stamp())
            self._has_moved = bool(moved_from) and self._move_source(source_uri(moved_from), source_uri(source))
            self._db.execute("INSERT OR IGNORE INTO sources (uri) VALUES (?)", (source_uri(source),))
            row = self._db.execute("SELECT id FROM sources WHERE uri = ?", (source_uri(source),)).fetchone()
            self._source = cast(int, row[0])
            self._db.execute(_NAMED)
            self._db.execute(_NOTED)
            self._db.execute(_LISTING)
            self._db.execute("CREATE TEMP TABLE changes (digest BLOB PRIMARY KEY, slot INTEGER, label INTEGER)")
            self._db.execute("CREATE TEMP TABLE decoded (name TEXT PRIMARY KEY) WITHOUT ROWID")
            self._db.execute("CREATE TEMP TABLE results (name TEXT, digest BLOB, fault TEXT)")
        self.groups = GroupTable(self._db, self._source)
        self.reviewed = ReviewedImages(self._db)
        self.members = partial(members, self._db, self._source)

    def save(self, path: Path) -> None:
        self._index_files()
        with sqlite_errors():
            self._db.execute("COMMIT")
            self._db.execute("VACUUM INTO ?", (str(path),))
            self._db.execute("BEGIN")
            ledger_changes.track_changes(self._db)

    def save_changes(self, path: Path) -> None:
        """Write all changes since it was opened or saved, for `apply_changes`."""
        with sqlite_errors():
            self._db.execute("COMMIT")
            ledger_changes.save(self._db, path)
            self._db.execute("BEGIN")
            ledger_changes.track_changes(self._db)

    def has_changed(self) -> bool:
        with sqlite_errors():
            return self._has_moved or ledger_changes.any_changed(self._db)

    def size_bytes(self) -> int:
        return self._int("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")

    def close(self) -> None:
        self._db.close()

    def other_sources(self) -> list[str]:
        return [row[0] for row in self._all("SELECT uri FROM sources WHERE id != ? ORDER BY id", self._source)]

    def _move_source(self, old: str, new: str) -> bool:
        """Return whether anything changed. If the ledger contains both sources, the images were
        already ingested from the new location, and the files of the old one are deleted."""
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

    def list_files(self, entries: Iterable[FileEntry], in_order: bool = False) -> None:
        """Record files of the source. New, changed and broken files become pending. Pending files
        are decoded in name order if ``in_order`` is set, and otherwise in mixed order. Rows of
        unchanged files are not written, because most files of a large source are unchanged."""
        for page in batched(entries, _PAGE):  # a page at a time, because a source may read from the ledger
            self._many("INSERT OR REPLACE INTO listing VALUES (?, ?, ?, ?, ?, ?)", page)
        self._db.create_function("turn", 2, partial(decode_order, in_order=in_order), deterministic=True)
        self._all(_LIST_CHANGED, self._source)

    def list_decoded(self, rows: Iterable[tuple[str, str, Split | None, bytes]]) -> None:
        for page in batched(rows, _PAGE):
            self._many("INSERT INTO listing (name) VALUES (?)", ((name,) for name, *_ in page))
            self._many(
                "INSERT INTO files (source, name, etag, label, given, size_bytes, grp, turn, pending, digest)"
                " VALUES (?, ?, '', ?, ?, 0, '', 0, 0, ?) ON CONFLICT (source, name) DO UPDATE SET"
                " label = excluded.label, given = excluded.given, pending = 0, digest = excluded.digest",
                ((self._source, *row) for row in page),
            )

    def decoder(self) -> str | None:
        rows = self._all("SELECT decoder FROM decoders WHERE source = ?", self._source)
        return rows[0][0] if rows else None

    def set_decoder(self, decoder: str) -> None:
        self._all("INSERT OR REPLACE INTO decoders VALUES (?, ?)", self._source, decoder)

    def decode_all_again(self) -> None:
        """The `changed_slots` must be rewritten. `removed_splits` and `former_splits` still return
        the splits of these images."""
        self._all(
            "INSERT INTO changes SELECT digest, slot, NULL FROM images"
            " WHERE digest IN (SELECT digest FROM files WHERE source = ?)",
            self._source,
        )
        self._remove_changed()
        self.read_all_again()

    def read_all_again(self) -> None:
        self._all("UPDATE files SET pending = 1 WHERE source = ? AND NOT pending", self._source)

    def note_waiting(self, names: Iterable[str]) -> None:
        """Replace the list of files that wait and were decoded before, so that `evernear forget`
        does not treat their images as removed. Call this before `forget_unlisted`."""
        self._all("CREATE TEMP TABLE left_out (name TEXT PRIMARY KEY)")
        self._many("INSERT OR IGNORE INTO left_out VALUES (?)", ((name,) for name in names))
        self._all(
            "INSERT OR REPLACE INTO waiting SELECT source, name, digest FROM files JOIN left_out USING (name)"
            " WHERE source = ? AND digest IS NOT NULL",
            self._source,
        )
        self._all("DELETE FROM waiting WHERE source = ? AND name NOT IN (SELECT name FROM left_out)", self._source)
        self._all("DROP TABLE left_out")

    def forget_unlisted(self) -> None:
        self._all("DELETE FROM files WHERE source = ? AND name NOT IN (SELECT name FROM listing)", self._source)

    def _index_files(self) -> None:
        """Indexes are sorted faster than filled one file at a time."""
        for index in INDEXES:
            self._all(index)

    def record_notes(self, notes: Mapping[str, NameSample]) -> None:
        self._all("DELETE FROM notes WHERE source = ?", self._source)
        for rule, note in notes.items():
            rows = [(self._source, rule, name, 1) for name in note.names]
            self._many("INSERT INTO notes VALUES (?, ?, ?, ?)", rows)
            if rest := note.count - len(rows):
                self._all("INSERT INTO notes VALUES (?, ?, NULL, ?)", self._source, rule, rest)

    def named_group(self, name: str) -> str:
        """The group that the source specifies for a file, or an empty string."""
        rows = self._all("SELECT grp FROM files WHERE source = ? AND name = ?", self._source, name)
        return rows[0][0] if rows else ""

    def names_groups(self) -> bool:
        return bool(self._all("SELECT 1 FROM files WHERE source = ? AND grp != '' LIMIT 1", self._source))

    def count_listed(self) -> int:
        return self._int("SELECT COUNT(*) FROM files WHERE source = ?", self._source)

    def count_pending(self) -> int:
        # "+" prevents SQLite from reading all files of the source instead of the index of pending
        # files.
        return self._int("SELECT COUNT(*) FROM files WHERE pending AND +source = ?", self._source)

    def pending(self, names: Sequence[str]) -> dict[str, tuple[str, str, Split | None]]:
        """Maps each pending file among ``names`` to its etag, label and explicit split."""
        query = f"SELECT name, etag, label, given FROM files WHERE pending AND source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
        return {row[0]: row[1:] for row in self._all(query, self._source, *names)}

    def note_decoded(self, files: Iterable[tuple[str, str]]) -> None:
        """Exclude pending files from `to_decode`, because a part has decoded them."""
        self._many(
            "INSERT OR IGNORE INTO decoded"
            " SELECT name FROM files WHERE pending AND source = ? AND (name, etag) = (?, ?)",
            ((self._source, *file) for file in files),
        )

    def count_to_decode(self) -> int:
        return self.count_pending() - self._int("SELECT COUNT(*) FROM decoded")

    def to_decode(self) -> Iterator[FileEntry]:
        """Yield the pending files, held-out splits first, in an order that mixes the classes."""
        query = (
            "SELECT name, etag, label, given, size_bytes FROM files"
            " WHERE pending AND source = ? AND name NOT IN (SELECT name FROM decoded) ORDER BY turn, name"
        )
        with sqlite_errors():
            yield from (FileEntry(*row) for row in self._db.execute(query, (self._source,)))

    def in_order(self) -> Iterator[FileEntry]:
        query = (
            "SELECT name, etag, label, given, size_bytes FROM files"
            " WHERE source = ? AND name > ? ORDER BY name LIMIT 64"
        )
        after = ""
        while rows := self._all(query, self._source, after):
            after = rows[-1][0]
            yield from (FileEntry(*row) for row in rows)

    def sample(self, count: int) -> list[FileEntry]:
        """``count`` of the source's files, evenly spaced in name order, or all if it has fewer."""
        query = (
            "SELECT name, etag, label, given, size_bytes FROM"
            " (SELECT *, ROW_NUMBER() OVER (ORDER BY name) - 1 AS number FROM files WHERE source = ?)"
            " WHERE number * ? / ? != (number - 1) * ? / ? OR number = 0"
        )
        total = self.count_listed()
        count = min(count, total)
        return [FileEntry(*row) for row in self._all(query, self._source, count, total, count, total)]

    def record_results(self, images: Iterable[tuple[str, bytes]], failures: Iterable[tuple[str, str | None]]) -> None:
        """Record (name, digest) and (name, fault), for `apply_results`. A file without digest and
        fault is no image. Only broken files are read again although they did not change."""
        with sqlite_errors():
            rows = ((name, bytearray(digest)) for name, digest in images)
            insert_rows(self._db, "results", "(?, ?, NULL)", rows)
            insert_rows(self._db, "results", "(?, NULL, ?)", failures)

    def apply_results(self) -> None:
        """In the order of names, because each result in decoding order would change a different
        page of a large ledger. An image precedes a fault of the same file."""
        self._all(
            "UPDATE files SET pending = 0, digest = result.digest, fault = result.fault"
            " FROM (SELECT name, digest, fault, MAX(digest IS NOT NULL) FROM results GROUP BY name) AS result"
            " WHERE source = ? AND files.name = result.name",
            self._source,
        )
        self._all("DELETE FROM results")

    # Labels

    def labels_listed(self) -> list[str]:
        return [row[0] for row in self._all("SELECT DISTINCT label FROM files")]

    def labels(self) -> list[str]:
        return [row[0] for row in self._all("SELECT name FROM labels ORDER BY id")]

    def add_labels(self, names: Sequence[str]) -> None:
        first = len(self.labels())
        self._many("INSERT INTO labels VALUES (?, ?)", enumerate(names, first))

    # Images

    def stored_digests(self, digests: Sequence[bytes]) -> set[bytes]:
        return {row[0] for row in self._of_digests("SELECT digest FROM images", digests)}

    def removed_splits(self, digests: Sequence[bytes]) -> dict[bytes, Split]:
        return dict(self._of_digests("SELECT digest, split FROM removed", digests)) if self._has_removed() else {}

    def former_splits(self, names: Sequence[str]) -> dict[str, Split]:
        """Maps names of unchanged files that are decoded again to their former splits."""
        if not self._has_removed():
            return {}
        query = (
            f"SELECT name, split FROM files JOIN removed USING (digest) WHERE source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
        )
        return dict(self._all(query, self._source, *names))

    def _has_removed(self) -> bool:
        return bool(self._all("SELECT 1 FROM removed LIMIT 1"))

    def add_images(self, images: Iterable[tuple[bytes, int, int, int, int, int]]) -> None:
        """Each image is (digest, label, slot, width in pixels, height in pixels, flaws)."""
        with sqlite_errors():
            rows = ((bytearray(digest), *columns) for digest, *columns in images)
            insert_rows(self._db, "images", "(?, ?, ?, ?, ?, ?)", rows)

    # Shards

    def shards(self) -> dict[int, Shard]:
        rows = self._all("SELECT slot, shard FROM shards ORDER BY slot")
        return {slot: Shard.from_json(text, "The dataset's ledger") for slot, text in rows}

    def put_shard(self, slot: int, shard: Shard | None) -> None:
        self._all("DELETE FROM shards WHERE slot = ?", slot)
        if shard is not None:
            self._all("INSERT INTO shards VALUES (?, ?)", slot, shard.model_dump_json())

    def lose_shards(self, sha256s: Collection[str]) -> None:
        """The next ingest reads their images again, and assigns them to the same splits."""
        self._all("DELETE FROM changes")
        for slot, shard in self.shards().items():
            if shard.sha256 in sha256s:
                self._all("INSERT INTO changes SELECT digest, slot, NULL FROM images WHERE slot = ?", slot)
        self._remove_changed()
        for slot in self.changed_slots():
            self.put_shard(slot, None)

    def remember_splits(self, digests: Iterable[bytes], split: Split) -> None:
        """Record a split as if the images had been removed, so that they return to it."""
        self._many("INSERT OR REPLACE INTO removed VALUES (?, ?)", ((digest, split) for digest in digests))

    # Comparison of files with shards

    def reconcile(self) -> None:
        """Update ``images`` from the files. The `changed_slots` must be rewritten. An image without
        files is removed. One whose files all have a new label is relabeled. One whose labels
        conflict is removed until they agree.

        In a published ledger, images and files agree, so only touched images are compared. In a new
        ledger, only images with several files may differ.
        """
        self._index_files()
        unreconciled = "images i" if self.is_new else ledger_changes.TOUCHED_IMAGES
        self._all("DELETE FROM changes")
        self._all(
            f"INSERT INTO changes SELECT i.digest, i.slot, NULL FROM {unreconciled}"  # noqa: S608 - our own words
            " WHERE NOT EXISTS (SELECT 1 FROM files WHERE files.digest = i.digest)"
        )
        self._all(
            "INSERT INTO changes SELECT i.digest, i.slot, CASE WHEN COUNT(DISTINCT every.label) = 1 THEN l.id END"  # noqa: S608 - our own words
            f" FROM {_COPIES if self.is_new else unreconciled} CROSS JOIN files f ON f.digest = i.digest"
            " JOIN labels l ON l.name = f.label CROSS JOIN files every ON every.digest = f.digest"
            " WHERE l.id != i.label GROUP BY i.digest"
        )
        self._all("DROP TABLE IF EXISTS relabeled")
        self._all(
            "CREATE TEMP TABLE relabeled AS SELECT i.label AS old, c.label AS new, COUNT(*) AS count"
            " FROM changes c JOIN images i USING (digest) WHERE c.label IS NOT NULL GROUP BY 1, 2"
        )
        self._remove_changed()
        self._all(
            "UPDATE images SET label = c.label FROM changes c WHERE c.digest = images.digest AND c.label IS NOT NULL"
        )
        self._all("DELETE FROM removed WHERE digest IN (SELECT digest FROM images)")

    def swapped_classes(self) -> list[str]:
        """A sentence on each two classes that swapped most images. After `reconcile`."""
        rows = self._all(
            "SELECT a.name, r.count, a.id, b.name, s.count, b.id"
            " FROM relabeled r JOIN relabeled s ON r.old = s.new AND r.new = s.old AND r.old < r.new"
            " JOIN labels a ON a.id = r.old JOIN labels b ON b.id = s.old ORDER BY 1"
        )
        if not rows:
            return []
        former = Counter[int](dict(self._all("SELECT label, COUNT(*) FROM images GROUP BY label")))
        for old, new, count in self._all("SELECT old, new, count FROM relabeled"):
            former[old] += count
            former[new] -= count
        return [
            f"{moved:,} of {former[a]:,} images of {name} are now {other}, and {back:,} of {former[b]:,} of {other} are"
            f" now {name}: these classes seem to have swapped their names"
            for name, moved, a, other, back, b in rows
            if 2 * moved > former[a] and 2 * back > former[b]
        ]

    def _remove_changed(self) -> None:
        self._all("UPDATE files SET pending = 1 WHERE digest IN (SELECT digest FROM changes WHERE label IS NULL)")
        self._all(
            "INSERT OR REPLACE INTO removed SELECT digest, json_extract(shard, '$.split')"
            " FROM changes JOIN shards USING (slot) WHERE label IS NULL"
        )
        self._all("DELETE FROM images WHERE digest IN (SELECT digest FROM changes WHERE label IS NULL)")

    def changed_slots(self) -> list[int]:
        return [row[0] for row in self._all("SELECT DISTINCT slot FROM changes ORDER BY slot")]

    def changes(self, slot: int) -> dict[bytes, int | None]:
        """Maps each changed image in a slot to its new label, or to None if it is removed."""
        return dict(self._all("SELECT digest, label FROM changes WHERE slot = ?", slot))

    def most_are_larger(self, height_px: int, width_px: int) -> bool:
        """Whether most images were larger before they were resized."""
        query = "SELECT 2 * SUM(width > ? AND height > ?) > COUNT(*) FROM images"
        return bool(self._all(query, width_px, height_px)[0][0])

    def problems(self, height_px: int, width_px: int, resize: Resize) -> tuple[list[Problem], dict[str, int]]:
        return list_problems(self._db, self.groups, height_px, width_px, resize)

    def left_out(self) -> Iterator[tuple[str, str]]:
        """Name and reason of each file that was left out, after `problems`."""
        return list_left_out(self._db)

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


def decode_order(name: str, explicit_split: Split | None, in_order: bool) -> int:
    """Held-out splits come first, so an image that is also in ``train`` is held out. Within a
    split: by file name if ``in_order`` is set, and otherwise by its hash, or in the order of an
    export."""
    if in_order:
        mixed = 0
    elif (exported := exported_position(name)) is not None:
        mixed = exported
    else:
        mixed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    rank = _HELD_OUT.index(explicit_split) if explicit_split in _HELD_OUT else len(_HELD_OUT)
    return rank << 56 | mixed
