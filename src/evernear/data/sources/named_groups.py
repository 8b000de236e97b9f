"""The groups that packed files name for their images, as recorded in a ledger. The ledger remembers
these groups, because an unchanged file is not opened again."""

import sqlite3
from collections.abc import Mapping

from evernear.data.sqlite import sqlite_errors

SCHEMA = (
    "CREATE TABLE named_groups (source INTEGER NOT NULL, name TEXT NOT NULL, grp TEXT NOT NULL,"
    " PRIMARY KEY (source, name)) WITHOUT ROWID"
)


class NamedGroups:
    """The groups that the packed files of one source name. ``source`` is the number of the source
    in the ledger ``db``."""

    def __init__(self, db: sqlite3.Connection, source: int) -> None:
        self._db, self._source = db, source

    def record(self, file: str, groups: Mapping[str, str]) -> None:
        """Replace the groups of the images in ``file``. ``groups`` maps the name of each image to
        its group, or to an empty string if the image has no group."""
        rows = ((self._source, name, group) for name, group in groups.items() if group)
        with sqlite_errors():
            self._db.execute(
                "DELETE FROM named_groups WHERE source = ? AND name > ? AND name < ?",
                (self._source, f"{file}/", f"{file}0"),  # the character after the slash
            )
            self._db.executemany("INSERT INTO named_groups VALUES (?, ?, ?)", rows)

    def forget_unlisted(self) -> None:
        with sqlite_errors():
            self._db.execute(
                "DELETE FROM named_groups WHERE NOT EXISTS"
                " (SELECT 1 FROM files WHERE (files.source, files.name) = (named_groups.source, named_groups.name))"
            )

    def of(self, name: str) -> str:
        query = "SELECT grp FROM named_groups WHERE source = ? AND name = ?"
        with sqlite_errors():
            row = self._db.execute(query, (self._source, name)).fetchone()
        return row[0] if row else ""

    def is_empty(self) -> bool:
        query = "SELECT 1 FROM named_groups WHERE source = ? LIMIT 1"
        with sqlite_errors():
            return self._db.execute(query, (self._source,)).fetchone() is None
