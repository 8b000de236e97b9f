"""The log of live queries: its content, its limits, and the log of a real server."""

import base64
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image

from evernear.common.frozen import stamp
from evernear.common.store import open_store
from evernear.errors import IntegrityError
from evernear.release.archive_reader import ReleaseParts
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE
from evernear.serving import query_log
from evernear.serving.client import Client
from evernear.serving.configuration import (
    QUERY_LOG_FILE,
    QUERY_LOG_SAMPLE,
    QUERY_LOG_VARIABLE,
    QueryLogConfiguration,
    logged_queries,
    write_configuration,
)
from evernear.serving.core import Predictor
from evernear.serving.endpoints import read_state
from evernear.serving.query_log import SENT_MAX_BYTES, SENT_MAX_FILES, QueryLog, Request, ship_query_log, ship_until
from evernear.serving.query_log_files import (
    MAX_FILE_BYTES,
    LoggedQuery,
    Period,
    closed_at,
    decode_embedding,
    parse_file,
    sampled_queries,
)
from evernear.serving.responses import Neighbor, Prediction
from evernear.settings import ServingSettings
from tests.releases import MakeRelease
from tests.served import Served, serving
from tests.waiting import until


def configuration(directory: Path, **changes: object) -> QueryLogConfiguration:
    values = {"directory": directory, "images": False, "sample": 50, "period_s": 60.0, "size_bytes": 2**20}
    return QueryLogConfiguration.model_validate(values | changes)


def write(log: QueryLog) -> bytes:
    """The file that the log writes."""
    path = log.write_file()
    assert path is not None
    return path.read_bytes()


def write_rows(log: QueryLog) -> list[LoggedQuery]:
    return parse_file(write(log), "here")[1]


def make_prediction(dist: float = 0.1, unknown: bool = False) -> Prediction:
    return Prediction(pred="7", dist=dist, unknown=unknown, neighbors=(), version="v")


def test_file_contains_the_predictions(parts: ReleaseParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_log, "is_uncertain", lambda prediction, threshold: True)
    core, log = Predictor.open(parts), QueryLog(configuration(tmp_path, images=True), parts)
    images = [image for image, _ in parts.smoke_queries()]
    batch = core.predict_batch([images[0], b"no image", *images[1:]])
    predictions = [answer for answer in batch.responses if isinstance(answer, Prediction)]
    begin = datetime.now(UTC)
    log.record(predictions, batch.embeddings, batch.images)
    path = log.write_file()
    assert path is not None
    period, rows = parse_file(path.read_bytes(), str(path))
    assert (period.version, period.queries) == (parts.manifest.version, len(images))
    assert period.unknown == sum(prediction.unknown for prediction in predictions)
    assert period.since <= begin <= period.until
    assert [(row.pred, row.dist, row.unknown) for row in rows] == [(p.pred, p.dist, p.unknown) for p in predictions]
    assert batch.embeddings is not None
    assert batch.images is not None
    projection = DriftBaseline.parse(parts.read(DRIFT_BASELINE_FILE), "here").projection
    assert np.array([row.coordinates for row in rows]) == pytest.approx(batch.embeddings @ projection, abs=1e-4)
    for row, pixels in zip(rows, batch.images, strict=True):
        logged = np.asarray(Image.open(BytesIO(base64.b64decode(row.image))))
        assert (logged == pixels[:, :, 0]).all()
    logged = [decode_embedding(row.embedding) for row in rows]
    assert np.array(logged) == pytest.approx(batch.embeddings, abs=1e-3), "in half precision"
    at = closed_at(path.name)
    assert at is not None
    assert abs(at - period.until) <= timedelta(seconds=1)
    assert log.write_file() is None, "no new query"


def test_images_are_logged_only_if_enabled(parts: ReleaseParts, tmp_path: Path) -> None:
    assert ServingSettings().query_log == "figures"
    log = QueryLog(configuration(tmp_path), parts)
    pixels = np.zeros((1, 8, 8, 1), np.uint8)
    log.record([make_prediction()], np.zeros((1, 16), np.float32), pixels, [Request("id-1", b"file")])
    data = write(log)
    (row,) = parse_file(data, "here")[1]
    assert (row.image, row.embedding, sampled_queries(data, "here")) == ("", "", [])


