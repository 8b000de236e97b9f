"""Stored live queries: their distances, and the answers of the candidate to them."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from evernear.common.store import Store, open_store
from evernear.data.preprocess import Resize
from evernear.evaluation.evaluate import ReleasedSystem
from evernear.evaluation.recognizer import Recognizer
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving.live_queries import LIVE_DAYS, live_distances
from evernear.serving.query_log_files import LoggedQuery, Period
from evernear.serving.replay import NEAR_DUPLICATE, UNREADABLE, replay, stored_queries
from tests.dataset_images import saved
from tests.releases import PackedRelease, System

NOW = datetime.now(UTC)
VERSION = "20260101.000000.00000000"
MAX_PIXELS = 10_000


def png(pixels: NDArray[np.uint8]) -> bytes:
    return saved(Image.fromarray(pixels[:, :, 0]))


def put_file(store: Store, version: str, at: datetime, rows: Sequence[LoggedQuery]) -> None:
    """Write one file of the query log."""
    period = Period(version=version, since=at, until=at, queries=len(rows), unknown=sum(row.unknown for row in rows))
    lines = "".join(row.model_dump_json() + "\n" for row in [period, *rows])
    store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{version}-host-1-0.jsonl", lines.encode())


def log_queries(store: Store, files: Sequence[bytes], version: str, pred: str = "0", age: timedelta = timedelta()):
    encoded = [base64.b64encode(file).decode() for file in files]
    rows = [LoggedQuery(at=NOW, pred=pred, dist=0.1, unknown=False, file=file) for file in encoded]
    put_file(store, version, NOW - age, rows)


def unlabeled(*distances: float) -> list[LoggedQuery]:
    return [LoggedQuery(at=NOW, pred="a", dist=distance, unknown=distance > 0.5) for distance in distances]


@pytest.fixture(scope="module")
def champion(system: System, release: PackedRelease, tmp_path_factory: pytest.TempPathFactory) -> ReleasedSystem:
    parts = open_release(release.archive, tmp_path_factory.mktemp("champion") / "release")
    recognizer = Recognizer.open(parts.directory, parts.directory, release.version)
    return ReleasedSystem(cropping(recognizer), system.dataset)


@pytest.fixture
def serving_store(tmp_path: Path, release: PackedRelease) -> Store:
    store = open_store((tmp_path / "store").as_uri())
    Registry(store).publish(release.archive)
    Registry(store).set_champion(release.version, None)
    return store


@pytest.fixture(scope="module")
def candidate(system: System) -> Recognizer:
    return cropping(Recognizer.open(system.network_dir, system.index_dir))


def cropping(recognizer: Recognizer, resize: Resize = "crop") -> Recognizer:
    return replace(recognizer, preprocessing=recognizer.preprocessing.model_copy(update={"resize": resize}))


@pytest.fixture(scope="module")
def large_queries(system: System) -> list[bytes]:
    """Digits of the gallery as a camera sends them: larger, and twice as wide as high, with a
    margin at both sides."""
    images = np.concatenate([block.images for block in system.dataset.blocks("gallery")])[:250]
    return [png(np.pad(image.repeat(2, 0).repeat(2, 1), ((0, 0), (8, 8), (0, 0)))) for image in images]


def test_the_same_release_changes_no_answer(
    serving_store: Store, champion: ReleasedSystem, candidate: Recognizer, large_queries: list[bytes]
):
    log_queries(serving_store, large_queries, "other")
    counts, examples = replay(candidate, champion, serving_store, MAX_PIXELS)
    assert counts.changed == 0
    assert counts.queries + counts.left_out.get(NEAR_DUPLICATE, 0) == len(large_queries)
    assert counts.queries > 100
    assert not examples.answers


def test_another_preprocessing_changes_answers(
    serving_store: Store, system: System, champion: ReleasedSystem, candidate: Recognizer, large_queries: list[bytes]
):
    log_queries(serving_store, large_queries, "other")
    counts, examples = replay(cropping(candidate, "stretch"), champion, serving_store, MAX_PIXELS)
    assert counts.changed > 20
    assert len(examples.answers) == min(24, counts.changed)
    shown = examples.answers[0]
    assert shown.before in system.dataset.labels
    assert not shown.before_unknown
    assert (shown.before, shown.before_unknown) != (shown.after, shown.after_unknown)


def test_the_logged_answer_of_the_champion_counts(
    serving_store: Store, champion: ReleasedSystem, candidate: Recognizer, large_queries: list[bytes]
):
    log_queries(serving_store, large_queries, champion.recognizer.name, pred="0")
    counts, examples = replay(candidate, champion, serving_store, MAX_PIXELS)
    assert counts.changed > 100
    assert {answer.before for answer in examples.answers} == {"0"}


def test_damaged_files_and_near_duplicates_are_left_out_and_counted(
    serving_store: Store, champion: ReleasedSystem, candidate: Recognizer, large_queries: list[bytes]
):
    blank = np.full((16, 16, 1), 7, np.uint8)
    log_queries(serving_store, [b"no image", large_queries[0], large_queries[0], png(blank), png(blank + 1)], "other")
    serving_store.put("queries/20260101/20260101T000000Z-v-host-1-0.jsonl", b"damaged")
    counts, _ = replay(candidate, champion, serving_store, MAX_PIXELS)
    assert counts.left_out == {UNREADABLE: 1, NEAR_DUPLICATE: 1}
    assert counts.queries == 3


def test_the_newest_queries_are_replayed(serving_store: Store, large_queries: list[bytes]):
    for day in range(3):
        log_queries(serving_store, large_queries[10 * day : 10 * day + 10], f"v{day}", age=timedelta(days=day))
    queries = stored_queries(serving_store, 15)
    assert [query.file for query in queries] == large_queries[:15]
    assert [query.version for query in queries] == ["v0"] * 10 + ["v1"] * 5


def test_live_distances_are_those_of_the_champion_in_the_last_days(tmp_path: Path) -> None:
    store, now = open_store(tmp_path.as_uri()), datetime.now(UTC)
    champion: Any = SimpleNamespace(name=VERSION, threshold=0.5)
    assert live_distances(store, champion) is None
    put_file(store, VERSION, now - timedelta(hours=1), unlabeled(0.1, 0.1, 0.9))
    put_file(store, VERSION.replace("2026", "2025"), now - timedelta(hours=1), unlabeled(0.3))
    put_file(store, VERSION, now - timedelta(days=LIVE_DAYS + 2), unlabeled(0.3))
    live = live_distances(store, champion)
    assert live is not None
    assert (live.release, live.queries, live.unknown, live.threshold) == (VERSION, 3, 1, 0.5)
    assert {number: count for number, count in enumerate(live.histogram) if count} == {2: 2, 22: 1}
