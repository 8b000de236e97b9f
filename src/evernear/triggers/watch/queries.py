"""The live queries of a release, as the servers' logs in the store tell of them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np

from evernear.data.drift import Queries
from evernear.errors import IntegrityError
from evernear.release.drift_baseline import DriftBaseline
from evernear.serving.query_log import MAX_FILE_BYTES, QUERIES, LoggedQuery, Period, closed_at, parse_file
from evernear.store import ObjectInfo, Store

MAX_FILES = 200
"""Files that are read for one window, evenly over it: some 10 MB."""


def live_queries(store: Store, version: str, since: datetime, until: datetime) -> tuple[Queries, list[str]]:
    """The queries that ``version`` answered in a window, and a sentence for each fault.

    The sample is uniform over all queries of the files read: a file that kept a larger share of its period's queries
    gives up the surplus.

    Raises:
        StoreError: the store cannot be read.
    """
    files = [info for info in _files(store, since, until) if f"-{version}-" in info.key]
    step = max(1, -(-len(files) // MAX_FILES))
    periods: list[tuple[Period, list[LoggedQuery]]] = []
    faults: list[str] = []
    for info in files[::step]:
        place = f"{store.uri}/{info.key}"
        try:
            if info.size_bytes > MAX_FILE_BYTES:
                raise IntegrityError(f"{place} is too large for a file of the query log.")
            found = store.find(info.key)
            if found is not None:  # else it was removed meanwhile
                periods.append(parse_file(found[0], place))
        except IntegrityError as error:
            faults.append(str(error))
    return _together([(period, rows) for period, rows in periods if rows and period.version == version]), faults


def reference_queries(reference: DriftBaseline) -> Queries:
    """A release's reference, to compare with."""
    return Queries(
        total=len(reference.unknown),
        unknown=int(reference.unknown.sum()),
        distances=reference.distances,
        coordinates=reference.coordinates,
    )


def remove_before(store: Store, before: datetime) -> int:
    """Remove files that were closed before ``before``, and tell how many.

    Raises:
        StoreError: the store refuses.
    """
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


def _together(periods: list[tuple[Period, list[LoggedQuery]]]) -> Queries:
    rng = np.random.default_rng(0)
    share = min((len(rows) / period.queries for period, rows in periods), default=0.0)
    kept: list[LoggedQuery] = []
    for period, rows in periods:
        # Rounded up as often as it takes for the mean to be right.
        count = min(len(rows), int(share * period.queries + rng.random()))
        kept += [rows[row] for row in sorted(rng.choice(len(rows), count, replace=False))]
    dim = min((len(row.coordinates) for row in kept), default=0)
    return Queries(
        total=sum(period.queries for period, _ in periods),
        unknown=sum(period.unknown for period, _ in periods),
        distances=np.array([row.dist for row in kept], np.float32),
        coordinates=np.array([row.coordinates[:dim] for row in kept], np.float32).reshape(len(kept), dim),
    )
