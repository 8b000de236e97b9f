"""The logged live queries of a release."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evernear.common.store import Store, open_store
from evernear.serving.live_queries import LIVE_DAYS, live_distances
from evernear.serving.query_log_files import QUERIES, LoggedQuery, Period

VERSION = "20260101.000000.00000000"
CHAMPION: Any = SimpleNamespace(name=VERSION, threshold=0.5)


def log(store: Store, version: str, until: datetime, distances: list[float]) -> None:
    """Write one file of the query log."""
    rows = [LoggedQuery(at=until, pred="a", dist=distance, unknown=distance > 0.5) for distance in distances]
    unknown = sum(row.unknown for row in rows)
    period = Period(version=version, since=until, until=until, queries=len(rows), unknown=unknown)
    lines = [line.model_dump_json() for line in (period, *rows)]
    store.put(f"{QUERIES}{until:%Y%m%d}/{until:%Y%m%dT%H%M%SZ}-{version}-host-1-x.jsonl", "\n".join(lines).encode())


def test_live_distances_are_those_of_the_champion_in_the_last_days(tmp_path: Path) -> None:
    store, now = open_store(tmp_path.as_uri()), datetime.now(UTC)
    assert live_distances(store, CHAMPION) is None
    log(store, VERSION, now - timedelta(hours=1), [0.1, 0.1, 0.9])
    log(store, VERSION.replace("2026", "2025"), now - timedelta(hours=1), [0.3])
    log(store, VERSION, now - timedelta(days=LIVE_DAYS + 2), [0.3])
    live = live_distances(store, CHAMPION)
    assert live is not None
    assert (live.release, live.queries, live.unknown, live.threshold) == (VERSION, 3, 1, 0.5)
    assert {number: count for number, count in enumerate(live.histogram) if count} == {2: 2, 22: 1}
