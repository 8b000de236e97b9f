"""The groups of a dataset's images, as recorded in its ledger (`evernear.data.groups`)."""

import hashlib
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from evernear.common.text import spelled
from evernear.data.manifest import Split
from evernear.data.sources.base import NameSample
from evernear.data.sources.names import is_reviewed
from evernear.data.sqlite import batched, marks, sqlite_errors

SCHEMA = "CREATE TABLE groups (digest BLOB PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID"
Members = Counter[tuple[str, Split]]
"""Number of images in a group by label and split."""
FEWEST_GROUPS = 3
"""Minimum number of groups that a class needs to have images in train, test and gallery."""
DOMINANT_SHARE = 0.5
"""Share of the images from which a group that spans several classes stops the first ingest."""
_LARGE_SHARE = 0.2
_PAGE = 500

_LOCATED = """
SELECT groups.name AS name, labels.name AS label, json_extract(shard, '$.split') AS split, digest
FROM groups JOIN images USING (digest) JOIN labels ON labels.id = images.label JOIN shards USING (slot)
"""
# Images that will be read again or may come back keep their splits.
_REMOVED = "SELECT groups.name AS name, '' AS label, split, digest FROM groups JOIN removed USING (digest)"
_IN_SEVERAL_SPLITS = f"SELECT name FROM ({_LOCATED}) GROUP BY name HAVING COUNT(DISTINCT split) > 1"  # noqa: S608 - our own words
QUERIES_OF_SEEN_GROUPS = f"""
WITH located AS ({_LOCATED})
SELECT digest FROM located WHERE split = 'query' AND name IN (
    SELECT name FROM located WHERE split IN ('train', 'gallery')
)
"""  # noqa: S608 - our own words
# The groups that span several classes and have at least half of the images, or a large share and
# more than twice the images of the median group, as one of three equal scenes has not.
_LARGE_GROUPS = f"""
WITH sizes AS (SELECT name, SUM(images) AS images, COUNT(*) AS labels FROM ({{}}) GROUP BY name),
total AS (SELECT SUM(images) AS images FROM sizes),
named AS (SELECT * FROM sizes WHERE name != ''),
median AS (SELECT images FROM named ORDER BY images LIMIT 1 OFFSET (SELECT (COUNT(*) - 1) / 2 FROM named))
SELECT named.name, named.images, total.images, labels FROM named, total, median
WHERE labels > 1 AND (named.images >= {DOMINANT_SHARE} * total.images
    OR named.images >= {_LARGE_SHARE} * total.images AND named.images > 2 * median.images)
ORDER BY named.images DESC, named.name
"""  # noqa: S608 - our own words
_STORED = """
SELECT COALESCE(name, '') AS name, label, COUNT(*) AS images FROM images LEFT JOIN groups USING (digest) GROUP BY 1, 2
"""
# An image without a group counts as one group.
_OF_FEW_GROUPS = f"""
SELECT labels.name FROM images JOIN labels ON labels.id = images.label LEFT JOIN groups USING (digest)
GROUP BY labels.name HAVING COUNT(DISTINCT COALESCE(groups.name, hex(digest))) < {FEWEST_GROUPS}
"""  # noqa: S608 - our own words

LABEL_COUNTS = """
SELECT COALESCE(groups.name, hex(digest)) AS name, labels.name AS label, COUNT(*)
FROM images JOIN labels ON labels.id = images.label LEFT JOIN groups USING (digest) GROUP BY 1, 2
"""


class LargeGroup(NamedTuple):
    """A large group of several classes. Its value may mean that an image has no group."""

    name: str
    images: int
    total: int
    labels: int

    def __str__(self) -> str:
        share = f"{self.images / self.total:.0%}"
        return f"{spelled(self.name)} with {self.images:,} of {self.total:,} images ({share}), of {self.labels} classes"


