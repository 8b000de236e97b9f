"""What a dataset knows of every file and every image, in SQLite: its memory does not grow with the data.

``files`` mirrors the sources: one row a file, with the digest of its image once decoded. ``images`` says
where each distinct image lies. All faults that need more than one image to see (duplicates, conflicts) are
queries over the two.
"""

import hashlib
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from evernear.data.manifest import Problem, Shard, Split
from evernear.errors import StoreError

# Problems of a kind that a manifest lists. Those that stop a run have to be mended one by one.
_LISTED = {"undecodable": 1000, "conflicting_labels": 1000}
_LISTED_OF_OTHERS = 20
_MAX_NAMES = 5

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
  given TEXT,                -- the split the source puts it in; NULL: the content hash decides
  size_bytes INTEGER NOT NULL,
  turn INTEGER NOT NULL,     -- files are decoded in this order
  seen INTEGER NOT NULL,     -- the run that last listed it
  pending INTEGER NOT NULL,  -- 1: to be decoded
  digest BLOB,               -- of its image; NULL while pending or broken
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
  constant INTEGER NOT NULL
) WITHOUT ROWID;
"""

# Files by names that tell those of one source from those of another.
_NAMED = """
CREATE TEMP VIEW named AS
SELECT CASE WHEN (SELECT COUNT(*) FROM sources) > 1 THEN uri || '/' || name ELSE name END AS name,
  digest, label, given, fault
FROM files JOIN sources ON sources.id = files.source
"""

# Images that stand in more than one file.
_TWINS = """
CREATE TEMP TABLE twins AS
SELECT MIN(name) AS name, digest,
  COUNT(DISTINCT label) AS labels, COUNT(DISTINCT COALESCE(given, '')) AS splits
