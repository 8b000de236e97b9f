"""Random live queries to label: which ones, how many, and with what weight."""

import base64
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from evernear.common.store import Store
from evernear.review.live_labels import WEEKLY, RandomQueries, import_labels
from evernear.serving.query_log_files import QUERIES, LoggedQuery, Period
from tests.review_queue import png

WEDNESDAY = datetime(2026, 2, 4, 12, tzinfo=UTC)


def log(
    store: Store, ids: list[str], *, queries: int = 100, version: str = "v", at: datetime = WEDNESDAY, file: bytes = b""
) -> None:
    """A log file of ``queries``, of which those with ``ids`` are in the uniform sample of files."""
    period = Period(version=version, since=at, until=at, queries=queries, unknown=0)
    sent = base64.b64encode(file or png(1)).decode()
    rows = [LoggedQuery(at=at, pred="cat", dist=0.1, unknown=False, id=each, file=sent) for each in ids]
    rows.append(LoggedQuery(at=at, pred="cat", dist=0.1, unknown=False, id=f"{ids[0]}-without-a-file"))
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{version}-host-1-{ids[0]}.jsonl", lines.encode())


def test_twelve_queries_of_the_release_a_week_until_they_have_labels(store: Store) -> None:
    log(store, [f"a{number}" for number in range(20)])
    log(store, [f"b{number}" for number in range(20)], version="other")
    log(store, [f"c{number}" for number in range(20)], at=WEDNESDAY - timedelta(days=3))
    queries = RandomQueries(store)
    week = queries.this_week("v", WEDNESDAY)
    shown = [query.id for query in week.pending]
    assert len(set(shown)) == WEEKLY
    assert all(each.startswith("a") and "without" not in each for each in shown), "of this week and this release"
    assert [query.id for query in RandomQueries(store).this_week("v", WEDNESDAY).pending] == shown, "for everyone alike"
    assert week.pending[0].image.startswith(b"\x89PNG")

    import_labels(store, {shown[3]: "cat", shown[0]: "dog", "b1": "cat"}, WEDNESDAY)
    week = queries.this_week("v", WEDNESDAY)
    assert week.labels == {shown[0]: "dog", shown[3]: "cat"}
    assert [query.id for query in week.pending] == [each for each in shown if each not in week.labels]
    import_labels(store, dict.fromkeys(shown, "cat"), WEDNESDAY)
    assert queries.this_week("v", WEDNESDAY).pending == []
    assert queries.this_week("v", WEDNESDAY + timedelta(days=7)) == ({}, [])


def test_image_that_was_deleted_from_a_log_file_is_no_longer_shown(store: Store) -> None:
    log(store, ["a1", "a2"])
    queries = RandomQueries(store)
    assert {query.id for query in queries.this_week("v", WEDNESDAY).pending} == {"a1", "a2"}
    (info,) = store.list(QUERIES)
    lines = store.get(info.key).decode().splitlines(keepends=True)
    store.put(info.key, "".join(line for line in lines if '"a2"' not in line).encode())
    assert {query.id for query in queries.this_week("v", WEDNESDAY).pending} == {"a1"}


def test_query_is_as_likely_in_a_busy_period_as_in_a_quiet_one(store: Store) -> None:
    """Both files have 20 queries: of 1,000 and of 200. Five of six queries to label are of the busy
    period."""
    shares: Counter[str] = Counter()
    for week in range(60):
        at = WEDNESDAY + timedelta(days=7 * week)
        log(store, [f"busy-{week}-{number}" for number in range(20)], queries=1000, at=at)
        log(store, [f"quiet-{week}-{number}" for number in range(20)], queries=200, at=at)
        first = RandomQueries(store).this_week("v", at).pending[:2]
        shares.update(query.id.split("-")[0] for query in first)
    assert shares["busy"] / shares.total() == pytest.approx(5 / 6, abs=0.1)


def test_broken_images_and_damaged_files_are_skipped(store: Store) -> None:
    log(store, ["broken"], queries=10**9, file=b"no image")
    log(store, ["not-base64"], queries=10**9)
    (key,) = (info.key for info in store.list(QUERIES) if "not-base64" in info.key)
    store.put(key, store.get(key).replace(b'"file":"', b'"file":"%'))
    log(store, ["whole"], queries=1)
    store.put("queries/20260204/20260204T120000Z-v-host-2-0.jsonl", b"damaged")
    queries = RandomQueries(store)
    assert [query.id for query in queries.this_week("v", WEDNESDAY).pending] == ["whole"]
    for info in list(store.list("queries/")):
        store.delete(info.key)
    assert queries.this_week("v", WEDNESDAY).pending == []