class GroupTable:
    def __init__(self, db: sqlite3.Connection, source: int) -> None:
        self._db, self._source = db, source
        self._ungrouped = NameSample()
        self._all("CREATE TEMP TABLE listed_groups (name, label, images, PRIMARY KEY (name, label)) WITHOUT ROWID")

    def refresh(self, group: Callable[[str, str], str]) -> None:
        """Set the group of every decoded image of the source, from names and labels. An image with
        several files belongs to the first of their groups."""
        self._ungrouped = NameSample()
        with sqlite_errors():
            files = self._db.execute(
                "SELECT digest, name, label FROM files WHERE source = ? AND digest IS NOT NULL ORDER BY digest, name",
                (self._source,),
            )
            for page in batched(self._grouped(files, group), _PAGE):
                self._set(dict(page))
            self._db.execute(
                "DELETE FROM groups WHERE digest NOT IN (SELECT digest FROM images)"
                " AND digest NOT IN (SELECT digest FROM removed)"
            )

    def _grouped(
        self, files: Iterable[tuple[bytes, str, str]], group: Callable[[str, str], str]
    ) -> Iterator[tuple[bytes, str]]:
        """Yield digest and group (perhaps empty) of each image, whose files are consecutive."""
        for digest, copies in groupby(files, key=itemgetter(0)):
            names = [(name, group(name, label)) for _, name, label in copies]
            key = min((key for _, key in names if key), default="")
            if not key and not is_reviewed(names[0][0]):
                self._ungrouped.add(names[0][0])
            yield digest, key

    def _set(self, groups: Mapping[bytes, str]) -> None:
        known = dict(self._db.execute(f"SELECT * FROM groups WHERE digest IN ({marks([*groups])})", tuple(groups)))  # noqa: S608 - question marks only
        changed = {digest: key for digest, key in groups.items() if key != known.get(digest, "")}
        self._db.executemany("DELETE FROM groups WHERE digest = ?", ((digest,) for digest in changed))
        self._db.executemany("INSERT INTO groups VALUES (?, ?)", ((d, key) for d, key in changed.items() if key))

    def is_empty(self) -> bool:
        return not self._all("SELECT 1 FROM groups LIMIT 1")

    def count(self) -> int:
        return self._all("SELECT COUNT(DISTINCT name) FROM groups JOIN images USING (digest)")[0][0]

    def sha256(self) -> str:
        digest, rows = hashlib.sha256(), 0
        with sqlite_errors():
            for image, name in self._db.execute(
                "SELECT digest, name FROM groups JOIN images USING (digest) ORDER BY digest"
            ):
                digest.update(image + hashlib.sha256(name.encode(errors="surrogateescape")).digest())
                rows += 1
        return digest.hexdigest() if rows else ""

    # The groups of the listed files, before any file is decoded

    def list_files(self, listed: Iterable[tuple[str, str]]) -> None:
        with sqlite_errors():
            self._db.executemany(
                "INSERT INTO listed_groups VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET images = images + 1", listed
            )

    def first_listed(self) -> str:
        return self._all("SELECT COALESCE(MIN(name), '') FROM listed_groups WHERE name != ''")[0][0]

    def is_class_divided(self) -> bool:
        """Whether a class has several groups. A file without a group counts as one."""
        groups = "SUM(CASE name WHEN '' THEN images ELSE 1 END)"
        return bool(self._all(f"SELECT 1 FROM listed_groups GROUP BY label HAVING {groups} > 1"))  # noqa: S608 - our own words

    def dominant_listed(self) -> LargeGroup | None:
        for large in map(LargeGroup._make, self._all(_LARGE_GROUPS.format("SELECT * FROM listed_groups"))):
            return large if large.images >= DOMINANT_SHARE * large.total else None
        return None

    # The splits of groups during an ingest

    def start_placing(self) -> None:
        """Record the splits of the images in each group, including removed images."""
        self._all("DROP TABLE IF EXISTS temp.placed")
        self._all(
            "CREATE TEMP TABLE placed (name, label, split, images, PRIMARY KEY (name, label, split)) WITHOUT ROWID"
        )
        located = f"{_LOCATED} UNION ALL {_REMOVED}"
        self._all(f"INSERT INTO placed SELECT name, label, split, COUNT(*) FROM ({located}) GROUP BY 1, 2, 3")  # noqa: S608 - our own words

    def units(self) -> Iterator[tuple[str, Split, int, int]]:
        """Yield label, split, number of groups, and of their images. After `start_placing`."""
        yield from self._all("SELECT label, split, COUNT(*), SUM(images) FROM placed WHERE label != '' GROUP BY 1, 2")

    def placed(self, names: Collection[str]) -> defaultdict[str, Members]:
        found: defaultdict[str, Members] = defaultdict(Counter)
        query = f"SELECT name, label, split, images FROM placed WHERE name IN ({marks([*names])})"  # noqa: S608 - question marks only
        for name, label, split, images in self._all(query, *names):
            found[name][label, split] = images
        return found

    def labels(self, names: Collection[str]) -> defaultdict[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        query = f"SELECT name, label FROM listed_groups WHERE name IN ({marks([*names])}) ORDER BY 1, 2"  # noqa: S608 - question marks only
        for name, label in self._all(query, *names):
            found[name].append(label)
        return found

    def place(self, groups: Mapping[str, Members]) -> None:
        rows = (
            (name, label, split, images)
            for name, members in groups.items()
            for (label, split), images in members.items()
        )
        with sqlite_errors():
            self._db.executemany("INSERT OR REPLACE INTO placed VALUES (?, ?, ?, ?)", rows)

    # Problems

    def problems(self, limit: int) -> Iterator[tuple[str, list[str], int, str]]:
        """Yield kind, some names, their total number, and a description. After `refresh`."""
        if self.is_empty():
            return
        if large := [str(LargeGroup._make(row)) for row in self._all(_LARGE_GROUPS.format(_STORED))]:
            yield "large_group", large, len(large), "is one group"
        for kind, query, text in (
            ("split_group", _IN_SEVERAL_SPLITS, "has images in several splits"),
            ("few_groups", _OF_FEW_GROUPS, f"has fewer than {FEWEST_GROUPS} groups"),
        ):
            names = [row[0] for row in self._all(f"{query} ORDER BY 1")]
            if names:
                yield kind, names[:limit], len(names), text
        if self._ungrouped.count:
            yield "ungrouped", self._ungrouped.names, self._ungrouped.count, "belongs to no group"

    def _all(self, query: str, *values: object) -> Sequence[tuple[Any, ...]]:
        with sqlite_errors():
            return self._db.execute(query, values).fetchall()
