"""Compare the listing of a source with the files in the ledger of its dataset. Most files of a
large source are unchanged, and most sources list their files sorted by name. A page of such a
listing is compared with one range of the ledger, without a lookup for each name."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import lt
from typing import Any

from evernear.data.sources.base import FileEntry
from evernear.data.sqlite import marks, sqlite_errors

PAGE_NAMES = 500
"""Maximum number of names in a page, because SQLite limits the number of parameters in a
statement."""
_MAX_ROWS = 4 * PAGE_NAMES
# A broken file counts as changed, so that it is decoded again.
_ROWS = "SELECT name, CASE WHEN fault IS NULL THEN etag END, label, given, size_bytes, grp FROM files WHERE source = ?"


class ListedFiles:
    """The files that a source has listed so far in this ingest.

    Pages whose names follow all earlier names divide the ledger into ranges. Files that are in a
    range but not in its page are in the table ``unlisted``. They may be in a later page that is out
    of order. The names of such pages are in the table ``listed``.
    """

    def __init__(self, db: sqlite3.Connection, source: int) -> None:
        self._db, self._source = db, source
        self._last = ""
        for table in ("listed", "unlisted"):
            db.execute(f"CREATE TEMP TABLE {table} (name TEXT PRIMARY KEY) WITHOUT ROWID")

    def changed(self, page: Sequence[FileEntry]) -> list[FileEntry]:
        """List a page, and return its files that are new, changed or broken."""
        names = [entry.name for entry in page]
        if not all(map(lt, chain((self._last,), names), names)):
            self.note(names)
            return _difference(page, self._rows_of(names))
        start, self._last = self._last, names[-1]
        rows = self._all(f"{_ROWS} AND name > ? AND name <= ? ORDER BY name LIMIT {_MAX_ROWS}", start, self._last)
        if len(rows) == _MAX_ROWS:
            self._all(
                "INSERT OR IGNORE INTO unlisted SELECT name FROM files WHERE source = ? AND name > ? AND name <= ?",
                start,
                self._last,
            )
            self.note(names)
            return _difference(page, self._rows_of(names))
        if rows == page:
            return []
        self._insert("unlisted", {row[0] for row in rows}.difference(names))
        return _difference(page, rows)

    def note(self, names: Iterable[str]) -> None:
        self._insert("listed", names)

    def forget_others(self) -> None:
        self._all(
            "DELETE FROM files WHERE source = ? AND name IN (SELECT name FROM unlisted EXCEPT SELECT name FROM listed)"
        )
        self._all(
            "DELETE FROM files WHERE source = ? AND name > ? AND name NOT IN (SELECT name FROM listed)", self._last
        )

    def _rows_of(self, names: Sequence[str]) -> list[tuple[Any, ...]]:
        return self._all(f"{_ROWS} AND name IN ({marks(names)})", *names)

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite_errors():
            return self._db.execute(query, (self._source, *values)).fetchall()

    def _insert(self, table: str, names: Iterable[str]) -> None:
        with sqlite_errors():
            self._db.executemany(f"INSERT OR IGNORE INTO {table} VALUES (?)", ((name,) for name in names))  # noqa: S608 - our own words


def _difference(page: Sequence[FileEntry], rows: Iterable[tuple[Any, ...]]) -> list[FileEntry]:
    known = {row[0]: row for row in rows}
    return [entry for entry in page if known.get(entry.name) != entry]


_PAGE = 500


def members(db: sqlite3.Connection, source: int | None, file: str, etag: str) -> Iterator[FileEntry]:
    """If ``file`` had the given ``etag`` in its last listing, yield the images in the file, sorted
    by name. Otherwise yield nothing."""
    query = (
        "SELECT name, etag, label, given, size_bytes, grp FROM files"
        " WHERE source = ? AND name > ? AND name < ? ORDER BY name LIMIT ?"
    )
    after, end = f"{file}/", f"{file}0"  # the character after the slash
    while True:
        with sqlite_errors():  # a page at a time, because the caller writes to the table
            rows = db.execute(query, (source, after, end, _PAGE)).fetchall()
        if not rows or any(row[1] != etag for row in rows):
            return
        after = rows[-1][0]
        yield from (FileEntry(*row) for row in rows)
