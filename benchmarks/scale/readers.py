"""Shuffled reading by our shards, WebDataset, MosaicML Streaming and LitData:
``python -m benchmarks.scale.readers``.

The libraries are not dependencies of evernear. Install them into a directory and add it
to ``PYTHONPATH``; without ``--no-deps``, MosaicML Streaming would replace numpy, and
transformers huggingface-hub::

    uv pip install --target DIRECTORY --no-deps webdataset==1.0.2 braceexpand litdata==0.2.76 lightning-utilities \\
        tifffile filelock mosaicml-streaming==0.13.0 'xxhash<4' brotli zstd python-snappy cramjam catalogue \\
        'transformers<5' 'huggingface-hub<1' 'tokenizers<0.23' regex

Every reader gets the same images as raw pixels from a bucket on loopback that is as
slow as S3 (`benchmarks.scale.bucket`), in shards of 32 MiB, to which tar adds its
headers. It fills batches of 256 uint8 images and their labels, shuffled as the
documentation of the library recommends for training. A process reads two epochs:
``cold``, from the opening of the dataset, with an empty cache, and ``warm``. The rows
are measured in turns, and the medians reported. CPU time is a warm epoch's. Memory is
the largest resident set of the reading process plus the private pages of its workers;
it is measured again with a quarter of the images, to see whether it grows with them.

The first four bytes of an image are its number, so the order that arrives is known. The
second table says what the order depends on: the same in another process, after a resume
in the middle of an epoch, and with two processes whose batches of 128 are joined.
``spread`` is the standard deviation of the image numbers in a batch, relative to a
perfect shuffle's: 1 if a batch mixes the whole dataset, near 0 if its images were
stored together.
"""  # noqa: W505

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.scale.bucket import CONNECTION_BYTES_PER_S, LATENCY_S, bucket

BATCH_SIZE = 256
SHARD_BYTES = 32 * 2**20
LABELS = 100
SEED = 1
TIMEOUT_S = 600
WEBDATASET_BUFFER = 1000  # of its documentation's examples

Batches = Iterator[tuple[Any, Any]]


class Case(NamedTuple):
    """Images of one size."""

    shape: tuple[int, int, int]
    images: int

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.images}"


class Reader(NamedTuple):
    """A row of the table."""

    name: str
    format: str
    workers: int = 0
    packages: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name}, {self.workers} workers" if self.workers else self.name


LIBRARIES = (
    Reader("WebDataset", "webdataset", packages=("webdataset",)),
    Reader("MosaicML Streaming", "mosaicml", packages=("mosaicml-streaming",)),
    Reader("LitData", "litdata", packages=("litdata",)),
)
OURS = Reader("evernear", "evernear")
READERS = (
    OURS,
    Reader("evernear, shared directory", "directory"),
    *(library._replace(workers=workers) for library in LIBRARIES for workers in (0, 2)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=384 * BATCH_SIZE, help="images of 28x28, a multiple of 1024")
    parser.add_argument("--large", type=int, default=16 * BATCH_SIZE, help="images of 224x224, a multiple of 1024")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="FORMAT", help="formats to measure; default: all")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_job(json.loads(arguments.job))
        return
    readers = [reader for reader in READERS if not arguments.only or reader.format in arguments.only]
    here = machine.describe() | {package: version(package) for reader in readers for package in reader.packages}
    cases = [Case((28, 28, 1), arguments.small), Case((224, 224, 3), arguments.large)]
    rows: list[dict[str, Any]] = []
    orders: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="evernear-readers-") as scratch, bucket(Path(scratch)) as endpoint:
        bench = Bench(Path(scratch), endpoint)
        for case in (*cases, *map(quarter, cases)):
            bench.prepare(case, {reader.format for reader in readers})
        for repeat, case, reader in itertools.product(range(arguments.repeats), cases, readers):
            rows.append(bench.measure(reader, case) | {"repeat": repeat})
        for case, reader in itertools.product(cases, readers):
            rows.append(bench.measure(reader, quarter(case)) | {"repeat": 0})
        for reader in readers:
            if reader.format != "directory" and not reader.workers:
                orders.append(bench.order(reader, cases[0], cases[1]))
    settings = {"batch_size": BATCH_SIZE, "shard_bytes": SHARD_BYTES, "webdataset_buffer": WEBDATASET_BUFFER}
    slowness = {"latency_s": LATENCY_S, "connection_bytes_per_s": CONNECTION_BYTES_PER_S}
    result = {**settings, **slowness, "load_after": round(os.getloadavg()[0], 2), "rows": rows}
    machine.write(
        "scale_readers",
        "Speed and memory of shuffled reading from a bucket, by reader",
        here,
        result,
        speed_table(rows, readers, cases),
    )
    machine.write(
        "scale_readers_order",
        "Properties of the order of shuffled images, by reader",
        here,
        {"orders": orders},
        order_table(orders),
    )


