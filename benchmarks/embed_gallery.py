"""Images per second of embedding a gallery:
``python benchmarks/embed_gallery.py --source mnist``.

The benchmark runs the whole embed step: load the network, read the gallery split (here most of the
training images, because galleries are large) from its shards, embed it with the frozen network, and
write embeddings. The baseline follows the source project: the plain scripted network with ten
images per batch, which reads the same shards and writes nothing. The two alternate, and the best of
several repeats is reported.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, settings_of
from evernear.data.shards import Dataset
from evernear.embedding.data_loader import embed_images
from evernear.embedding.embed import embed_dataset
from evernear.embedding.export import NETWORK_FILE, export_network
from evernear.embedding.train import train_network
from evernear.settings import Settings

PLAIN_BATCH = 10
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
        embed_dataset(scratch / "network", dataset, scratch / "embeddings", ("gallery",))

    def baseline() -> None:
        for block in dataset.blocks("gallery", PLAIN_BATCH):
            embed_images(plain, block.images)

    speeds: dict[str, list[float]] = {"evernear": [], "plain": []}
    for _ in range(repeats):
        for name, work in (("evernear", evernear_speed), ("plain", baseline)):
            speeds[name].append(dataset.count("gallery") / seconds(work))
    best = {name: max(values) for name, values in speeds.items()}
    return {
        "gallery_images": dataset.count("gallery"),
        "images_per_s": best["evernear"],
        "plain_images_per_s": best["plain"],
        "times_faster": best["evernear"] / best["plain"],
        "median_times_faster": statistics.median(speeds["evernear"]) / statistics.median(speeds["plain"]),
        "all_images_per_s": speeds,
    }


def seconds(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    heading = [
        "settings",
        "embed step, images/s",
        f"plain scripted network, batch size {PLAIN_BATCH}, images/s",
        "speedup",
    ]
    return [heading] + [
        [
            r["preset"],
            f"{r['images_per_s']:,.0f}",
            f"{r['plain_images_per_s']:,.0f}",
            f"{r['times_faster']:.1f}",
        ]
        for r in results
    ]


if __name__ == "__main__":
    main()