def test_large_embeddings_count_among_the_bytes_of_images(parts: ReleaseParts, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(query_log, "_projection", lambda release: np.zeros((4096, 16), np.float32))
    log = QueryLog(configuration(tmp_path, images=True, sample=2000), parts)
    embeddings = np.ones((2000, 4096), np.float32)
    log.record([make_prediction(unknown=True)] * 2000, embeddings, np.zeros((2000, 8, 8, 1), np.uint8))
    data = write(log)
    assert len(data) < MAX_FILE_BYTES
    with_images = [row for row in parse_file(data, "here")[1] if row.image]
    assert 100 < len(with_images) < 2000
    assert all(row.embedding for row in with_images)


def test_only_uncertain_queries_are_logged_with_images(parts: ReleaseParts, tmp_path: Path) -> None:
    threshold = parts.manifest.threshold
    far, other = Neighbor(label="7", dist=threshold, row=0), Neighbor(label="1", dist=0.55 * threshold, row=1)
    certain = Prediction(pred="7", dist=0.4 * threshold, unknown=False, neighbors=(far, other), version="v")
    predictions = [
        certain,
        certain.model_copy(update={"dist": 0.5 * threshold}),
        certain.model_copy(update={"dist": 0.95 * threshold, "neighbors": ()}),
        certain.model_copy(update={"unknown": True}),
    ]
    log = QueryLog(configuration(tmp_path, images=True), parts)
    log.record(predictions, np.zeros((4, 16), np.float32), np.zeros((4, 8, 8, 1), np.uint8))
    rows = write_rows(log)
    assert [bool(row.image) for row in rows] == [False, True, True, True]
    assert [row.candidates for row in rows] == [(), ("7", "1"), ("7",), ("7", "1")]


def test_sample_is_bounded_and_uniform(parts: ReleaseParts, tmp_path: Path) -> None:
    from scipy.stats import chisquare  # takes seconds to import

    log = QueryLog(configuration(tmp_path, sample=20), parts)
    log._random = random.Random(1)
    sampled: Counter[int] = Counter()
    for _ in range(80):
        for start in range(0, 100, 10):
            log.record([make_prediction(dist=number / 100) for number in range(start, start + 10)], None, None)
        period, rows = parse_file(write(log), "here")
        assert (period.queries, len(rows)) == (100, 20)
        sampled.update(round(row.dist * 100) for row in rows)
    assert set(sampled) == set(range(100))
    assert chisquare([sampled[number] for number in range(100)]).pvalue > 1e-4


def test_files_of_clients_are_a_uniform_sample_with_ids(parts: ReleaseParts, tmp_path: Path) -> None:
    from scipy.stats import chisquare  # takes seconds to import

    log = QueryLog(configuration(tmp_path, images=True, sample=100), parts)
    log._random = random.Random(1)
    sampled: Counter[int] = Counter()
    for _ in range(100):
        requests = [Request(f"id-{number}", b"%d" % number * (1 + 300 * (number % 2))) for number in range(200)]
        log.record([make_prediction()] * 200, None, None, requests)
        queries = sampled_queries(write(log), "here")
        assert len(queries) == SENT_MAX_FILES
        assert all(query.file == requests[int(query.id[3:])].file for query in queries)
        assert all((query.pred, query.version) == ("7", parts.manifest.version) for query in queries)
        sampled.update(int(query.id[3:]) for query in queries)
    assert chisquare([sampled[number] for number in range(200)]).pvalue > 1e-4


def test_pixels_are_logged_as_a_preprocessed_image(parts: ReleaseParts, tmp_path: Path) -> None:
    log = QueryLog(configuration(tmp_path, images=True), parts)
    pixels = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)
    log.record([make_prediction()], None, pixels, [Request("id-1", None)])
    (query,) = sampled_queries(write(log), "here")
    assert query.preprocessed
    assert np.array_equal(np.asarray(Image.open(BytesIO(query.file))), pixels[0, :, :, 0])


def test_large_files_neither_fill_the_sample_nor_leave_it(parts: ReleaseParts, tmp_path: Path) -> None:
    log = QueryLog(configuration(tmp_path, images=True, sample=10_000), parts)
    log._random = random.Random(1)
    large = 0
    for _ in range(8):
        sent = [bytes(SENT_MAX_BYTES + number % 2) for number in range(30)]
        requests = [Request(f"id-{number}", file) for number, file in enumerate(sent)]
        log.record([make_prediction()] * 30, None, np.zeros((30, 8, 8, 1), np.uint8), requests)
        data = write(log)
        assert len(data) < MAX_FILE_BYTES
        queries = sampled_queries(data, "here")
        assert 3 <= len(queries) <= SENT_MAX_FILES
        for query in queries:
            assert query.preprocessed == bool(int(query.id[3:]) % 2)
            if query.preprocessed:
                assert Image.open(BytesIO(query.file)).size == (8, 8)
        large += sum(query.preprocessed for query in queries)
    assert large > 8


