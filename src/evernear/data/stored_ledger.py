"""Read and change ledgers in files, outside of an ingest."""

import lzma
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evernear.common.disk import disk_errors
from evernear.common.frozen import require_stamp, stamp
from evernear.data import ledger_changes
from evernear.data.group_table import LABEL_COUNTS, QUERIES_OF_SEEN_GROUPS
from evernear.data.ledger_changes import members, source_uri, without_journal
from evernear.data.sources.names import answer_in
from evernear.data.sqlite import batched, marks, sqlite_errors

_PRESET = 2  # higher presets take up to twice as long to make the file 8% smaller
_CHUNK_BYTES = 2**20
_XZ = b"\xfd7zXZ"
_PAGE = 500  # SQLite limits the number of parameters in a statement
_IN_SHARD = "images JOIN shards USING (slot) WHERE json_extract(shard, '$.sha256') = ?"


def require_ledger_format(path: Path, source: str) -> None:
    """Compare the stamp of a ledger, or of changes to one.

    Raises:
        FormatError: another version wrote it.
    """
    with sqlite_errors(), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        is_stamped = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'stamp'").fetchone()
        row = db.execute("SELECT format, evernear_version FROM stamp").fetchone() if is_stamped else None
    require_stamp(dict(zip(stamp(), row, strict=True)) if row else {}, source)


def apply_changes(ledger: Path, changes: Path) -> None:
    """``ledger`` is a copy without these changes."""
    with sqlite_errors(), closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        without_journal(db)
        ledger_changes.apply_row_changes(db, changes)


def compress(changes: Path) -> None:
    """Most bytes are hashes that occur twice, so the window is as large as the file may be."""
    compressed = changes.with_suffix(".xz")
    with disk_errors(changes), changes.open("rb") as file, lzma.open(compressed, "wb", preset=_PRESET) as target:
        shutil.copyfileobj(file, target, _CHUNK_BYTES)
    compressed.replace(changes)


def expand(changes: Path) -> None:
    """Decompress changes to a ledger. A complete ledger stays as it is."""
    with disk_errors(changes), changes.open("rb") as file:
        if file.read(len(_XZ)) != _XZ:
            return
    expanded = changes.with_suffix(".expanded")
    with disk_errors(changes), lzma.open(changes) as file, expanded.open("wb") as target:
        shutil.copyfileobj(file, target, _CHUNK_BYTES)
    expanded.replace(changes)