def quarter(case: Case) -> Case:
    return case._replace(images=case.images // 4)


class Bench:
    """Runs readers, each in a process, on the datasets in a bucket."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        self._directory, self._endpoint = directory, endpoint
        self._stored: dict[tuple[str, str], int] = {}

    def prepare(self, case: Case, formats: set[str]) -> None:
        """Store the images of ``case`` in each format."""
        for format in sorted(formats - {"directory"} | {"evernear"}):
            path = self._directory / "images" / case.name / format
            path.mkdir(parents=True)
            started_s = time.monotonic()
            self._run({"write": format, "case": case, "path": str(path)})
            self._stored[case.name, format] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            print(f"{case.name}: stored as {format} in {time.monotonic() - started_s:.0f} s", flush=True)

    def measure(self, reader: Reader, case: Case) -> dict[str, Any]:
        """One cold and one warm epoch."""
        with tempfile.TemporaryDirectory(dir=self._directory) as cache:
            read = self._run(self._job(reader, case, cache, epochs=2))
        complete = all(sorted(numbers) == list(range(case.images)) for numbers in read.pop("numbers"))
        row = {
            "reader": reader.key,
            "shape": case.shape,
            "images": case.images,
            "complete": complete,
            "stored_bytes": self._stored[case.name, "evernear" if reader.format == "directory" else reader.format],
            **read,
        }
        print(row, flush=True)
        return row

    def order(self, reader: Reader, case: Case, spread_case: Case) -> dict[str, Any]:
        """What the order of ``case`` depends on, and how well a batch of ``spread_case`` is
        mixed."""
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:

            def numbers(name: str, **job: Any) -> list[list[int]]:
                cache = Path(directory, name)
                cache.mkdir(exist_ok=True)
                try:
                    return self._run(self._job(reader, case, str(cache), **job))["numbers"]
                except subprocess.SubprocessError:
                    return [[]] * job["epochs"]

            first, second = (numbers(name, epochs=2) for name in ("first", "second"))
            state = str(Path(directory, "state"))
            stop = case.images // BATCH_SIZE // 2
            numbers("stopped", epochs=2, stop_after=stop, state=state)
            (rest,) = numbers("stopped", epochs=1, resume=state)
            ranks = self._ranks(reader, case, directory)
        with tempfile.TemporaryDirectory(dir=self._directory) as cache:
            mixed = self._run(self._job(reader, spread_case, cache, epochs=1))["numbers"]
        row = {
            "reader": reader.key,
            "same_in_another_process": first == second,
            "differs_by_epoch": first[0] != first[1],
            "same_after_resume": rest == first[1][stop * BATCH_SIZE :],
            "batches_of_two_ranks": ranks == batches_as_sets(first[0]),
            "spread": {
                "x".join(map(str, each.shape)): spread(order)
                for each, order in ((case, first[0]), (spread_case, mixed[0]))
            },
        }
        print(row, flush=True)
        return row

    def _ranks(self, reader: Reader, case: Case, directory: str) -> list[set[int]]:
        """The images of each global batch that two processes read, in half batches each."""
        jobs = []
        for rank in range(2):
            # The processes of a node share the cache of MosaicML Streaming; the others have one
            # each.
            cache = Path(directory, "ranks" if reader.format == "mosaicml" else f"rank-{rank}")
            cache.mkdir(exist_ok=True)
            jobs.append(self._start(self._job(reader, case, str(cache), epochs=1, rank=rank, world_size=2)))
        try:
            (left,), (right,) = (result_of(job)["numbers"] for job in jobs)
        except subprocess.SubprocessError:
            return []
        half = BATCH_SIZE // 2
        return [set(left[start : start + half] + right[start : start + half]) for start in range(0, len(left), half)]

    def _job(self, reader: Reader, case: Case, cache: str, **settings: Any) -> dict[str, Any]:
        format = "evernear" if reader.format == "directory" else reader.format
        return {
            "read": reader.format,
            "case": case,
            "workers": reader.workers,
            "endpoint": self._endpoint,
            "key": f"images/{case.name}/{format}",
            "directory": str(self._directory / "images" / case.name / format),
            "cache": cache,
            **settings,
        }

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        return result_of(self._start(job))

    def _start(self, job: dict[str, Any]) -> "subprocess.Popen[str]":
        rank, world_size = job.get("rank", 0), job.get("world_size", 1)
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": self._endpoint,
            "S3_ENDPOINT_URL": self._endpoint,  # of MosaicML Streaming
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        if world_size > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOBAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        command = [sys.executable, "-m", "benchmarks.scale.readers", "--job", json.dumps(job)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output)
    return json.loads(output.splitlines()[-1])


def spread(numbers: list[int]) -> float:
    """The standard deviation of the numbers in a batch, relative to the deviation of all."""
    batches = [numbers[start : start + BATCH_SIZE] for start in range(0, len(numbers), BATCH_SIZE)]
    return float(np.mean([np.std(batch) for batch in batches]) / np.std(numbers))


def batches_as_sets(numbers: list[int]) -> list[set[int]]:
    return [set(numbers[start : start + BATCH_SIZE]) for start in range(0, len(numbers), BATCH_SIZE)]


def run_job(job: dict[str, Any]) -> None:
    """Run a job of `Bench` in this process and print its result."""
    warnings.simplefilter("ignore")
    case = Case(tuple(job["case"][0]), job["case"][1])
    if "write" in job:
        WRITERS[job["write"]](case, Path(job["path"]))
        result: dict[str, Any] = {}
    else:
        result = read(job, case)
    print(json.dumps(result), flush=True)


def read(job: dict[str, Any], case: Case) -> dict[str, Any]:
    """Read epochs; the first one is timed from the opening of the dataset."""
    open_source, library = OPENERS[job["read"]]
    import_module(library)
    import_module("torch")
    result: dict[str, Any] = {"imported_bytes": peak_bytes(), "seconds": [], "cpu_s": [], "numbers": []}
    workers_bytes = 0
    started_s, cpu_before_s = time.perf_counter(), time.process_time()
    source = open_source(job, case)
    state = None
    if "resume" in job:
        state = json.loads(Path(job["resume"]).read_text())
        source.resume(state)
    first = state["epoch"] if state else 0
    for epoch in range(first, first + job["epochs"]):
        numbers: list[Any] = []
        last = "stop_after" in job and epoch == first + job["epochs"] - 1
        sampled_s = 0.0
        for images, labels in source.batches(epoch, state["batches"] if state else 0):
            part = np.asarray(images.reshape(len(images), -1)[:, :4]).copy().view("<u4")[:, 0]
            assert (np.asarray(labels) == part % LABELS).all()
            numbers.append(part)
            if time.perf_counter() > sampled_s + 0.25 and job["workers"]:
                workers_bytes, sampled_s = max(workers_bytes, private_bytes_of_children()), time.perf_counter()
            if last and len(numbers) == job["stop_after"]:
                state = {"epoch": epoch, "batches": len(numbers), "library": source.state()}
                Path(job["state"]).write_text(json.dumps(state))
                break
        state = None
        result["seconds"].append(time.perf_counter() - started_s)
        result["cpu_s"].append(time.process_time() - cpu_before_s)
        result["numbers"].append(np.concatenate(numbers).tolist())
        started_s, cpu_before_s = time.perf_counter(), time.process_time()
    result["peak_bytes"] = peak_bytes() + workers_bytes
    return result


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def private_bytes_of_children() -> int:
    """Pages that only one of the workers uses; those inherited from this process are counted
    there."""
    total = 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        try:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024
    return total


def images_of(case: Case) -> Iterator[tuple[np.ndarray, int]]:
    """The images and labels in the order in which they are stored."""
    rng = np.random.default_rng(SEED)
    for start in range(0, case.images, 1024):
        numbers = np.arange(start, min(start + 1024, case.images), dtype="<u4")
        images = rng.integers(0, 256, (len(numbers), *case.shape), np.uint8)
        images.reshape(len(numbers), -1)[:, :4] = numbers[:, None].view(np.uint8)
        for number, image in zip(numbers.tolist(), images, strict=True):
            yield image, number % LABELS


def write_evernear(case: Case, path: Path) -> None:

    from evernear.common.store import FileStore
    from evernear.data.manifest import Manifest, save_manifest
    from evernear.data.writer import ShardWriter

    with tempfile.TemporaryDirectory() as scratch:
        labels = [f"label-{number}" for number in range(LABELS)]
        writer = ShardWriter(FileStore(path), "benchmark", case.shape, SHARD_BYTES, {}, labels, Path(scratch))
        source = images_of(case)
        while block := list(itertools.islice(source, 1024)):
            images, labels_of = np.stack([image for image, _ in block]), np.array([label for _, label in block])
            count = len(block)
            writer.append("train", images, labels_of, np.zeros(count, np.int64), np.zeros((count, 32), np.uint8))
        one = np.zeros(1, np.int64)
        writer.append("gallery", np.zeros((1, *case.shape), np.uint8), one, one, np.zeros((1, 32), np.uint8))
        writer.close()
        manifest = Manifest(
            name="benchmark",
            store_uri=path.as_uri(),
            source="benchmark",
            created="",
            parent=None,
            shape=case.shape,
            labels=tuple(labels),
            shards=tuple(writer.shards.values()),
        )
    save_manifest(manifest, path)


def write_webdataset(case: Case, path: Path) -> None:
    webdataset = import_module("webdataset")
    with webdataset.ShardWriter(f"{path}/%06d.tar", maxsize=SHARD_BYTES, verbose=0, encoder=False) as writer:
        for number, (image, label) in enumerate(images_of(case)):
            writer.write({"__key__": f"{number:08}", "bin": image.tobytes(), "cls": str(label).encode()})


def write_mosaicml(case: Case, path: Path) -> None:
    streaming = import_module("streaming")
    columns = {"image": f"ndarray:uint8:{','.join(map(str, case.shape))}", "label": "int"}
    with streaming.MDSWriter(out=str(path), columns=columns, size_limit=SHARD_BYTES) as writer:
        for image, label in images_of(case):
            writer.write({"image": image, "label": label})


def write_litdata(case: Case, path: Path) -> None:
    import_module("litdata").optimize(
        fn=samples_of,
        inputs=[case],
        output_dir=str(path),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def samples_of(case: Case) -> Iterator[dict[str, Any]]:
    for image, label in images_of(case):
        yield {"image": image, "label": label}


class Evernear:
    """Our shards, as the training step reads them; epochs are functions of the seed and their
    number."""

    def __init__(self, job: dict[str, Any], case: Case, uri: str) -> None:
        from evernear.common.store import open_store
        from evernear.data.manifest import load_manifest
        from evernear.data.shards import Dataset
        from evernear.embedding.data_loader import TrainingImages

        manifest = load_manifest(Path(job["directory"]))
        self._images = TrainingImages(Dataset(manifest, open_store(uri), Path(job["cache"])), frozenset())
        self._rank, self._world_size = job.get("rank", 0), job.get("world_size", 1)
        self._batches = case.images // BATCH_SIZE

    def batches(self, epoch: int, skip: int) -> Batches:
        batches = self._images.batches(BATCH_SIZE // self._world_size, SEED, epoch, self._rank, self._world_size)
        for images, labels in itertools.islice(batches, skip, self._batches):
            yield images.permute(0, 2, 3, 1), labels

    def state(self) -> None:
        return None

    def resume(self, state: dict[str, Any]) -> None:
        pass


class WebDataset:
    """Tar files, cached; shards and a buffer of samples are shuffled by seed and number of
    passes."""

    def __init__(self, job: dict[str, Any], case: Case) -> None:
        webdataset = import_module("webdataset")

        def pixels(data: bytes) -> np.ndarray:
            return np.frombuffer(data, np.uint8).reshape(case.shape)

        shards = sorted(path.name for path in Path(job["directory"]).glob("*.tar"))
        self._dataset = (
            webdataset.WebDataset(
                [f"{job['endpoint']}/{job['key']}/{name}" for name in shards],
                shardshuffle=100,
                detshuffle=True,
                seed=SEED,
                cache_dir=job["cache"],
                nodesplitter=webdataset.split_by_node,
                empty_check=False,
            )
            .compose(webdataset.detshuffle(WEBDATASET_BUFFER, seed=SEED))
            .to_tuple("bin", "cls")
            .map_tuple(pixels, int)
            .batched(BATCH_SIZE // job.get("world_size", 1))
        )
        # Workers that end with an epoch would shuffle every epoch alike.
        workers = job["workers"]
        loader = {"batch_size": None, "num_workers": workers, "persistent_workers": workers > 0}
        self._loader = webdataset.WebLoader(self._dataset, **loader)

    def batches(self, epoch: int, skip: int) -> Batches:
        import torch

        for images, labels in itertools.islice(self._loader, skip, None):
            yield torch.as_tensor(images), labels

    def state(self) -> None:
        return None  # it has none

    def resume(self, state: dict[str, Any]) -> None:
        detshuffle = import_module("webdataset").detshuffle
        for stage in self._dataset.pipeline:
            if isinstance(stage, detshuffle):
                stage.epoch = state["epoch"] - 1


class StatefulLoader:
    """A library whose data loader has a state."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def batches(self, epoch: int, skip: int) -> Batches:
        for batch in self._loader:
            yield batch["image"], batch["label"]

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["library"])


