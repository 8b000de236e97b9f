"""Select `WEEKLY` random live queries per week for people to label. The labels measure the accuracy
of the release that answered.

The queries come from the uniform sample of image files in the query log
(`evernear.serving.query_log`), regardless of the release's answers. `evernear.console.live_labels`
stores the labels, which never enter a dataset.
"""

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from evernear.common.disk import sha256_bytes
from evernear.common.store import ObjectInfo, Store
from evernear.console.live_labels import labeled_queries
from evernear.console.suspects import picture
from evernear.errors import IntegrityError
from evernear.serving.query_log_files import MAX_FILE_BYTES, QUERIES, closed_at, parse_file, sampled_queries

WEEKLY = 12
MAX_FILES = 50
"""Maximum number of log files to read per week, chosen at random. Files larger than
`MAX_FILE_BYTES` are skipped."""


class RandomQuery(NamedTuple):
    """A query to label, without the release's answer, which would suggest a label."""

    id: str
    image: bytes
    """A small PNG version of the image that the client sent."""


class Week(NamedTuple):
    """The random queries of the current week, which begins on Monday (UTC)."""

    labels: dict[str, str]
    """Keyed by query ID."""
    pending: list[RandomQuery]
    """The queries to label next. There are at most `WEEKLY` labeled and pending queries."""


class _Drawn(NamedTuple):
    arrival: float
    """An exponentially distributed arrival time, whose rate is the number of queries that this one
    represents. The earliest arrivals are a weighted sample without replacement (Efraimidis and
    Spirakis 2006, doi:10.1016/j.ipl.2005.11.003). The time is derived from the query ID, so that
    all users see the same queries."""
    id: str
    log: ObjectInfo


class RandomQueries:
    """The random queries of a store. Those from a log file are cached until the file changes, for
    example because `evernear forget` deletes an image."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._drawn: dict[ObjectInfo, tuple[str, list[_Drawn]]] = {}
        self._images: dict[_Drawn, bytes | None] = {}

    def this_week(self, version: str, now: datetime) -> Week:
        """The queries of this week that the release ``version`` answered. Damaged files and images
        are skipped."""
        monday = _monday(now)
        drawn = {each.id: each for each in sorted(self._of_release(version, monday))}
        known = {query.id: query.label for query in labeled_queries(self._store, monday).queries}
        labels = {each: known[each] for each in drawn if each in known}
        pending: list[RandomQuery] = []
        images: dict[_Drawn, bytes | None] = {}
        for each in drawn.values():
            if len(labels) + len(pending) >= WEEKLY:
                break
            if each.id not in labels:
                images[each] = image = self._image(each)
                if image is not None:
                    pending.append(RandomQuery(each.id, image))
        self._images = images
        return Week(labels, pending)

    def _of_release(self, version: str, monday: datetime) -> Iterator[_Drawn]:
        logs = (info for info in self._store.list(QUERIES) if info.size_bytes <= MAX_FILE_BYTES)
        of_week = [info for info in logs if (closed := closed_at(info.key)) and closed >= monday]
        chosen = sorted(of_week, key=lambda info: sha256_bytes(info.key.encode()))[:MAX_FILES]
        self._drawn = {info: self._drawn.get(info) or self._draw(info) for info in chosen}
        for answered_by, drawn in self._drawn.values():
            if answered_by == version:
                yield from drawn

    def _draw(self, log: ObjectInfo) -> tuple[str, list[_Drawn]]:
        """The release that answered the queries in a log file, and those queries whose image file
        was logged, with arrival times."""
        stored = self._store.find(log.key)  # the file may have been removed since
        try:
            period, rows = parse_file(stored[0] if stored else b"", log.key)
        except IntegrityError:  # the watcher reports the damage
            return "", []
        ids = [row.id for row in rows if row.id and row.file]
        return period.version, [_Drawn(_arrival(each, period.queries / len(ids)), each, log) for each in ids]

    def _image(self, drawn: _Drawn) -> bytes | None:
        if drawn not in self._images:
            stored = self._store.find(drawn.log.key)
            queries = sampled_queries(stored[0], drawn.log.key) if stored else []
            file = next((query.file for query in queries if query.id == drawn.id), None)
            return picture(lambda _: file, drawn.id)
        return self._images[drawn]


def _arrival(query: str, rate: float) -> float:
    uniform = (int(sha256_bytes(query.encode())[:13], 16) + 0.5) / 16**13
    return -math.log(uniform) / rate


def _monday(now: datetime) -> datetime:
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=today.weekday())
