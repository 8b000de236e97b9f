"""The images in a packed file (`evernear.data.sources.packed`), as recorded in a ledger."""

import sqlite3
from collections.abc import Iterator

from evernear.data.sources.base import FileEntry
from evernear.data.sqlite import sqlite_errors

_PAGE = 500


def members(db: sqlite3.Connection, source: int | None, file: str, etag: str) -> Iterator[FileEntry]:
    """If ``file`` had the given ``etag`` in its last listing, yield the images in the file, sorted
    by name. Otherwise yield nothing."""
    query = (
        "SELECT name, etag, label, given, size_bytes FROM files"
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
