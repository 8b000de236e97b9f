"""The watcher's alarms and proposals in simulated weeks of live queries:
``python benchmarks/drift.py --mnist DIR``.

``DIR`` contains the four IDX files of MNIST. A small release is trained on 800 of its images, with
a query split of 40, and a large one is a reindex of it with 10,000. Their live queries are other
images, in a random order. A third release is trained on 10,000 images that went through the camera
of the frames (shift, brightness, JPEG), since frames of another camera than the reference's are
drift. A run writes the query log of a server, checks with the real watcher every `CHECK_EVERY`, and
counts:

- ``tested``: checks that tested for drift.
- ``alarms``: runs of consecutive checks that reported drift.
- ``proposals``: proposals in the store. Nobody answers them,
  or each is declined at once.
- ``found``: hours from the change to the first report.
"""

import argparse
import gzip
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from benchmarks import machine
from evernear.common.store import open_store
from evernear.release.archive_reader import open_release
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE
from evernear.release.registry import Registry
from evernear.serving.configuration import QUERY_LOG_PERIOD_S, QUERY_LOG_SAMPLE
from evernear.serving.core import Predictor
from evernear.serving.endpoints import Endpoints
from evernear.serving.query_log_files import QUERIES, LoggedQuery, Period
from evernear.serving.responses import Prediction
from evernear.settings import Settings
from evernear.triggers.requests import Person, RequestStore
from evernear.triggers.watch.watcher import Watcher

Images = NDArray[np.uint8]
Query = tuple[datetime, str, int]

LARGE, SMALL = 10_000, 800
SPLITS = {
    "small": {"gallery_fraction": 0.1, "query_fraction": 0.065},
    "large": {"gallery_fraction": 0.1, "query_fraction": 0.06},
    "frames": {"gallery_fraction": 0.1, "query_fraction": 0.06},
}
"""The splits of the releases, in the order in which they are made."""
POOL = 20_000
SCENES, FRAMES = 1_700, 10
MONDAY = datetime(2027, 1, 4, tzinfo=UTC)
CHECK_EVERY = timedelta(hours=6)
PER_DAY = 600
WEEKEND_CLASS, WEEKEND_SHARE = "1", 0.6
BURST_DAY, BURST = 1, 1_000


@dataclass(frozen=True)
class Scenario:
    """Queries of some days. ``change`` names the images from ``change_day`` on; empty: no
    change."""

    name: str
    release: str
    days: int = 28
    weekends: bool = False
    frames: bool = False
    burst: bool = False
    change: str = ""
    declines: bool = False
    change_day: int = 1
    """The change is followed until it is found."""


SCENARIOS = (
    Scenario("same distribution", "large"),
    Scenario("same distribution", "small"),
    Scenario("weekends of 60% one class, unanswered", "large", weekends=True),
    Scenario("weekends of 60% one class, declined", "large", weekends=True, declines=True),
    Scenario("ten frames a picture", "frames", frames=True),
    Scenario("one burst of 1,000", "large", 4, burst=True),
    Scenario("mild change of camera", "large", 15, change="mild"),
    Scenario("mild change of camera", "small", 15, change="mild"),
    Scenario("strong change of camera", "large", 15, change="strong"),
    Scenario("strong change of camera, weekends", "large", 15, weekends=True, change="strong", change_day=5),
    Scenario("strong change of camera", "small", 15, change="strong"),
)


@dataclass(frozen=True)
class Answers:
    """What a release answers to N images."""

    preds: list[str]
    distances: NDArray[np.float32]
    unknown: NDArray[np.bool_]
    coordinates: NDArray[np.float32]