def test_damaged_file_of_a_client_is_an_error(parts: ReleaseParts, tmp_path: Path) -> None:
    log = QueryLog(configuration(tmp_path, images=True), parts)
    log.record([make_prediction()], None, None, [Request("id-1", b"file")])
    damaged = write(log).replace(base64.b64encode(b"file"), b"????????")
    with pytest.raises(IntegrityError, match="here is not a file of the query log"):
        sampled_queries(damaged, "here")


def test_oldest_files_are_removed_beyond_the_size_limit(parts: ReleaseParts, tmp_path: Path) -> None:
    log = QueryLog(configuration(tmp_path, size_bytes=20_000), parts)
    written: list[Path] = []
    for second in range(40):
        log.record([make_prediction()] * 30, None, None)
        path = log.write_file()
        assert path is not None
        # The times in the file names are a second apart.
        written.append(path.rename(path.with_name(f"20260101T0000{second:02}Z{path.name[16:]}")))
    left = sorted(tmp_path.iterdir())
    assert left == written[-len(left) :]
    assert 3 < len(left) < 40
    assert sum(path.stat().st_size for path in left[:-1]) <= 20_000


def test_concurrent_workers_lose_nothing(parts: ReleaseParts, tmp_path: Path) -> None:
    def work() -> None:
        log = QueryLog(configuration(tmp_path), parts)
        for _ in range(25):
            log.record([make_prediction(unknown=True)], None, None)
            log.write_file()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: work(), range(4)))
    periods = [parse_file(path.read_bytes(), str(path))[0] for path in tmp_path.iterdir()]
    assert sum(period.queries for period in periods) == sum(period.unknown for period in periods) == 100


@pytest.fixture
def idle_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test, the thread that writes files waits for the end of the process."""
    ended, idle = threading.Event(), threading.Event()

    def pause(seconds: float) -> None:
        if ended.wait(seconds):
            idle.set()
            threading.Event().wait()

    monkeypatch.setattr(query_log, "time", SimpleNamespace(time=time.time, sleep=pause))
    yield
    ended.set()
    assert idle.wait(30)


@pytest.mark.usefixtures("idle_thread")
def test_thread_survives_write_errors(parts: ReleaseParts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "queries").write_text("in the way")
    log = QueryLog(configuration(tmp_path / "queries", period_s=0.02), parts)
    log.start()
    log.record([make_prediction()], None, None)
    until(lambda: "Some queries were not logged" in caplog.text)
    (tmp_path / "queries").unlink()
    log.record([make_prediction()], None, None)
    until(lambda: (tmp_path / "queries").is_dir() and any((tmp_path / "queries").glob("*.jsonl")))


def test_worker_reads_the_servers_configuration(
    parts: ReleaseParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert QueryLog.from_environment(parts) is None
    monkeypatch.setenv(QUERY_LOG_VARIABLE, str(tmp_path / QUERY_LOG_FILE))
    write_configuration(ServingSettings(query_log="off"), tmp_path)
    assert QueryLog.from_environment(parts) is None
    write_configuration(ServingSettings(query_log="images"), tmp_path)
    log = QueryLog.from_environment(parts)
    assert log is not None
    assert log._configuration.images
    assert log._configuration.sample == QUERY_LOG_SAMPLE
    (tmp_path / QUERY_LOG_FILE).write_text("{}")
    assert QueryLog.from_environment(parts) is None, "a damaged configuration does not stop the worker"


def period_line(queries: int) -> bytes:
    times = {"since": "2026-01-01T00:00:00Z", "until": "2026-01-01T00:00:01Z"}
    return json.dumps(stamp() | times | {"version": "v", "queries": queries, "unknown": 0}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"{}",
        period_line(queries=1) + b"\n{}",
        period_line(queries=0),
        b"\xff\xfe",
        b"[" * 10_000,
    ],
)
def test_parse_file_names_the_source_of_invalid_data(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="somewhere is not a file of the query log"):
        parse_file(data, "somewhere")


def test_concurrent_shippers_ship_each_file_once(parts: ReleaseParts, tmp_path: Path, bucket: str) -> None:
    directory, store = tmp_path / "queries", open_store(f"s3://{bucket}/prod")
    assert ship_query_log(directory, store) == 0
    log = QueryLog(configuration(directory), parts)
    contents: dict[str, bytes] = {}
    for _ in range(6):
        log.record([make_prediction()], None, None)
        path = log.write_file()
        assert path is not None
        contents[path.name] = path.read_bytes()
    (directory / ".half-written.jsonl.abc").write_text("{")
    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(lambda _: ship_query_log(directory, store), range(3))) >= 6
    day = datetime.now(UTC)
    shipped = {info.key.rpartition("/")[2]: store.get(info.key) for info in store.list("queries/")}
    assert shipped == contents
    assert {info.key.split("/")[1] for info in store.list("queries/")} <= {
        f"{at:%Y%m%d}" for at in (day, day - timedelta(minutes=1))
    }
    assert [path.name for path in directory.iterdir()] == [".half-written.jsonl.abc"]


def test_unshipped_files_are_retried(
    parts: ReleaseParts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(query_log, "SHIP_EVERY_S", 0.01)
    (tmp_path / "store").write_text("in the way")
    log = QueryLog(configuration(tmp_path / "queries"), parts)
    log.record([make_prediction()], None, None)
    log.write_file()
    ended = threading.Event()
    store = open_store((tmp_path / "store").as_uri())
    shipper = threading.Thread(target=ship_until, args=(ended, tmp_path / "queries", store))
    shipper.start()
    until(lambda: "wait until they can be shipped" in caplog.text)
    assert len(list((tmp_path / "queries").iterdir())) == 1
    (tmp_path / "store").unlink()
    ended.set()  # it ships once more when it stops
    shipper.join()
    assert len(list(store.list("queries/"))) == 1
    assert list((tmp_path / "queries").iterdir()) == []


def test_server_writes_the_query_log(served: Served) -> None:
    directory = logged_queries(served.home)

    def periods() -> list[Period]:
        return [_read(path)[0] for path in directory.glob("*.jsonl")]

    time.sleep(2.5)  # by then, the queries of earlier tests are written
    before = sum(period.queries for period in periods())
    begin = datetime.now(UTC)
    queries = served.parts.smoke_queries()
    with Client.of(served.settings, "rest") as rest, Client.of(served.settings, "grpc") as grpc:
        ids = {client.predict(image).id: query.pred for client in (rest, grpc) for image, query in queries}
    until(lambda: sum(period.queries for period in periods()) >= before + len(ids))
    rows = [row for path in directory.glob("*.jsonl") for row in _read(path)[1] if row.at >= begin]
    assert {row.id: row.pred for row in rows} == ids
    assert len(ids) == 2 * len(queries)
    assert all(len(row.coordinates) == 16 for row in rows)
    assert {period.version for period in periods()} == {served.manifest.version}
    assert directory.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_server_that_stops_writes_the_queries_since_the_last_file(make_release: MakeRelease, tmp_path: Path) -> None:
    with serving(make_release(), tmp_path) as server:
        image, _ = server.parts.smoke_queries()[0]
        with server.client() as client:
            ids = {client.predict(image).id for _ in range(20)}
        directory, state = logged_queries(server.home), read_state(server.home)
        assert not [*directory.glob("*")]
        assert state is not None
        java = psutil.Process(state.pid)
        java.terminate()
        java.wait()
        # In a pod, the end of this process kills the workers, so they have written before.
        assert {row.id for path in directory.glob("*.jsonl") for row in _read(path)[1]} == ids


def test_process_that_exits_waits_for_the_file_that_is_being_written(parts: ReleaseParts, tmp_path: Path) -> None:
    """The thread of the log is a daemon, which the end of the process would stop."""
    script = """
