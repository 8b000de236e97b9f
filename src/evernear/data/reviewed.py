"""The images of a dataset that come from review, as recorded in the dataset's ledger.

In a review, people label queries for which the recognizer was uncertain. This selection biases a
measurement. After five rounds of review, the accuracy of a release was 81.1% on test images that
include images from review, 87.0% on the other test images, and 87.5% on fresh images. Images from
review are therefore only in the train and gallery splits. If an image in the test or query split
has only files from review left, it is moved to the train split. No earlier release was trained on
it.

The name of a file shows whether the image comes from review
(`evernear.data.sources.names.is_reviewed`). The ledger remembers that the image comes from review,
so that the image is not used for measurements even if the file is renamed.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from evernear.data.manifest import Split
from evernear.data.sources.names import is_reviewed
from evernear.data.sqlite import marks, sqlite_errors

TRAINING: tuple[Split, ...] = ("train", "gallery")
"""The splits for images from review. `evernear.evaluation` measures with the others."""
SCHEMA = "CREATE TABLE reviewed (digest BLOB PRIMARY KEY, split TEXT NOT NULL) WITHOUT ROWID"
"""``split``: the measured split that the image was in or is given, or an empty string."""
_PAGE = 500

# If the source also contains the image under an ordinary name, the image counts as an ordinary
# image.
_BY_NAME = """
SELECT DISTINCT digest FROM files WHERE digest IS NOT NULL AND instr(name, 'review-') AND is_reviewed(name)
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
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        _add_function(db)

    def refresh(self) -> None:
        self.remember(row[0] for row in self._all(_BY_NAME))

    def remember(self, digests: Iterable[bytes]) -> None:
        """Record that images come from review, with the measured split of each."""
        with sqlite_errors():
            self._db.executemany(_REMEMBER, [(digest,) for digest in digests])

    def among(self, digests: Sequence[bytes]) -> set[bytes]:
        if not self._all("SELECT 1 FROM reviewed LIMIT 1"):
            return set()
        query = f"SELECT digest FROM reviewed WHERE digest IN ({marks(digests)})"  # noqa: S608 - question marks only
        return {row[0] for row in self._all(query, *digests)}

    def measured(self) -> dict[int, list[bytes]]:
        slots: defaultdict[int, list[bytes]] = defaultdict(list)
        query = f"SELECT slot, digest FROM reviewed JOIN images USING (digest) JOIN ({_PLACED}) USING (digest)"  # noqa: S608 - our own words
        for slot, digest in self._all(f"{query} ORDER BY slot, digest"):
            slots[slot].append(digest)
        return slots

    def move(self, slots: Iterable[tuple[bytes, int]]) -> None:
        with sqlite_errors():
            self._db.executemany("UPDATE images SET slot = ?2 WHERE digest = ?1", slots)

    def count(self) -> int:
        return self._all("SELECT COUNT(*) FROM reviewed JOIN images USING (digest)")[0][0]

    def left_out(self) -> dict[Split, dict[str, int]]:
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


def _add_function(db: sqlite3.Connection) -> None:
    db.create_function("is_reviewed", 1, is_reviewed, deterministic=True)