class MosaicML(StatefulLoader):
    """MDS files; the whole epoch is shuffled, and the loader has a state."""

    def __init__(self, job: dict[str, Any], case: Case) -> None:
        streaming = import_module("streaming")
        batch_size = BATCH_SIZE // job.get("world_size", 1)
        dataset = streaming.StreamingDataset(
            remote=f"s3://{job['key']}",
            local=job["cache"],
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=batch_size,
        )
        # Forked workers would share the connection that fetched the index, and wait for each
        # other's responses.
        for stream in dataset.streams:
            stream._downloader.clean_up()
        super().__init__(streaming.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=job["workers"]))


class LitData(StatefulLoader):
    """Optimized chunks; chunks and the samples of each are shuffled, and the loader has a state."""

    def __init__(self, job: dict[str, Any], case: Case) -> None:
        litdata = import_module("litdata")
        import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # no TLS here
        dataset = litdata.StreamingDataset(
            f"s3://{job['key']}",
            cache_dir=job["cache"],
            shuffle=True,
            seed=SEED,
            storage_options={"endpoint_url": job["endpoint"]},
        )
        batch_size = BATCH_SIZE // job.get("world_size", 1)
        super().__init__(litdata.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=job["workers"]))


WRITERS: dict[str, Callable[[Case, Path], None]] = {
    "evernear": write_evernear,
    "webdataset": write_webdataset,
    "mosaicml": write_mosaicml,
    "litdata": write_litdata,
}
OPENERS: dict[str, tuple[Callable[[dict[str, Any], Case], Any], str]] = {
    "evernear": (lambda job, case: Evernear(job, case, f"s3://{job['key']}"), "evernear.embedding.data_loader"),
    "directory": (
        lambda job, case: Evernear(job, case, Path(job["directory"]).as_uri()),
        "evernear.embedding.data_loader",
    ),
    "webdataset": (WebDataset, "webdataset"),
    "mosaicml": (MosaicML, "streaming"),
    "litdata": (LitData, "litdata"),
}