@dataclass
class Result:
    """Counts of one run."""

    checks: int = 0
    tested: int = 0
    alarms: int = 0
    proposals: int = 0
    found_h: float | None = None
    longest_untested_h: float = 0.0
    reports: list[str] = field(default_factory=list[str])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True, help="directory with the IDX files of MNIST")
    parser.add_argument("--directory", type=Path, help="keeps releases and answers; a temporary one by default")
    parser.add_argument("--runs", type=int, default=8, help="runs of a scenario (default 8)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="run only the scenarios whose names contain this")
    parser.add_argument("--name", default="drift", help="name of the result files")
    arguments = parser.parse_args()
    description = machine.describe()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        for release in SPLITS:
            prepare(arguments.mnist, release, directory / release)
        chosen = [scenario for scenario in SCENARIOS if arguments.only in scenario.name]
        jobs = [(scenario, directory, seed) for scenario in chosen for seed in range(arguments.runs)]
        runs: dict[Scenario, list[Result]] = {}
        with ProcessPoolExecutor(arguments.processes) as pool:
            for (scenario, _, seed), result in zip(jobs, pool.map(simulate, jobs), strict=True):
                runs.setdefault(scenario, []).append(result)
                print(f"{scenario.name}, {scenario.release}, run {seed}: {result}", file=sys.stderr, flush=True)
    values = {
        "runs": [{"scenario": asdict(scenario), "results": [asdict(r) for r in runs[scenario]]} for scenario in runs]
    }
    title = "The watcher's alarms and proposals in simulated weeks of live queries"
    machine.write(arguments.name, title, description, values, list(table(runs)))


def table(runs: dict[Scenario, list[Result]]) -> Iterator[Sequence[str]]:
    yield (
        "queries",
        "release",
        "days",
        "runs",
        "checks that tested",
        "alarms",
        "proposals",
        "runs that detected the change",
        "median time to detection",
    )
    for scenario, results in runs.items():
        found = [result.found_h for result in results if result.found_h is not None]
        tested = sum(result.tested for result in results) / sum(result.checks for result in results)
        yield (
            scenario.name,
            scenario.release,
            str(scenario.days),
            str(len(results)),
            f"{tested:.0%}",
            _range([result.alarms for result in results]),
            _range([result.proposals for result in results]),
            f"{len(found)} of {len(results)}" if scenario.change else "",
            f"{median(found):.0f} h" if found else "",
        )


def _range(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])


