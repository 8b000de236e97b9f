"""True labels of live queries, keyed by the ID in the answer, in
``live-labels/<time>-<random>.jsonl`` in the store, and the random queries that people label.

A label is stored together with the logged answer, because the query log is deleted after some time.
Images are neither read nor stored, and no label enters a dataset. The random queries come from the
uniform sample of image files in the query log (`evernear.serving.query_log`), regardless of the
release's answers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias
from uuid import uuid4

from pydantic import StringConstraints

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.common.store import ObjectInfo, Store
from evernear.common.text import class_name, column_positions, csv_rows
from evernear.errors import DataError, IntegrityError, StoreError
from evernear.evaluation.examples import Examples
from evernear.evaluation.live_accuracy import LabeledQuery, LiveAccuracy, accuracy_by_week
from evernear.evaluation.measure import Measurement
from evernear.release.manifest import version_time
from evernear.release.registry import Registry
from evernear.review.queue import logged_picture
from evernear.serving.live_queries import live_distances
from evernear.serving.query_log_files import QUERIES, closed_at, is_log, read_log

LIVE_LABELS = "live-labels/"
_COLUMNS = ("id", "label")
_TIME = "%Y%m%dT%H%M%S%fZ"
_REMEDY = "delete it and import its labels again"
_CLOCK_TOLERANCE = timedelta(days=1)
"""Largest expected difference between the clocks of the machines that create releases and those
that import labels."""


_Text: TypeAlias = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]
Labels: TypeAlias = dict[_Text, _Text]
"""The true label of each query, keyed by query ID, as a type for `pydantic.TypeAdapter`."""
WEEKLY = 12
WEEK_FILES = 50
"""Maximum number of log files to read per week, chosen at random."""


class ImportedLabels(Frozen):
    stored: int
    """Number of labels that are in the store, including equal ones from before."""
    missing: tuple[str, ...]
    """IDs that are neither in the query log nor labeled before, because the query was not sampled,
    was deleted, or has not been shipped yet."""
    is_sample: bool
    """Whether servers answered more queries than the log has, so that its sample may lack some."""
    unknown_classes: tuple[str, ...] = ()
    """Labels that are not a class of the release that answered. Its answer then counts as wrong."""


class LabelFile(NamedTuple):
    """The rows of a file of labels, which may be a growing log. A later row for an id corrects an
    earlier one."""

    labels: dict[str, str]
    corrected: tuple[str, ...]
    without_label: int
    without_id: int


def read_labels(path: Path) -> LabelFile:
    """Read a CSV file with the columns ``id`` and ``label``."""
    rows = csv_rows(path, str(path))
    at = column_positions(next(rows)[1], str(path), _COLUMNS)
    labels: dict[str, str] = {}
    corrected: dict[str, None] = {}
    without_label = without_id = 0
    for _, cells in rows:
        query, label = cells[at["id"]].strip(), class_name(cells[at["label"]])
        if not query:
            without_id += 1
        elif not label:
            without_label += 1
        else:
            if labels.get(query, label) != label:
                corrected[query] = None
            labels[query] = label
    return LabelFile(labels, tuple(corrected), without_label, without_id)


def import_labels(
    store: Store, labels: Mapping[str, str], now: datetime, *, keep_corrections: bool = False
) -> ImportedLabels:
    """Store the labels of logged queries, keyed by query ID. A label that differs from an earlier
    one replaces it, even if the query is no longer in the log. An equal one counts as stored and
    changes nothing, so a growing file can be imported repeatedly. With ``keep_corrections``, so
    does the label that a user has corrected."""
    labels = {query: class_name(label) for query, label in labels.items()}
    logged, is_sample = _logged(store, labels, now)
    # a label is imported after its query was answered
    since = min((query.at for query in logged), default=now) - _CLOCK_TOLERANCE
    earlier = labeled_queries(store, since if len(logged) == len(labels) else None).queries
    labeled = {query.id: query for query in earlier if query.id in labels}
    given = {query.id: query.first_label for query in labeled.values() if keep_corrections and query.is_corrected}
    labels |= {query: labeled[query].label for query, first in given.items() if labels[query] == first}
    change = {"labeled_at": now, "first_label": ""}
    relabeled = [query.model_copy(update={**change, "label": labels[query.id]}) for query in labeled.values()]
    answered = {query.id: query for query in [*logged, *relabeled]}
    new = [query for query in answered.values() if query.id not in labeled or labeled[query.id].label != query.label]
    _save(store, new, now)
    return ImportedLabels(
        stored=len(answered),
        missing=tuple(query for query in labels if query not in answered),
        is_sample=is_sample,
        unknown_classes=tuple(_unknown_classes(store, list(answered.values()))),
    )


def correct_label(store: Store, query: LabeledQuery, label: str, now: datetime) -> None:
    """Store the label of a user who sees the release's answer. An equal label is kept."""
    label = class_name(label)
    corrected = {"label": label, "first_label": query.label}
    at = now if label != query.label else query.labeled_at
    _save(store, [query.model_copy(update={**corrected, "labeled_at": at})], now)


def _save(store: Store, queries: Sequence[LabeledQuery], now: datetime) -> None:
    if queries:
        lines = "".join(f"{query.model_dump_json()}\n" for query in queries)
        store.put(f"{LIVE_LABELS}{now.astimezone(UTC):{_TIME}}-{uuid4().hex[:8]}.jsonl", lines.encode())