def save_compact(ledger: Path, path: Path) -> None:
    """Without deleted rows, and splits, groups and reviews of removed images."""
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
    """A published, immutable ledger. Methods about files concern those of ``source``, unless they
    say otherwise. Close the object after use."""

    def __init__(self, path: Path, source: str) -> None:
        with sqlite_errors():
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        row = self._all("SELECT id FROM sources WHERE uri = ?", source_uri(source))
        self._source: int | None = row[0][0] if row else None
        self.members = partial(members, self._db, self._source)

    def close(self) -> None:
        self._db.close()

    # Files

    def count(self) -> int:
        return self._all("SELECT COUNT(*) FROM files WHERE source = ?", self._source)[0][0]

    def listed(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """The etag and the label of each of ``names`` in the ledger."""
        query = "SELECT name, etag, label FROM files WHERE source = ? AND name"
        return {name: (etag, label) for name, etag, label in self._among(query, names, self._source)}

    def as_read(self, names: Sequence[str]) -> dict[str, ReadFile]:
        """Each of ``names`` that was read, as it was last read."""
        query = (
            "SELECT name, etag, size_bytes, digest FROM files WHERE source = ?"
            " AND (digest IS NOT NULL OR NOT pending) AND name"
        )
        return {name: ReadFile(*row) for name, *row in self._among(query, names, self._source)}

    def own_classes(self) -> dict[str, int]:
        """Files in each class that has no images from other sources."""
        query = (
            "SELECT label, COUNT(*) FROM files WHERE source = ? AND digest IS NOT NULL AND label NOT IN"
            " (SELECT label FROM files WHERE source != ? AND digest IS NOT NULL) GROUP BY label"
        )
        return dict(self._all(query, self._source, self._source))

    def names(self, digests: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        names: dict[bytes, tuple[str, ...]] = {}
        for digest, name in sorted(
            self._among("SELECT digest, name FROM files WHERE source = ? AND digest", digests, self._source)
        ):
            names[digest] = (*names.get(digest, ()), name)
        return names

    def answered_files(self) -> dict[str, str]:
        """Maps each file of any source that is in its class because of an answer in review
        (`evernear.data.sources.names.answer_in`), and that contains an image, to its label."""
        query = "SELECT name, label FROM files WHERE digest IS NOT NULL AND instr(name, 'review-')"
        return {name: label for name, label in self._all(query) if answer_in(name)}

    def files_of(self, digests: Sequence[bytes]) -> dict[bytes, tuple[str, str]]:
        """The name and the label of one file of each image, of any source."""
        rows = self._among("SELECT digest, name, label FROM files WHERE digest", digests)
        return {digest: (name, label) for digest, name, label in rows}

    def image_files(self) -> Iterator[tuple[str, str]]:
        """The name and the label of every image file of any source."""
        with sqlite_errors():
            yield from self._db.execute("SELECT name, label FROM files WHERE digest IS NOT NULL")

    def have_other_explicit_splits(self, pairs: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the source gives the images of most ``pairs`` different splits. Without an
        explicit split, ingest chooses a split that the source gives to no image."""
        given: defaultdict[bytes, set[str | None]] = defaultdict(set)
        digests = [digest for pair in pairs for digest in pair]
        for digest, split in self._among("SELECT digest, given FROM files WHERE digest", digests):
            given[digest].add(split)
        return 2 * sum(given[test] != given[seen] for test, seen in pairs) > len(pairs)

    def has_explicit_test_images(self) -> bool:
        return bool(self._all("SELECT 1 FROM files WHERE given = 'test' LIMIT 1"))

    # Images

    def image_labels(self, digests: Sequence[bytes]) -> dict[bytes, str]:
        return dict(self._among("SELECT digest, name FROM images JOIN labels ON id = label WHERE digest", digests))

    def stored_digests(self) -> list[bytes]:
        """The digests of all images in shards, and of earlier images that wait
        (`evernear.data.listing`)."""
        return [row[0] for row in self._all("SELECT digest FROM images UNION SELECT digest FROM waiting")]

    def shard_digests(self, sha256: str) -> list[bytes]:
        return [row[0] for row in self._all(f"SELECT digest FROM {_IN_SHARD}", sha256)]  # noqa: S608 - our own words

    def shard_files(self, sha256: str) -> list[tuple[str, str, bytes]]:
        """The source, the name and the digest of each file whose image is in a shard."""
        query = (
            "SELECT uri, files.name, digest FROM files JOIN sources ON sources.id = source"  # noqa: S608 - our own words
            f" WHERE digest IN (SELECT digest FROM {_IN_SHARD})"
        )
        return self._all(query, sha256)

    # Groups

    def groups(self, digests: Sequence[bytes]) -> dict[bytes, str]:
        """The group of each image that has one."""
        return dict(self._among("SELECT digest, name FROM groups WHERE digest", digests))

    def queries_of_seen_groups(self) -> frozenset[bytes]:
        return frozenset(digest for (digest,) in self._all(QUERIES_OF_SEEN_GROUPS))

    def label_counts(self) -> Iterator[tuple[str, str, int]]:
        """Each group, each label in it, and the number of images with this label. An image without
        a group counts as a group."""
        with sqlite_errors():
            yield from self._db.execute(LABEL_COUNTS)

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite_errors():
            return self._db.execute(query, values).fetchall()

    def _among(self, query: str, keys: Sequence[object], *values: object) -> Iterator[tuple[Any, ...]]:
        """The rows of ``query``, which ends with a column, for which this column is in ``keys``."""
        for page in batched(keys, _PAGE):
            yield from self._all(f"{query} IN ({marks(page)})", *values, *page)