def speed_table(rows: list[dict[str, Any]], readers: list[Reader], cases: list[Case]) -> list[list[str]]:
    heading = ["images", "reader", "cold, images/s", "warm, images/s", "CPU time per image"]
    table = [[*heading, "peak memory", "peak memory, a quarter of the images", "bytes per image"]]
    for case, reader in itertools.product(cases, readers):
        mine = [row for row in rows if row["reader"] == reader.key and tuple(row["shape"]) == case.shape]
        whole = [row for row in mine if row["images"] == case.images]
        (part,) = [row for row in mine if row["images"] != case.images]
        cold, warm = (case.images / statistics.median(row["seconds"][epoch] for row in whole) for epoch in range(2))
        cpu_s = statistics.median(row["cpu_s"][1] for row in whole)
        table.append(
            [
                f"{case.images:,} of {'x'.join(map(str, case.shape))}",
                reader.key,
                f"{cold:,.0f}",
                f"{warm:,.0f}",
                "" if reader.workers else f"{cpu_s / case.images * 1e6:,.1f} µs",
                f"{statistics.median(row['peak_bytes'] for row in whole) / 2**20:,.0f} MiB",
                f"{part['peak_bytes'] / 2**20:,.0f} MiB",
                f"{whole[0]['stored_bytes'] / case.images:,.0f}",
            ]
        )
    return table


def order_table(orders: list[dict[str, Any]]) -> list[list[str]]:
    questions = ("same_in_another_process", "differs_by_epoch", "same_after_resume", "batches_of_two_ranks")
    sizes = list(orders[0]["spread"])
    heading = ["reader", "same in a different process", "different in each epoch", "same after a resume"]
    table = [[*heading, "two processes read the same batches", *(f"spread, {size}" for size in sizes)]]
    for row in orders:
        answers = ["yes" if row[question] else "no" for question in questions]
        table.append([row["reader"], *answers, *(f"{row['spread'][size]:.2f}" for size in sizes)])
    return table


if __name__ == "__main__":
    main()