def prepare(mnist: Path, release: str, directory: Path) -> None:
    """Make the release and predict all images that the scenarios use, unless ``directory`` has
    both.

    The large release is a reindex of the small one, so that both have one network.
    """
    if (directory / "answers.npz").is_file():
        return
    shutil.rmtree(directory, ignore_errors=True)
    images, labels = read_mnist(mnist)
    order = np.random.default_rng(0).permutation(len(images))
    known, others = order[: SMALL if release == "small" else LARGE], order[LARGE : LARGE + POOL]
    if release == "frames":
        images[known] = frames(images[known], np.random.default_rng(2), 1)
    source = directory / "source"
    source.mkdir(parents=True)
    more = known[SMALL:]
    test = np.concatenate([known[: SMALL // 10], more[: len(more) // 10]])
    train = np.concatenate([known[SMALL // 10 : SMALL], more[len(more) // 10 :]])
    write_idx(source, "t10k", images[test], labels[test])
    write_idx(source, "train", images[train], labels[train])
    moved: tuple[str, ...] = ()
    if release == "large":
        shutil.copytree(directory.parent / "small" / "work", directory / "work")
        moved = ("--moved-from", f"mnist:{directory.parent / 'small' / 'source'}")
    options = [word for name, value in SPLITS[release].items() for word in ("--set", f"data.{name}={value}")]
    command = [
        *(sys.executable, "-m", "evernear", "reindex" if release == "large" else "run", "--source", f"mnist:{source}"),
        *("--workdir", str(directory / "work"), "--set", "train.width=8", "--set", "train.min_steps=300"),
        *(*options, *moved, *free_ports()),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    stop = [sys.executable, "-m", "evernear", "stop", "--workdir", str(directory / "work")]
    subprocess.run(stop, check=True, stdout=sys.stderr)
    registry = Registry(open_store(_store(directory)))
    champion = registry.champion()
    assert champion is not None
    registry.fetch(champion.version, directory / "release.mar")
    parts = open_release(directory / "release.mar", directory / "opened")
    projection = DriftBaseline.parse(parts.read(DRIFT_BASELINE_FILE), DRIFT_BASELINE_FILE).projection
    predictor = Predictor.open(parts)
    rng = np.random.default_rng(1)
    if release == "frames":
        sets = {"frames": frames(images[others[:SCENES]], rng, FRAMES)}
    else:
        sets = {
            "usual": images[others],
            "mild": change_camera(images[others], 0.5, 0.9, 6.0, rng),
            "strong": change_camera(images[others], 1.2, 0.6, 20.0, rng),
        }
    arrays: dict[str, Any] = {}
    for name, chosen in sets.items():
        preds, distances, unknown, coordinates = predict(predictor, chosen, projection)
        arrays |= {
            f"{name}_preds": np.array(preds),
            f"{name}_distances": distances,
            f"{name}_unknown": unknown,
            f"{name}_coordinates": coordinates,
        }
        print(f"{release}: {name} {unknown.mean():.1%} unknown, mean distance {distances.mean():.3f}", file=sys.stderr)
    np.savez(directory / "answers.npz", labels=labels[others].astype(str), **arrays)


def free_ports() -> Iterator[str]:
    """Options for a TorchServe on ports that no process uses at this moment."""
    with ExitStack() as stack:
        for name in (field for field in Endpoints.model_fields if field.endswith("_port")):
            unused = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            yield from ("--set", f"serving.{name}={unused.getsockname()[1]}")


def read_mnist(directory: Path) -> tuple[Images, Images]:
    def read(name: str, offset: int) -> Images:
        return np.frombuffer(gzip.decompress((directory / f"{name}.gz").read_bytes()), np.uint8, offset=offset)

    images = [read(f"{part}-images-idx3-ubyte", 16).reshape(-1, 28, 28) for part in ("train", "t10k")]
    labels = [read(f"{part}-labels-idx1-ubyte", 8) for part in ("train", "t10k")]
    return np.concatenate(images), np.concatenate(labels)


def write_idx(directory: Path, part: str, images: Images, labels: Images) -> None:
    for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (directory / name).write_bytes(head + array.tobytes())


def change_camera(images: Images, blur: float, contrast: float, noise: float, rng: np.random.Generator) -> Images:
    """Blur (standard deviation in pixels), less contrast around gray, and noise (in gray
    levels)."""
    blurred = gaussian_filter(images.astype(np.float32), (0, blur, blur))
    changed = (blurred - 128) * contrast + 128 + rng.normal(0, noise, images.shape)
    return changed.clip(0, 255).astype(np.uint8)


def frames(images: Images, rng: np.random.Generator, count: int) -> Images:
    """``count`` frames of each image: shifted by up to a pixel, brightness within 6%, JPEG."""
    made: list[Images] = []
    for image in images:
        for _ in range(count):
            shifted = np.roll(image, rng.integers(-1, 2, 2), (0, 1)) * rng.uniform(0.94, 1.06)
            buffer = BytesIO()
            Image.fromarray(shifted.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
            made.append(np.asarray(Image.open(buffer)))
    return np.stack(made)


def predict(
    predictor: Predictor, images: Images, projection: NDArray[np.float32]
) -> tuple[list[str], NDArray[np.float32], NDArray[np.bool_], NDArray[np.float32]]:
    predictions: list[Prediction] = []
    coordinates: list[NDArray[np.float32]] = []
    for start in range(0, len(images), 512):
        batch = predictor.predict_batch([_png(image) for image in images[start : start + 512]])
        predictions += [response for response in batch.responses if isinstance(response, Prediction)]
        assert batch.embeddings is not None
        coordinates.append(batch.embeddings @ projection)
    return (
        [prediction.pred for prediction in predictions],
        np.array([prediction.dist for prediction in predictions], np.float32),
        np.array([prediction.unknown for prediction in predictions]),
        np.concatenate(coordinates),
    )


def _png(image: Images) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def _store(directory: Path) -> str:
    return (directory / "work" / "store").resolve().as_uri()


def simulate(job: tuple[Scenario, Path, int]) -> Result:
    """One run of a scenario, in a copy of the release's store."""
    scenario, directory, seed = job
    with tempfile.TemporaryDirectory() as temporary, np.load(directory / scenario.release / "answers.npz") as arrays:
        copied = Path(temporary) / "store"
        shutil.copytree(directory / scenario.release / "work" / "store", copied, copy_function=os.link)
        settings = Settings.model_validate(
            {
                "workdir": Path(temporary) / "work",
                "store": copied.as_uri(),
                # Only drift is of interest, and listing a source takes as long.
                "data": {"source": f"mnist:{Path(temporary) / 'none'}", **SPLITS[scenario.release]},
            }
        )
        answers = {
            name: Answers(
                arrays[f"{name}_preds"].tolist(),
                arrays[f"{name}_distances"],
                arrays[f"{name}_unknown"],
                arrays[f"{name}_coordinates"],
            )
            for name in ("usual", "mild", "strong", "frames")
            if f"{name}_preds" in arrays
        }
        queries = list(schedule(scenario, arrays["labels"].tolist(), np.random.default_rng(seed)))
        return check_all(scenario, settings, answers, queries, seed)


def schedule(scenario: Scenario, labels: Sequence[str], rng: np.random.Generator) -> Iterator[Query]:
    """Time, kind and row of each query, in the order of time."""
    rows = rng.permutation(len(labels)).tolist()
    scenes = rng.permutation(SCENES).tolist()
    of_class = [row for row in rows if labels[row] == WEEKEND_CLASS]
    special: list[int] = []
    for day in range(scenario.days):
        kind = scenario.change if scenario.change and day >= scenario.change_day else "usual"
        day_starts = MONDAY + timedelta(days=day)
        if scenario.frames:
            starts = np.sort(rng.uniform(0, 86_000, PER_DAY // FRAMES)).tolist()
            for start_s, scene in zip(starts, [scenes.pop() for _ in starts], strict=True):
                for frame in range(FRAMES):
                    yield day_starts + timedelta(seconds=start_s + frame), "frames", scene * FRAMES + frame
            continue
        times_s = rng.uniform(0, 86_400, PER_DAY).tolist()
        if scenario.burst and day == BURST_DAY:
            times_s += rng.uniform(43_050, 43_350, BURST).tolist()  # two files of the log
        # The class has too few images for all weekends. Within a weekend, each comes once.
        special = rng.permutation(of_class).tolist() if day % 7 == 5 else special
        for time_s in sorted(times_s):
            is_special = scenario.weekends and day % 7 >= 5 and rng.random() < WEEKEND_SHARE
            yield day_starts + timedelta(seconds=time_s), kind, (special if is_special else rows).pop()


def check_all(
    scenario: Scenario,
    settings: Settings,
    answers: dict[str, Answers],
    queries: list[Query],
    seed: int,
) -> Result:
    store = open_store(settings.store_uri)
    champion = Registry(store).champion()
    assert champion is not None
    now = MONDAY
    cache = Path(settings.workdir) / "cache"
    cache.mkdir(parents=True)
    watcher = Watcher(settings, store, None, cache, lambda: now)
    requests = RequestStore(store)
    write = _log_writer(store.put, champion.version, answers, np.random.default_rng(seed))
    result, was_drift, untested_h, position = Result(), False, 0.0, 0
    period = timedelta(seconds=QUERY_LOG_PERIOD_S)
    for _ in range(int(timedelta(days=scenario.days) / CHECK_EVERY)):
        now += CHECK_EVERY
        while position < len(queries) and queries[position][0] < now:
            since = MONDAY + (queries[position][0] - MONDAY) // period * period
            first = position
            while position < len(queries) and queries[position][0] < since + period:
                position += 1
            write(since, since + period, queries[first:position])
        report = watcher.check()
        is_tested = any(name.endswith("_p") for name in report.figures)
        is_drift = report.figures.get("drift_found", 0) > 0
        result.checks += 1
        result.tested += is_tested
        untested_h = 0.0 if is_tested else untested_h + CHECK_EVERY / timedelta(hours=1)
        result.longest_untested_h = max(result.longest_untested_h, untested_h)
        changed = MONDAY + timedelta(days=scenario.change_day)
        is_true = bool(scenario.change) and now > changed
        if is_drift and not was_drift:
            if is_true and result.found_h is None:
                result.found_h = (now - changed) / timedelta(hours=1)
            elif not is_true:
                result.alarms += 1
            result.reports.append(f"{now:%a %d %H:%M} {' '.join(report.reasons)}")
        was_drift = is_drift
        if result.found_h is not None:
            break
        if scenario.declines:
            for request in list(requests.list()):
                if request.state == "pending":
                    requests.change(request, state="declined", answered_by=Person(id="U1"), answered=now)
    result.proposals = len(requests.ids())
    return result


def _log_writer(
    put: Callable[[str, bytes], object], version: str, answers: dict[str, Answers], rng: np.random.Generator
) -> Callable[[datetime, datetime, list[Query]], None]:
    """Writes a file of the query log, with a uniform sample of the period's queries, as a server
    does."""
    sample = QUERY_LOG_SAMPLE

    def write(since: datetime, until: datetime, queries: list[Query]) -> None:
        chosen = sorted(rng.choice(len(queries), min(sample, len(queries)), replace=False).tolist())
        unknown = sum(bool(answers[kind].unknown[row]) for _, kind, row in queries)
        lines: list[Period | LoggedQuery] = [
            Period(version=version, since=since, until=until, queries=len(queries), unknown=unknown)
        ]
        for at, kind, row in (queries[index] for index in chosen):
            its = answers[kind]
            lines.append(
                LoggedQuery(
                    at=at,
                    pred=its.preds[row],
                    dist=float(its.distances[row]),
                    unknown=bool(its.unknown[row]),
                    coordinates=tuple(its.coordinates[row].tolist()),
                )
            )
        name = f"{until:%Y%m%dT%H%M%SZ}-{version}-host-1-{rng.integers(2**32):08x}.jsonl"
        put(f"{QUERIES}{name[:8]}/{name}", "".join(f"{line.model_dump_json()}\n" for line in lines).encode())

    return write


if __name__ == "__main__":
    main()
