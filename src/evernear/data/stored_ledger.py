"""Read and change ledgers in files, outside of an ingest."""

import lzma
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, cast

from evernear.common.disk import disk_errors
from evernear.data import ledger_changes
from evernear.data.ledger_changes import source_uri, without_journal
from evernear.data.listed_files import members
from evernear.data.sources import FileEntry
from evernear.data.sources.names import answer_in
from evernear.data.sqlite import marks, sqlite_errors

_PRESET = 2  # higher presets take up to twice as long to make the file 8% smaller
_CHUNK_BYTES = 2**20


def apply_changes(ledger: Path, changes: Path) -> None:
    """Apply the changes in a file from `Ledger.save_changes` to ``ledger``, a copy of the ledger
    without these changes."""
    with sqlite_errors(), closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        without_journal(db)
        ledger_changes.apply_row_changes(db, changes)


def compress(changes: Path) -> None:
    """Compress a file from `Ledger.save_changes`. Most of its bytes are hashes that it contains
    twice, so the compression window is as large as the file may be."""
    compressed = changes.with_suffix(".xz")
    with disk_errors(changes), changes.open("rb") as file, lzma.open(compressed, "wb", preset=_PRESET) as target:
        shutil.copyfileobj(file, target, _CHUNK_BYTES)
    compressed.replace(changes)


def expand(changes: Path) -> None:
    expanded = changes.with_suffix(".expanded")
    with disk_errors(changes), lzma.open(changes) as file, expanded.open("wb") as target:
        shutil.copyfileobj(file, target, _CHUNK_BYTES)
    expanded.replace(changes)


def stored_digests(ledger: Path) -> list[bytes]:
    """The digests of all images in the shards that a ledger lists, and of earlier images that wait
    (`evernear.data.listing`)."""
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        return [row[0] for row in db.execute("SELECT digest FROM images UNION SELECT digest FROM waiting")]


def answered_files(ledger: Path) -> dict[str, str]:
    """Maps each file that is in its class because of an answer in review
    (`evernear.data.sources.names.answer_in`), and that contains an image, to its label."""
    query = "SELECT name, label FROM files WHERE digest IS NOT NULL AND instr(name, 'review-')"
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        return {name: label for name, label in db.execute(query) if answer_in(name)}


_IN_SHARD = "images JOIN shards USING (slot) WHERE json_extract(shard, '$.sha256') = ?"


def shard_digests(ledger: Path, sha256: str) -> list[bytes]:
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        return [row[0] for row in db.execute(f"SELECT digest FROM {_IN_SHARD}", (sha256,))]  # noqa: S608 - our own words


def shard_files(ledger: Path, sha256: str) -> list[tuple[str, str, bytes]]:
    query = (
        "SELECT uri, files.name, digest FROM files JOIN sources ON sources.id = source"  # noqa: S608 - our own words
        f" WHERE digest IN (SELECT digest FROM {_IN_SHARD})"
    )
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        return db.execute(query, (sha256,)).fetchall()


def unreplaced_names(ledger: Path, sha256: str, newer: Path) -> list[str]:
    query = (
        f"SELECT MIN(name) FROM files WHERE digest IN (SELECT digest FROM {_IN_SHARD})"  # noqa: S608 - our own words
        " AND digest NOT IN (SELECT digest FROM newer.images) GROUP BY digest ORDER BY 1"
    )
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        db.execute("ATTACH ? AS newer", (str(newer),))
        return [row[0] for row in db.execute(query, (sha256,))]


def save_compact(ledger: Path, path: Path) -> None:
    """Write a compact ledger to ``path``, without deleted rows and without the splits, groups and
    reviews of removed images."""
    with sqlite_errors(), closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        without_journal(db)
        db.execute("DELETE FROM removed")
        for table in ("groups", "reviewed"):
            db.execute(f"DELETE FROM {table} WHERE digest NOT IN (SELECT digest FROM images)")  # noqa: S608 - our own words
        db.execute("VACUUM INTO ?", (str(path),))


class ReadFile(NamedTuple):
    etag: str
    size_bytes: int
    digest: bytes | None


class PublishedLedger:
    """The files of one source in a published, immutable ledger. Close the object after use."""

    def __init__(self, path: Path, source: str) -> None:
        with sqlite_errors():
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            row = self._db.execute("SELECT id FROM sources WHERE uri = ?", (source_uri(source),)).fetchone()
        self._source = row[0] if row else None

    def close(self) -> None:
        self._db.close()

    def count(self) -> int:
        """The number of files, or 0 if the dataset does not have this source."""
        with sqlite_errors():
            query = "SELECT COUNT(*) FROM files WHERE source = ?"
            return cast(int, self._db.execute(query, (self._source,)).fetchone()[0])

    def members(self, file: str, etag: str) -> Iterator[FileEntry]:
        return members(self._db, self._source, file, etag)

    def listed(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        query = f"SELECT name, etag, label FROM files WHERE source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
        with sqlite_errors():
            rows = self._db.execute(query, (self._source, *names)).fetchall()
        return {name: (etag, label) for name, etag, label in rows}

    def as_read(self, names: Sequence[str]) -> dict[str, ReadFile]:
        """Maps the name of each file that was read to the file as it was last read. Only files
        among ``names`` (at most 500) are included."""
        query = (
            f"SELECT name, etag, size_bytes, digest FROM files WHERE source = ? AND name IN ({marks(names)})"  # noqa: S608 - question marks only
            " AND (digest IS NOT NULL OR NOT pending)"
        )
        with sqlite_errors():
            return {name: ReadFile(*row) for name, *row in self._db.execute(query, (self._source, *names))}

    def image_labels(self, digests: Sequence[bytes]) -> dict[bytes, str]:
        query = f"SELECT digest, name FROM images JOIN labels ON id = label WHERE digest IN ({marks(digests)})"  # noqa: S608 - question marks only
        with sqlite_errors():
            return dict(self._db.execute(query, tuple(digests)))

    def own_classes(self) -> dict[str, int]:
        """The number of the source's files in each class that contains no images from other
        sources."""
        query = (
            "SELECT label, COUNT(*) FROM files WHERE source = ? AND digest IS NOT NULL AND label NOT IN"
            " (SELECT label FROM files WHERE source != ? AND digest IS NOT NULL) GROUP BY label"
        )
        with sqlite_errors():
            return dict(self._db.execute(query, (self._source, self._source)))

    def names(self, digests: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        query = f"SELECT digest, name FROM files WHERE source = ? AND digest IN ({marks(digests)}) ORDER BY name"  # noqa: S608 - question marks only
        names: dict[bytes, tuple[str, ...]] = {}
        with sqlite_errors():
            for digest, name in self._db.execute(query, (self._source, *digests)):
                names[digest] = (*names.get(digest, ()), name)
        return names