import sys, threading, time
from pathlib import Path
from evernear.release.archive_reader import open_parts
from evernear.serving import query_log
from evernear.serving.configuration import QueryLogConfiguration
from evernear.serving.responses import Prediction

begun, write = threading.Event(), query_log.write_atomically
def write_slowly(path, data):
    begun.set()
    time.sleep(0.5)
    write(path, data)

query_log.write_atomically = write_slowly
directory = Path(sys.argv[2])
settings = QueryLogConfiguration(directory=directory, images=False, sample=9, period_s=0.01, size_bytes=2**20)
log = query_log.QueryLog(settings, open_parts(Path(sys.argv[1])))
log.record([Prediction(pred="7", dist=0.1, unknown=False, neighbors=(), version="v")], None, None)
log.start()
begun.wait()
log.record([Prediction(pred="8", dist=0.1, unknown=False, neighbors=(), version="v")], None, None)
"""
    subprocess.run([sys.executable, "-c", script, parts.directory, tmp_path / "queries"], check=True)
    rows = [row for path in (tmp_path / "queries").glob("*") for row in _read(path)[1]]
    assert sorted(row.pred for row in rows) == ["7", "8"]


def _read(path: Path) -> tuple[Period, list[LoggedQuery]]:
    return parse_file(path.read_bytes(), str(path))


def test_files_dated_in_the_future_are_removed_first(tmp_path: Path) -> None:
    """The clock was set back since they were written."""
    for name in ("21261122T090000Z-a.jsonl", "20251122T090000Z-b.jsonl", "20251122T100000Z-c.jsonl"):
        (tmp_path / name).write_text("0123456789")
    query_log._remove_oldest(tmp_path, 25)
    assert sorted(path.name[-7:] for path in tmp_path.iterdir()) == ["b.jsonl", "c.jsonl"]