FROM named
WHERE digest IN (SELECT digest FROM files WHERE digest IS NOT NULL GROUP BY digest HAVING COUNT(*) > 1)
GROUP BY digest
"""


class Listed(NamedTuple):
    """A file as its source lists it."""

    name: str
    etag: str
    label: str
    given: Split | None
    size_bytes: int


class NewImage(NamedTuple):
    """A row of ``images``."""

    digest: bytes
    label: int
    slot: int
    width_px: int
    height_px: int
    constant: bool


class Ledger:
    """The ledger of one dataset, in a local file. Its errors on a full disk are `StoreError`."""

    def __init__(self, path: Path, source: str) -> None:
        """Open the ledger for one ingest of ``source``, and make it where there is none."""
        fresh = not path.exists()
        self._db = sqlite3.connect(path, isolation_level=None)
        with _sqlite_errors():
            # The file is a scratch copy until it is published whole, so it needs no journal of its own.
            self._db.execute("PRAGMA journal_mode = OFF")
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("BEGIN")
            if fresh:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
            # Ledgers of earlier versions lack it.
            self._db.execute("CREATE TABLE IF NOT EXISTS hidden_folders (source INTEGER NOT NULL, name TEXT NOT NULL)")
            self._db.execute("UPDATE state SET run = run + 1")
            self._run = cast(int, self._db.execute("SELECT run FROM state").fetchone()[0])
            self._db.execute("INSERT OR IGNORE INTO sources (uri) VALUES (?)", (_place(source),))
            row = self._db.execute("SELECT id FROM sources WHERE uri = ?", (_place(source),)).fetchone()
            self._source = cast(int, row[0])
            self._db.execute(_NAMED)

    def publish(self, path: Path) -> None:
        """Commit, and write a compact copy to ``path``."""
        with _sqlite_errors():
            self._db.execute("COMMIT")
            self._db.execute("VACUUM INTO ?", (str(path),))

    def close(self) -> None:
        """Let the file go; what was not published is lost."""
        self._db.close()

    def other_sources(self) -> list[str]:
        """The other sources that the dataset was fed from."""
        return [row[0] for row in self._all("SELECT uri FROM sources WHERE id != ? ORDER BY id", self._source)]

    # Files

    def list_files(self, files: Iterable[Listed]) -> None:
        """Note files of the source; new, changed and broken ones become pending."""
        rows = ((self._source, *f, _turn(f), self._run) for f in files)
        self._many(
            "INSERT INTO files (source, name, etag, label, given, size_bytes, turn, seen, pending)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT (source, name) DO UPDATE SET"
            " pending = pending OR fault IS NOT NULL OR etag != excluded.etag,"
            " digest = CASE WHEN etag = excluded.etag THEN digest END,"
            " fault = NULL, etag = excluded.etag, label = excluded.label, given = excluded.given,"
            " size_bytes = excluded.size_bytes, turn = excluded.turn, seen = excluded.seen",
            rows,
        )

    def list_decoded(self, rows: Iterable[tuple[str, str, Split | None, bytes]]) -> None:
        """Note images that come decoded: (name, label, given, digest)."""
        self._many(
            "INSERT OR REPLACE INTO files"
            " (source, name, etag, label, given, size_bytes, turn, seen, pending, digest)"
            " VALUES (?, ?, '', ?, ?, 0, 0, ?, 0, ?)",
            ((self._source, name, label, given, self._run, digest) for name, label, given, digest in rows),
        )

    def forget_unlisted(self) -> None:
        """Drop files that the source no longer lists."""
        self._all("DELETE FROM files WHERE source = ? AND seen != ?", self._source, self._run)

    def note_empty_folders(self, names: Iterable[str]) -> None:
        """Replace the class folders that hold no image."""
        self._all("DELETE FROM empty_folders WHERE source = ?", self._source)
        self._many("INSERT INTO empty_folders VALUES (?, ?)", ((self._source, name) for name in names))

    def note_hidden_folders(self, names: Iterable[str]) -> None:
        """Replace the class folders whose images are left out because their names begin with a dot."""
        self._all("DELETE FROM hidden_folders WHERE source = ?", self._source)
        self._many("INSERT INTO hidden_folders VALUES (?, ?)", ((self._source, name) for name in names))

    def count_listed(self) -> int:
        """Files that the source lists."""
        return self._int("SELECT COUNT(*) FROM files WHERE source = ?", self._source)

    def count_pending(self) -> int:
        """Files that wait to be decoded."""
        return self._int("SELECT COUNT(*) FROM files WHERE pending AND source = ?", self._source)

    def pending(self, page: int) -> Iterator[Listed]:
        """Files to decode: those of held-out splits first, then in an order that mixes the classes."""
        after: tuple[int, str] = (-1, "")
        query = (
            # Without the index each page would sort all that is pending.
            "SELECT name, etag, label, given, size_bytes, turn FROM files INDEXED BY files_by_turn"
            " WHERE pending AND source = ? AND (turn, name) > (?, ?) ORDER BY turn, name LIMIT ?"
        )
        while rows := self._all(query, self._source, *after, page):
            after = (rows[-1][5], rows[-1][0])
            yield from (Listed(*row[:5]) for row in rows)

    def in_order(self) -> Iterator[Listed]:
        """The source's files by name."""
        query = (
            "SELECT name, etag, label, given, size_bytes FROM files"
            " WHERE source = ? AND name > ? ORDER BY name LIMIT 64"
        )
        after = ""
        while rows := self._all(query, self._source, after):
            after = rows[-1][0]
            yield from (Listed(*row) for row in rows)

    def settle(self, decoded: Iterable[tuple[str, bytes | None, str | None]]) -> None:
        """Note what decoding gave: (name, digest or None, fault or None)."""
        self._many(
            "UPDATE files SET pending = 0, digest = ?, fault = ? WHERE source = ? AND name = ?",
            ((digest, fault, self._source, name) for name, digest, fault in decoded),
        )

    # Labels

    def labels_listed(self) -> list[str]:
        """Distinct labels of all files."""
        return [row[0] for row in self._all("SELECT DISTINCT label FROM files")]

    def labels(self) -> list[str]:
        """Known labels in the order of their numbers."""
        return [row[0] for row in self._all("SELECT name FROM labels ORDER BY id")]

    def add_labels(self, names: Sequence[str]) -> None:
        """Append labels."""
        first = len(self.labels())
        self._many("INSERT INTO labels VALUES (?, ?)", enumerate(names, first))

    # Images

    def known(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those of ``digests`` that already lie in a shard."""
        found: set[bytes] = set()
        for start in range(0, len(digests), 500):
            part = digests[start : start + 500]
            marks = ",".join("?" * len(part))
            query = f"SELECT digest FROM images WHERE digest IN ({marks})"  # noqa: S608 - question marks only
            found.update(row[0] for row in self._all(query, *part))
        return found

    def add_images(self, images: Iterable[NewImage]) -> None:
        """Note images that were put into a shard."""
        self._many("INSERT INTO images VALUES (?, ?, ?, ?, ?, ?)", images)

    # Shards

    def shards(self) -> dict[int, Shard]:
        """The shards by slot. A slot is a shard's place; its content may be replaced by a later ingest."""
        rows = self._all("SELECT slot, shard FROM shards ORDER BY slot")
        return {slot: Shard.model_validate_json(text) for slot, text in rows}

    def put_shard(self, slot: int, shard: Shard | None) -> None:
        """Set what lies in a slot; None empties it."""
        self._all("DELETE FROM shards WHERE slot = ?", slot)
        if shard is not None:
            self._all("INSERT INTO shards VALUES (?, ?)", slot, shard.model_dump_json())

    # What the files say against what the shards hold

    def reconcile(self) -> list[int]:
        """Bring ``images`` to what the files say now, and return the slots that differ from it.

        An image whose files are gone goes; one whose files all say another label gets that; one whose files
        disagree goes until they agree, and is then decoded anew.
        """
        self._all("CREATE TEMP TABLE changes (digest BLOB PRIMARY KEY, slot INTEGER, label INTEGER)")
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
        self._all("UPDATE files SET pending = 1 WHERE digest IN (SELECT digest FROM changes WHERE label IS NULL)")
        self._all("DELETE FROM images WHERE digest IN (SELECT digest FROM changes WHERE label IS NULL)")
        self._all(
            "UPDATE images SET label = c.label FROM changes c WHERE c.digest = images.digest AND c.label IS NOT NULL"
        )
        return [row[0] for row in self._all("SELECT DISTINCT slot FROM changes ORDER BY slot")]

    def changes(self, slot: int) -> dict[bytes, int | None]:
        """After `reconcile`: the new label of each changed image of a slot, None where the image goes."""
        return dict(self._all("SELECT digest, label FROM changes WHERE slot = ?", slot))

    # Problems

    def problems(self, expected_size: tuple[int, int] | None) -> tuple[list[Problem], dict[str, int]]:
        """Some problems of each kind and the count of all; ``expected_size`` is (width, height) or None."""
        found: list[Problem] = []
        counts: dict[str, int] = {}
        self._all(_TWINS)
        for kind, query, values in self._problem_queries(expected_size):
            count = self._int(f"SELECT COUNT(*) FROM ({query})", *values)  # noqa: S608 - our own words
            if count:
                counts[kind] = count
            limit = _LISTED.get(kind, _LISTED_OF_OTHERS)
            for name, digest, what in self._all(f"{query} ORDER BY 1 LIMIT {limit}", *values):
                names = self._names(name, digest)
                detail = what if kind == "undecodable" else f"{', '.join(names)} {what}."
                found.append(Problem(kind=kind, names=names, detail=detail))
        return found, counts

    def _problem_queries(self, expected_size: tuple[int, int] | None) -> Iterator[tuple[str, str, tuple[object, ...]]]:
        """Kind, query for (name, digest where several files share it, what is wrong), the query's values."""
        yield "undecodable", "SELECT name, NULL, fault FROM named WHERE fault IS NOT NULL", ()
        yield "tiny_class", "SELECT name, NULL, 'holds no image' FROM empty_folders", ()
        hidden = "'begins with a dot, so its images were left out'"
        yield "hidden_folder", f"SELECT name, NULL, {hidden} FROM hidden_folders", ()  # noqa: S608 - our own words
        twins = "SELECT name, digest, {} FROM twins WHERE {}"
        yield "conflicting_labels", twins.format("'are one image under several labels'", "labels > 1"), ()
        across = twins.format("'are one image given in several splits'", "labels = 1 AND splits > 1")
        yield "duplicate_across_splits", across, ()
        yield "duplicate", twins.format("'are one image'", "labels = 1 AND splits = 1"), ()
        name = "(SELECT MIN(name) FROM named WHERE named.digest = images.digest)"
        constant = f"SELECT {name}, NULL, 'has one value in all its pixels' FROM images WHERE constant"  # noqa: S608
        yield "constant_image", constant, ()
        if expected_size is not None:
            size = f"SELECT {name}, NULL, 'has ' || width || ' x ' || height || ' pixels' FROM images"  # noqa: S608
            yield "wrong_size", f"{size} WHERE (width, height) != (?, ?)", expected_size

    def _names(self, name: str, digest: bytes | None) -> tuple[str, ...]:
        if digest is None:
            return (name,)
        query = "SELECT name FROM named WHERE digest = ? ORDER BY name LIMIT ?"
        return tuple(row[0] for row in self._all(query, digest, _MAX_NAMES))

    # SQLite

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with _sqlite_errors():
            return self._db.execute(query, values).fetchall()

    def _int(self, query: str, *values: object) -> int:
        return cast(int, self._all(query, *values)[0][0])

    def _many(self, query: str, rows: Iterable[Sequence[object]]) -> None:
        with _sqlite_errors():
            self._db.executemany(query, rows)


class PublishedLedger:
    """What a published ledger knows of the files of one source; nothing in it changes. Close it after use."""

    def __init__(self, path: Path, source: str) -> None:
        with _sqlite_errors():
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            row = self._db.execute("SELECT id FROM sources WHERE uri = ?", (_place(source),)).fetchone()
        self._source = row[0] if row else None

    def close(self) -> None:
        """Let the file go."""
        self._db.close()

    def count(self) -> int:
        """Files of the source; 0 where the dataset was never fed from it."""
        with _sqlite_errors():
            query = "SELECT COUNT(*) FROM files WHERE source = ?"
            return cast(int, self._db.execute(query, (self._source,)).fetchone()[0])

    def etags(self, names: Sequence[str]) -> dict[str, str]:
        """The etags of those of ``names``, at most 500, that it knows, broken files among them."""
        marks = ",".join("?" * len(names))
        query = f"SELECT name, etag FROM files WHERE source = ? AND name IN ({marks})"  # noqa: S608 - question marks only
        with _sqlite_errors():
            return dict(self._db.execute(query, (self._source, *names)).fetchall())


def _place(source: str) -> str:
    """A source as the ledger knows it: ``s3://bucket/prefix/`` is no other place than ``s3://bucket/prefix``."""
    return source.rstrip("/")


def _turn(file: Listed) -> int:
    """Held-out splits come first, so that an image given twice is held out; inside a split by hash."""
    mixed = int.from_bytes(hashlib.sha256(file.name.encode()).digest()[:7])
    place = 3 if file.given is None else ("test", "query", "gallery", "train").index(file.given)
    return place << 56 | mixed


@contextmanager
def _sqlite_errors() -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if "full" in str(error):
            raise StoreError("The disk that holds the temporary directory is full (TMPDIR).") from error
        raise StoreError(f"The dataset's ledger cannot be read or written: {error}.") from error
