"""First paint and memory of the console:
``python benchmarks/console.py --directory DIRECTORY``.

A store of 1,000 runs with 18 objects each, 600 releases and promotions, 100,000 logged
queries of which 10,000 have an image, 40 photographs that people sent, 2,000 answers,
and a source of 1,000 classes. The console runs as a separate process. Each request of
its store takes 20 ms, and so does each page of 1,000 keys in a listing.

Times are those of the whole HTML on loopback: of the first request after the start,
which may show the progress of the first read, until the first read has ended, and of 20
later ones. Memory is the resident set of the process after all pages, with their
images, were shown.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import psutil
from PIL import Image

from benchmarks import machine
from evernear.common.disk import sha256_bytes
from evernear.common.run_record import RUNS, StepRecord
from evernear.common.store import FileStore, ObjectInfo
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.data.preprocess import Preprocessing
from evernear.release.manifest import NETWORK_FILE, PARTS, VERDICT_FILE, Part, ReleaseManifest
from evernear.release.promotions import CHAMPION, Pointer, Promotion, history_key
from evernear.release.records import MANIFESTS, Decision, Record, record_key
from evernear.reporting.notify import RunOutcome
from evernear.review.answers import ANSWERS, Answer
from evernear.review.submissions import Submissions
from evernear.serving.embedding_codec import encode_embedding
from evernear.serving.query_log_files import LoggedQuery, Period
from evernear.serving.responses import Prediction
from evernear.settings import Settings, load

LATENCY_S = 0.02
PAGE_KEYS = 1000
RUNS_COUNT, RELEASES, QUERIES, CLASSES, ANSWERED = 1000, 600, 100_000, 1000, 2000
FILE_QUERIES, FILE_IMAGES = 100, 10
PHOTOGRAPHS = 40
SIDE_PX, EMBEDDING_DIM = 128, 128
TIMES = 20
PAGES = {"Review": "/review", "Data": "/data", "Releases": "/releases"}
STEPS = ("ingest", "validate", "train", "export", "probe", "embed", "index", "evaluate", "gate", "deploy")
DOCUMENTS = ("settings", "metrics", "verdict", "archived", "deployment", "ended")
ASKED_S, ASKED_BYTES = 0.3, 300e6
NOW = datetime.now(UTC)
_rng = np.random.default_rng(0)


class SlowStore(FileStore):
    """A store in a directory that answers as late as one in a cluster.
    Keys are listed from memory, as S3 does.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._infos = {info.key: info for info in super().list("")}

    def find(self, key: str) -> tuple[bytes, str] | None:
        time.sleep(LATENCY_S)
        return super().find(key)

    def put(self, key: str, data: bytes | Path) -> str:
        time.sleep(LATENCY_S)
        etag = super().put(key, data)
        self._infos.update({info.key: info for info in super().list(key)})
        return etag

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        time.sleep(LATENCY_S)
        infos = [info for key, info in self._infos.items() if key.startswith(prefix)]
        for number, info in enumerate(infos):
            if number and number % PAGE_KEYS == 0:
                time.sleep(LATENCY_S)
            yield info

    def children(self, folder: str) -> Iterator[str]:
        start = len(folder) + 1
        heads = (key[start:].partition("/") for key in self._infos if key.startswith(f"{folder}/"))
        names = dict.fromkeys(name + slash for name, slash, _ in heads)
        for number, name in enumerate(names):
            if number % PAGE_KEYS == 0:
                time.sleep(LATENCY_S)
            yield name


def settings_of(directory: Path) -> Settings:
    """Settings of the console and of the ingest."""
    words = [f"store={(directory / 'store').as_uri()}", f"data.source=folder:{directory / 'images'}"]
    return load(overrides=[*words, f"workdir={directory / 'work'}"], environment={})


def write(store: FileStore, key: str, data: bytes, at: datetime | None = None) -> None:
    """Write an object without waiting for the disk."""
    path = store.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if at is not None:
        os.utime(path, (at.timestamp(), at.timestamp()))


