"""The images of a dataset that came by review, in its ledger.

People label the queries that the recognizer was unsure about. Such a choice biases a
measurement: after five rounds of review, the accuracy on the test images was 88.8%, and
93.4% on a random sample. These images are in train and gallery only. Those that an
earlier version placed in test or query move to train, where no release was trained on
them before.

The name of a file shows that it came by review
(`evernear.data.sources.names.is_reviewed`). The ledger remembers the image, so that it
stays out of the measurement under any later name.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from evernear.data.manifest import Split
from evernear.data.sources.names import is_reviewed
from evernear.data.sqlite import marks, sqlite_errors

TRAINING: tuple[Split, ...] = ("train", "gallery")
"""The splits of images that came by review.
`evernear.evaluation` measures on the others.
"""
SCHEMA = "CREATE TABLE IF NOT EXISTS reviewed (digest BLOB PRIMARY KEY, split TEXT NOT NULL) WITHOUT ROWID"
"""``split`` is the measured split that the image was in,
or that its folder names; empty if there was none.
"""
_PAGE = 500

# An image that the source also has under an ordinary name counts as an ordinary image.
_BY_NAME = """
SELECT DISTINCT digest FROM files WHERE digest IS NOT NULL AND name LIKE '%review-%' AND is_reviewed(name)
AND NOT EXISTS (SELECT 1 FROM files AS other WHERE other.digest = files.digest AND NOT is_reviewed(other.name))
"""
_PLACED = """
SELECT digest, json_extract(shard, '$.split') AS split FROM images JOIN shards USING (slot)
WHERE split IN ('test', 'query')
"""
_REMEMBER = f"""
INSERT OR IGNORE INTO reviewed SELECT ?1, COALESCE(
  (SELECT split FROM ({_PLACED}) AS placed WHERE placed.digest = ?1),
  (SELECT split FROM removed WHERE digest = ?1 AND split IN ('test', 'query')),
  (SELECT MAX(given) FROM files WHERE digest = ?1 AND given IN ('test', 'query')),
  '')
"""  # noqa: S608 - our own words


class ReviewedImages:
    """The images that came by review in the ledger of one dataset."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        _add_function(db)

    def refresh(self) -> None:
        """Remember the images whose files came by review."""
        self.remember(row[0] for row in self._all(_BY_NAME))

    def remember(self, digests: Iterable[bytes]) -> None:
        """Remember that images came by review,
        and the measured split that each was in.
        """
        with sqlite_errors():
            self._db.executemany(_REMEMBER, [(digest,) for digest in digests])

    def among(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those of ``digests``, at most 500, that came by review."""
        query = f"SELECT digest FROM reviewed WHERE digest IN ({marks(digests)})"  # noqa: S608 - question marks only
        return {row[0] for row in self._all(query, *digests)}

    def measured(self) -> dict[int, list[bytes]]:
        """The images that are in a measured split, by slot."""
        slots: defaultdict[int, list[bytes]] = defaultdict(list)
        query = f"SELECT slot, digest FROM reviewed JOIN images USING (digest) JOIN ({_PLACED}) USING (digest)"  # noqa: S608 - our own words
        for slot, digest in self._all(f"{query} ORDER BY slot, digest"):
            slots[slot].append(digest)
        return slots

    def move(self, slots: Iterable[tuple[bytes, int]]) -> None:
        """Record the new slots of images."""
        with sqlite_errors():
            self._db.executemany("UPDATE images SET slot = ?2 WHERE digest = ?1", slots)

    def count(self) -> int:
        """The number of images in the snapshot that came by review."""
        return self._all("SELECT COUNT(*) FROM reviewed JOIN images USING (digest)")[0][0]

    def left_out(self) -> dict[Split, dict[str, int]]:
        """The number of images that were in a measured split,
        by that split and by label.
        """
        counts: defaultdict[Split, Counter[str]] = defaultdict(Counter)
        query = (
            "SELECT reviewed.split, labels.name, COUNT(*) FROM reviewed JOIN images USING (digest)"
            " JOIN labels ON labels.id = images.label WHERE reviewed.split != '' GROUP BY 1, 2 ORDER BY 1, labels.id"
        )
        for split, label, count in self._all(query):
            counts[split][label] = count
        return {split: dict(labels) for split, labels in counts.items()}

    def _all(self, query: str, *values: object) -> Sequence[tuple[Any, ...]]:
        with sqlite_errors():
            return self._db.execute(query, values).fetchall()


def reviewed_by_name(ledger: Path) -> set[bytes]:
    """The digests of the images in a ledger, of any version,
    whose files came by review.

    Raises:
        StoreError: the file cannot be read.
    """
    with sqlite_errors(), closing(sqlite3.connect(ledger)) as db:
        _add_function(db)
        return {row[0] for row in db.execute(_BY_NAME)}


def _add_function(db: sqlite3.Connection) -> None:
    db.create_function("is_reviewed", 1, is_reviewed, deterministic=True)
