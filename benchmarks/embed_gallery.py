"""Images per second of embedding a gallery:
``python benchmarks/embed_gallery.py --source mnist``.

The benchmark runs the whole embed step: load the network, read the gallery split (here most of the
training images, because galleries are large) from its shards, embed it with the frozen network, and
write embeddings. The baseline follows the source project: the plain scripted network with ten
images per batch, which reads the same shards and writes nothing. The upper bound is the frozen
network alone at its best batch size, on images in memory, with one batch for each thread at a time.
They alternate, and the best of several repeats is reported.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, settings_of
from evernear.data.shards import Dataset
from evernear.embedding.data_loader import embed_images, one_torch_thread
from evernear.embedding.embed import embed_dataset
from evernear.embedding.export import NETWORK_FILE, export_network, load_network
from evernear.embedding.network import Network
from evernear.embedding.train import train_network
from evernear.settings import Settings

PLAIN_BATCH = 10
BATCHES = (8, 64, 256, 512)
NETWORK_IMAGES = 8192
"""Images of one measurement of the network alone."""
GALLERY_FRACTION = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist", help="a source of `evernear run`: mnist or mnist:DIRECTORY")
    parser.add_argument("--presets", nargs="+", default=["default", "best"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    machine_info, results = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch:
        dataset = ingest_dataset(
            arguments.source, Path(scratch), "default", f"data.gallery_fraction={GALLERY_FRACTION}"
        )
        for preset in arguments.presets:
            comparison = compare(dataset, settings_of(preset), Path(scratch), arguments.repeats)
            results.append({"preset": preset, **comparison})
            print(results[-1], flush=True)
    machine.write(
        "embed_gallery",
        "Speed of the embed step, compared with the plain scripted network",
        machine_info,
        {"results": results},
        table(results),
    )


def compare(dataset: Dataset, settings: Settings, scratch: Path, repeats: int) -> dict[str, Any]:
    # The weights do not affect the speed.
    one_epoch = settings.train.model_copy(update={"epochs": 1, "min_steps": 0})
    train_network(dataset, one_epoch, scratch / "trained")
    export_network(scratch / "trained", dataset, scratch / "network")
    plain = torch.jit.load(scratch / "network" / NETWORK_FILE).eval()

    def evernear_speed() -> None:
        fresh = Path(tempfile.mkdtemp(dir=scratch))  # what a part has embedded is not embedded again
        embed_dataset(scratch / "network", dataset, fresh, ("gallery",))

    def baseline() -> None:
        for block in dataset.blocks("gallery", PLAIN_BATCH):
            embed_images(plain, block.images)

    frozen, images = load_network(scratch / "network"), next(dataset.blocks("gallery", max(BATCHES))).images
    speeds: dict[str, list[float]] = {"evernear": [], "plain": [], "network": []}
    for _ in range(repeats):
        speeds["network"].append(max(network_speed(frozen, images[:size]) for size in BATCHES))
        for name, work in (("evernear", evernear_speed), ("plain", baseline)):
            speeds[name].append(dataset.count("gallery") / seconds(work))
    best = {name: max(values) for name, values in speeds.items()}
    return {
        "gallery_images": dataset.count("gallery"),
        "images_per_s": best["evernear"],
        "plain_images_per_s": best["plain"],
        "network_images_per_s": best["network"],
        "share_of_network": best["evernear"] / best["network"],
        "median_share_of_network": statistics.median(
            step / alone for step, alone in zip(speeds["evernear"], speeds["network"], strict=True)
        ),
        "times_faster": best["evernear"] / best["plain"],
        "median_times_faster": statistics.median(speeds["evernear"]) / statistics.median(speeds["plain"]),
        "all_images_per_s": speeds,
    }


def network_speed(network: Network, images: NDArray[np.uint8]) -> float:
    """Images per second of the network alone, in batches of all ``images``."""
    calls = math.ceil(NETWORK_IMAGES / len(images))
    with one_torch_thread() as threads, ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda _: embed_images(network, images), range(2 * threads)):
            pass  # TorchScript compiles in the first calls
        taken_s = seconds(lambda: list(pool.map(lambda _: embed_images(network, images), range(calls))))
    return calls * len(images) / taken_s


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    heading = [
        "settings",
        "embed step, images/s",
        "network alone at its best batch size, images/s",
        "share",
        f"plain scripted network, batch size {PLAIN_BATCH}, images/s",
        "speedup",
    ]
    return [heading] + [
        [
            r["preset"],
            f"{r['images_per_s']:,.0f}",
            f"{r['network_images_per_s']:,.0f}",
            f"{r['share_of_network']:.2f}",
            f"{r['plain_images_per_s']:,.0f}",
            f"{r['times_faster']:.1f}",
        ]
        for r in results
    ]


if __name__ == "__main__":
    main()