def encoded(side_px: int, suffix: str) -> bytes:
    """A picture of smooth noise."""
    coarse = Image.fromarray(_rng.integers(0, 256, (side_px // 4, side_px // 4, 3), np.uint8))
    buffer = BytesIO()
    coarse.resize((side_px, side_px), Image.Resampling.BICUBIC).save(buffer, format=suffix)
    return buffer.getvalue()


def unit_vector() -> np.ndarray:
    """An embedding."""
    vector = _rng.normal(size=EMBEDDING_DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def fill(directory: Path) -> None:
    """Write source and store."""
    for label in range(CLASSES):
        folder = directory / "images" / f"class-{label:04}"
        folder.mkdir(parents=True)
        for number in range(4):
            Image.fromarray(_rng.integers(0, 256, (16, 16), np.uint8)).save(folder / f"{number}.png")
    settings = settings_of(directory)
    manifest = ingest_source(settings.data, settings.store_uri)
    store = FileStore(directory / "store")
    versions = list(write_releases(store, manifest))
    for number in range(RUNS_COUNT):
        write_run(store, number, versions)
    for number in range(QUERIES // FILE_QUERIES):
        write_queries(store, number, versions[-1])
    sent = Submissions(store)
    for _ in range(PHOTOGRAPHS):
        answer = Prediction(
            pred="class-0001",
            dist=0.9,
            unknown=True,
            neighbors=(),
            version=versions[-1],
            embedding=encode_embedding(unit_vector()),
        )
        sent.add(encoded(2400, "JPEG"), answer, "ann", NOW)
    answers = (
        Answer(image=sha256_bytes(b"%d" % number), action="label", label="class-0001", who="ann", at=NOW)
        for number in range(ANSWERED)
    )
    write(store, ANSWERS, b"".join(answer.model_dump_json().encode() + b"\n" for answer in answers))


def write_releases(store: FileStore, manifest: Manifest) -> Iterator[str]:
    """Write releases that were promoted one after the other; yield their versions."""
    digest = sha256_bytes(b"")
    parts = {name: Part(sha256=digest, size_bytes=1) for name in PARTS}
    shape = Preprocessing(height_px=16, width_px=16, channels=1, mean=(0.5,), std=(0.5,))
    previous: str | None = None
    for number in range(RELEASES):
        created = NOW - timedelta(hours=RELEASES - number)
        version = f"{created:%Y%m%d.%H%M%S}.{number:08x}"
        release = ReleaseManifest(
            version=version,
            created=created,
            parts={**parts, NETWORK_FILE: Part(sha256=digest, size_bytes=1), VERDICT_FILE: parts[VERDICT_FILE]},
            network_sha256=digest,
            network_identity=digest,
            dataset_name=manifest.name,
            dataset_digest=manifest.digest,
            source=manifest.source,
            training={},
            labels=manifest.labels,
            preprocessing=shape,
            max_pixels=10**6,
            embedding_dim=EMBEDDING_DIM,
            joined_gallery=dict.fromkeys(manifest.labels, 1),
            group_distance=1.1,
            threshold=0.8,
            metrics={"accuracy": 0.95},
            verdict_sha256=digest,
            parent=previous,
            evernear_version="0",
            git_commit="",
        )
        decision = Decision(promote=True, reasons=("All rules passed.",))
        record = Record(manifest=release, archive_sha256=digest, archive_size_bytes=1, verdict=decision)
        write(store, record_key(MANIFESTS, version), record.to_json())
        promotion = Promotion(
            version=version, previous=previous, since=created, number=number + 1, undo_to=number or None, by="ann"
        )
        write(store, history_key(number + 1), promotion.to_json())
        write(store, CHAMPION, Pointer.model_validate(promotion.model_dump()).to_json())
        previous = version
        yield version


def write_run(store: FileStore, number: int, versions: list[str]) -> None:
    """Write the record of a run that ended hours ago."""
    run, at = f"run-{number:06}", NOW - timedelta(hours=RUNS_COUNT - number)
    step = StepRecord.of_this_process("ingest", at).model_copy(update={"state": "finished", "ended": at})
    for name in STEPS:
        write(store, f"{RUNS}{run}/steps/{name}.json", step.model_copy(update={"step": name}).to_json(), at)
    for name in DOCUMENTS:
        write(store, f"{RUNS}{run}/{name}.json", b"{}", at)
    version = versions[number % len(versions)]
    outcome = RunOutcome(
        run=run, pipeline="continuous-training", state="promoted", release=version, candidate=version,
        metrics={"accuracy": 0.95}, reasons=("All rules passed.",),
    )  # fmt: skip
    write(store, f"{RUNS}{run}/outcome.json", outcome.to_json(), at)
    write(store, f"{RUNS}{run}/run.html", b"<p>A run page.</p>" * 1000, at)


def write_queries(store: FileStore, number: int, version: str) -> None:
    """Write a file of the query log. Only those that the console reads have images of
    `SIDE_PX`.
    """
    at = NOW - timedelta(minutes=10 + 5 * number)
    is_read = number < 60
    rows = [
        LoggedQuery(
            at=at,
            pred="class-0001",
            dist=0.9,
            unknown=True,
            coordinates=tuple(map(float, _rng.normal(size=8).round(3))),
            image=b64encode(encoded(SIDE_PX if is_read else 16, "PNG")).decode() if row < FILE_IMAGES else "",
            embedding=encode_embedding(unit_vector()) if row < FILE_IMAGES else "",
            candidates=("class-0001", "class-0002") if row < FILE_IMAGES else (),
            id=f"{number}-{row}",
        )
        for row in range(FILE_QUERIES)
    ]
    period = Period(version=version, since=at, until=at, queries=FILE_QUERIES, unknown=FILE_QUERIES)
    lines = "".join(line.model_dump_json() + "\n" for line in (period, *rows))
    write(store, f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{version}-host-1-{number:05}.jsonl", lines.encode(), at)


def serve(directory: Path) -> None:
    """The console on the slow store, as `evernear console` runs it."""
    from evernear.triggers.console.access import Access
    from evernear.triggers.console.app import create_console_app
    from evernear.triggers.console.runs import LocalRuns
    from evernear.triggers.console.server import serve_console
    from evernear.triggers.console.services import Services

    settings = settings_of(directory)
    store = SlowStore(directory / "store")
    services = Services.open(settings, store, LocalRuns(settings, ()))
    app = create_console_app(services, Access(settings.console, "token", "ann"))
    serve_console(app, settings.console.model_copy(update={"port": 0}), lambda url: print(url, flush=True))


def get(client: httpx.Client, path: str) -> tuple[float, httpx.Response]:
    """Seconds until the whole response, and the response."""
    started_s = time.perf_counter()
    response = client.get(path).raise_for_status()
    return time.perf_counter() - started_s, response


def measure(directory: Path) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Seconds of each page, and the process's time of the first read and resident
    set.
    """
    words = [sys.executable, __file__, "--directory", str(directory), "--serve"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                client.get("/?token=token")  # a redirect that sets the cookies
                started_s = time.perf_counter()
                first_s, response = get(client, "/review")
                while "Refresh" in response.headers:
                    time.sleep(0.05)
                    _, response = get(client, "/review")
                read_s = time.perf_counter() - started_s
                pages = {name: time_page(client, path) for name, path in PAGES.items()}
                for path in images(client):
                    client.get(path)  # the log no longer has images of old answers
                memory = psutil.Process(process.pid).memory_info().rss
        finally:
            process.terminate()
    return pages, {"first_paint_s": first_s, "first_read_s": read_s, "resident_bytes": memory}


def time_page(client: httpx.Client, path: str) -> dict[str, float]:
    """Seconds of the first visit after the first read,
    and the median and the worst of `TIMES` more.
    """
    first_s, _ = get(client, path)
    times_s = []
    for _ in range(TIMES):
        time.sleep(0.3)
        times_s.append(get(client, path)[0])
    return {"first_s": first_s, "median_s": statistics.median(times_s), "worst_s": max(times_s)}


def images(client: httpx.Client) -> Iterator[str]:
    """The images on all pages."""
    for path in PAGES.values():
        html = client.get(path).text
        yield from (
            part.partition('"')[0].replace("&amp;", "&") for part in html.split('src="/')[1:] if ".js" not in part
        )


def main() -> None:
    """Fill a store, or use the one of an earlier call, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--directory", type=Path, required=True, help="for source and store, 0.5 GB; used again if full"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = options.directory.resolve()
    if options.serve:
        serve(directory)
        return
    full = directory / "full"
    if not full.exists():
        fill(directory)
        full.touch()
    described = machine.describe()
    pages, process = measure(directory)
    table = [["", "first visit", "median of 20", "slowest", "target"]]
    table += [
        [
            name,
            *(f"{1000 * times[key]:.0f} ms" for key in ("first_s", "median_s", "worst_s")),
            f"{1000 * ASKED_S:.0f} ms",
        ]
        for name, times in pages.items()
    ]
    table += [
        [
            "First request after the start",
            f"{1000 * process['first_paint_s']:.0f} ms",
            "",
            "",
            f"{1000 * ASKED_S:.0f} ms",
        ],
        ["Until the store was read once", f"{process['first_read_s']:.1f} s", "", "", "progress is shown"],
        ["Memory of the process", f"{process['resident_bytes'] / 1e6:.0f} MB", "", "", f"{ASKED_BYTES / 1e6:.0f} MB"],
    ]
    title = "The console on a store of 1,000 runs, 100,000 queries and 1,000 classes that responds in 20 ms"
    machine.write("console", title, described, {"pages": pages, **process}, table)


if __name__ == "__main__":
    main()