def _logged(store: Store, labels: Mapping[str, str], now: datetime) -> tuple[list[LabeledQuery], bool]:
    """The queries in the log, and whether the files that were read for them are only a sample."""
    missing, dropped = dict(labels), 0
    found: list[LabeledQuery] = []
    keys = [info.key for info in store.list(QUERIES) if is_log(info)]
    for key in sorted(keys, reverse=True):
        if not missing:
            break
        log = read_log(store, key)
        if log is None:
            continue
        period, queries = log
        dropped += period.queries - len(queries)
        found += [
            LabeledQuery(
                id=query.id,
                at=query.at,
                version=period.version,
                pred=query.pred,
                unknown=query.unknown,
                dist=query.dist,
                log=key if query.image or query.file else "",
                label=missing.pop(query.id),
                labeled_at=now,
            )
            for query in queries
            if query.id in missing
        ]
    return found, dropped > 0


def _unknown_classes(store: Store, queries: Sequence[LabeledQuery]) -> list[str]:
    """Labels that are not a class of the release that answered the query. Without a readable record
    of this release, they are not checked."""
    classes: dict[str, tuple[str, ...]] = {}
    for version in {query.version for query in queries}:
        with suppress(StoreError, IntegrityError):
            classes[version] = Registry(store).get(version, include_pruned=True).manifest.labels
    return sorted({query.label for query in queries if query.label not in classes.get(query.version, (query.label,))})


class LabeledQueries(NamedTuple):
    """The labeled live queries in a store, each with its newest label, in the order in which these
    labels were imported."""

    queries: list[LabeledQuery]
    damaged: dict[str, str]

    def of(self, version: str) -> list[LabeledQuery]:
        return [query for query in self.queries if query.version == version]


def labeled_queries(store: Store, since: datetime | None = None) -> LabeledQueries:
    newest: dict[str, LabeledQuery] = {}
    damaged: dict[str, str] = {}
    first = LIVE_LABELS if since is None else f"{LIVE_LABELS}{since.astimezone(UTC):{_TIME}}"
    for key in sorted(info.key for info in store.list(LIVE_LABELS) if info.key >= first):
        try:
            lines = store.get(key).splitlines()
            queries = [LabeledQuery.from_json(line, f"{store.uri}/{key}", _REMEDY) for line in lines]
        except IntegrityError as error:
            damaged[key] = str(error)
        else:
            for query in queries:
                if query.id in newest and newest[query.id].labeled_at != query.labeled_at:
                    newest.pop(query.id)  # a newer label of the query moves it to the end
                newest[query.id] = query
    return LabeledQueries(list(newest.values()), damaged)


def labels_of_release(store: Store, version: str) -> LabeledQueries:
    labels = labeled_queries(store, version_time(version) - _CLOCK_TOLERANCE)
    return labels._replace(queries=labels.of(version))


def with_live_figures(examples: Examples, store: Store, champion: Measurement | None) -> Examples:
    if champion is None:
        return examples
    weeks, _ = live_accuracy(store, champion.name)  # the watcher reports damaged files
    return examples.model_copy(update={"live": live_distances(store, champion), "live_accuracy": weeks})


def live_accuracy(store: Store, version: str) -> tuple[tuple[LiveAccuracy, ...], tuple[str, ...]]:
    """The weekly accuracy of a release, newest week first, and an error message for each damaged
    file."""
    labels = labels_of_release(store, version)
    return tuple(accuracy_by_week(labels.queries)), tuple(labels.damaged.values())


class RandomQuery(NamedTuple):
    """A query to label, without the release's answer, which would suggest a label."""

    id: str
    image: bytes
    """A small PNG version of the image that the client sent."""


class Week(NamedTuple):
    """The random queries of the current week, which begins on Monday (UTC)."""

    labels: dict[str, str]
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
        logs = filter(is_log, self._store.list(QUERIES))
        of_week = [info for info in logs if (closed := closed_at(info.key)) and closed >= monday]
        chosen = sorted(of_week, key=lambda info: sha256_bytes(info.key.encode()))[:WEEK_FILES]
        self._drawn = {info: self._drawn.get(info) or self._draw(info) for info in chosen}
        for answered_by, drawn in self._drawn.values():
            if answered_by == version:
                yield from drawn

    def _draw(self, log: ObjectInfo) -> tuple[str, list[_Drawn]]:
        """The release that answered the queries in a log file, and those queries whose image file
        was logged, with arrival times."""
        read = read_log(self._store, log.key)
        if read is None:
            return "", []
        period, rows = read
        ids = [row.id for row in rows if row.id and row.file]
        return period.version, [_Drawn(_arrival(each, period.queries / len(ids)), each, log) for each in ids]

    def _image(self, drawn: _Drawn) -> bytes | None:
        if drawn in self._images:
            return self._images[drawn]
        try:
            return logged_picture(self._store, drawn.log.key, drawn.id)
        except DataError:
            return None


def _arrival(query: str, rate: float) -> float:
    uniform = (int(sha256_bytes(query.encode())[:13], 16) + 0.5) / 16**13
    return -math.log(uniform) / rate


def _monday(now: datetime) -> datetime:
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=today.weekday())
