from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from evernear.common.store import ObjectInfo, Store
from evernear.errors import IntegrityError
from evernear.evaluation.examples import LiveDistances, histogram
from evernear.evaluation.measure import Measurement
from evernear.release.drift_baseline import DriftBaseline
from evernear.serving.query_log_files import MAX_FILE_BYTES, QUERIES, LoggedQuery, Period, closed_at, parse_file

Floats = NDArray[np.float32]
LIVE_DAYS = 30
MAX_FILES = 500
"""Maximum number of files to read for a time window, evenly spaced: about 25 MB."""
WANTED = 1000
"""Sampled queries that thinning leaves in a time window. Without this minimum, a burst would cause
most queries outside it to be dropped."""


@dataclass(frozen=True)
class Queries:
    """Queries of one release. Among the ``total`` queries, ``unknown`` queries show unknown images.
    The arrays contain the predictions for a sample of N queries."""

    total: int
    unknown: int
    distances: Floats
    """Distance to the nearest gallery image, (N,)."""
    coordinates: Floats
    """Projected embeddings (N, D). D is 0 if the release has no projection."""
    is_unknown: NDArray[np.bool_]
    at_s: NDArray[np.float64]
    """Arrival times in Unix time, (N,), or zeros in a reference."""
    labels: NDArray[np.str_]

    @property
    def unknown_rate(self) -> float:
        return self.unknown / self.total if self.total else 0.0

    def __len__(self) -> int:
        return len(self.distances)

    def select(self, rows: NDArray[np.intp]) -> "Queries":
        return Queries(
            self.total,
            self.unknown,
            self.distances[rows],
            self.coordinates[rows],
            self.is_unknown[rows],
            self.at_s[rows],
            self.labels[rows],
        )


def live_queries(store: Store, version: str, since: datetime, until: datetime) -> tuple[Queries, list[str]]:
    """A release's live queries in a time window, and a message for each damaged file.

    They are a uniform sample of all queries in the periods that the files cover, if enough remain.
    Files with a larger share of their period's queries than the busiest file are thinned to its
    share, but at least `WANTED` queries remain.
    """
    files = [info for info in _files(store, since, until) if f"-{version}-" in info.key]
    step = max(1, -(-len(files) // MAX_FILES))
    periods: list[tuple[Period, list[LoggedQuery]]] = []
    faults: list[str] = []
    for info in files[::step]:
        source = f"{store.uri}/{info.key}"
        try:
            if info.size_bytes > MAX_FILE_BYTES:
                raise IntegrityError(f"{source} is too large for a query log.")
            stored = store.find(info.key)
            if stored is not None:  # the file may have been removed since
                periods.append(parse_file(stored[0], source))
        except IntegrityError as error:
            faults.append(str(error))
    return _combine([(period, rows) for period, rows in periods if rows and period.version == version]), faults


def live_distances(store: Store, champion: Measurement) -> LiveDistances | None:
    """The distances of the champion's queries in the last `LIVE_DAYS` days, None without any."""
    now = datetime.now(UTC)
    queries, _ = live_queries(store, champion.name, now - timedelta(days=LIVE_DAYS), now)
    if not len(queries.distances):
        return None
    return LiveDistances(
        release=champion.name,
        queries=queries.total,
        unknown=queries.unknown,
        threshold=champion.threshold,
        histogram=tuple(histogram(queries.distances).tolist()),
    )


def reference_queries(reference: DriftBaseline) -> Queries:
    return Queries(
        total=len(reference.unknown),
        unknown=int(reference.unknown.sum()),
        distances=reference.distances,
        coordinates=reference.coordinates,
        is_unknown=reference.unknown,
        at_s=np.zeros(len(reference.unknown)),
        labels=reference.labels,
    )


def remove_before(store: Store, before: datetime) -> int:
    """Remove query log files that were closed before ``before``, and return how many."""
    old = [info.key for info in store.list(QUERIES) if (at := closed_at(info.key)) is not None and at < before]
    for key in old:
        store.delete(key)
    return len(old)


def _files(store: Store, since: datetime, until: datetime) -> Iterator[ObjectInfo]:
    day = since.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    while day <= until:
        for info in store.list(f"{QUERIES}{day:%Y%m%d}/"):
            at = closed_at(info.key)
            if at is not None and since <= at <= until:
                yield info
        day += timedelta(days=1)


def _combine(periods: list[tuple[Period, list[LoggedQuery]]]) -> Queries:
    rng = np.random.default_rng(0)
    share = _share(periods)
    sampled: list[LoggedQuery] = []
    for period, rows in periods:
        # Round randomly, so that the expected count is exact.
        count = min(len(rows), int(share * period.queries + rng.random()))
        sampled += [rows[row] for row in sorted(rng.choice(len(rows), count, replace=False))]
    dim = min((len(row.coordinates) for row in sampled), default=0)
    return Queries(
        total=sum(period.queries for period, _ in periods),
        unknown=sum(period.unknown for period, _ in periods),
        distances=np.array([row.dist for row in sampled], np.float32),
        coordinates=np.array([row.coordinates[:dim] for row in sampled], np.float32).reshape(len(sampled), dim),
        is_unknown=np.array([row.unknown for row in sampled], np.bool_),
        labels=np.array([row.pred for row in sampled], np.str_),
        at_s=np.array([row.at.timestamp() for row in sampled], np.float64),
    )


def _share(periods: list[tuple[Period, list[LoggedQuery]]]) -> float:
    """The share of queries to use from each period: the busiest file's, or the next larger one that
    leaves at least `WANTED` queries."""
    if not periods:
        return 0.0
    rows = np.array([len(rows) for _, rows in periods], np.float64)
    queries = np.array([period.queries for period, _ in periods], np.float64)
    order = np.argsort(rows / queries)
    rows, queries = rows[order], queries[order]
    # A share takes all rows of the files that sampled less, and this share of the others.
    left = rows.cumsum() + rows / queries * (queries.sum() - queries.cumsum())
    enough = np.flatnonzero(left >= WANTED)
    position = enough[0] if len(enough) else -1
    return float(rows[position] / queries[position])
