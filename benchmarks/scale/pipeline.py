"""Time, peak memory and output of each step of the pipeline at growing numbers of images.

``python -m benchmarks.scale.pipeline --source DIRECTORY --counts 10000 100000 1000000``, with a
directory of MNIST's files. The larger sets are random affine variations of its digits; a seventh of
each is the test split, as in MNIST. The training and the probe run for one epoch, so that the work
of every step is proportional to its images. The growth of a step is the exponent p of time ~
images^p between the two largest sets: 1 is linear.
"""

import argparse
import math
import shutil
import struct
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.scale.vectors import vary
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.data.sources.mnist import Mnist

SETTINGS = ("train.epochs=1", "train.min_steps=0", "evaluation.probe_epochs=1", "target=registry")
TEST_FRACTION = 1 / 7
CHUNK = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path)
    parser.add_argument("--counts", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch:
        for count in sorted(arguments.counts):
            directory = Path(scratch) / str(count)
            write_digits(arguments.source, directory / "images", count)
            runs.append({"images": count, **run(directory)})
            print(runs[-1], flush=True)
            shutil.rmtree(directory)
    machine.write(
        "scale_pipeline",
        "Time, peak memory and output of each step at growing numbers of images",
        machine_info,
        {"settings": SETTINGS, "runs": runs},
        table(runs),
    )


def write_digits(source: Path, directory: Path, count: int) -> None:
    """Write ``count`` digits to ``directory`` in MNIST's format; beyond MNIST's size, they are
    variations."""
    directory.mkdir(parents=True)
    blocks = list(Mnist(source).blocks())
    generator = torch.Generator().manual_seed(0)
    for part, split in (("t10k", "test"), ("train", None)):
        images = np.concatenate([block.images for block in blocks if block.explicit_split == split])
        labels = np.concatenate([np.array(block.labels, np.uint8) for block in blocks if block.explicit_split == split])
        size = round(count * (TEST_FRACTION if split == "test" else 1 - TEST_FRACTION))
        stem = directory / part
        with (
            Path(f"{stem}-images-idx3-ubyte").open("wb") as image_file,
            Path(f"{stem}-labels-idx1-ubyte").open("wb") as label_file,
        ):
            image_file.write(struct.pack(">HBBIII", 0, 8, 3, size, *images.shape[1:]))
            label_file.write(struct.pack(">HBBI", 0, 8, 1, size))
            for start in range(0, size, CHUNK):
                rows = np.arange(start, min(start + CHUNK, size))
                image_file.write(_digits(images, rows, generator).tobytes())
                label_file.write(labels[rows % len(labels)].tobytes())


def _digits(images: NDArray[np.uint8], rows: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
    chosen = images[rows % len(images)]
    if rows[-1] < len(images):
        return chosen
    return vary(chosen[..., np.newaxis], generator)[..., 0]


def run(directory: Path) -> dict[str, Any]:
    """Run the pipeline on the images in ``directory``: bytes of its dataset; seconds, peak and
    output of each step."""
    command = [str(Path(sys.executable).parent / "evernear"), "run", "--source", f"mnist:{directory / 'images'}"]
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    subprocess.run([*command, "--workdir", str(directory / "work"), *options], check=True, stdout=sys.stderr)
    store = open_store((directory / "work" / "store").as_uri())
    (name,) = {info.key.split("/")[1] for info in store.list("runs/") if "/steps/" in info.key}
    steps: dict[str, dict[str, float]] = {}
    for step in RunRecord(store, name).steps():
        assert step.ended is not None
        outputs = next(iter((directory / "work" / "runs").glob(f"*/*/{step.step}")), None)
        files = outputs.rglob("*") if outputs else ()
        steps[step.step] = {
            "seconds": round((step.ended - step.started).total_seconds(), 1),
            "peak_memory_bytes": step.peak_memory_bytes,
            "output_bytes": sum(file.stat().st_size for file in files if file.is_file()),
        }
    return {"dataset_bytes": sum(info.size_bytes for info in store.list("datasets/")), "steps": steps}


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each step with its time, peak memory and output in each run, and the growth of its
    time."""
    counts = [one["images"] for one in runs]
    rows = [["step", *(f"{count:,} images: s, peak MB, output MB" for count in counts), "growth"]]
    for name in runs[-1]["steps"]:
        steps = [one["steps"][name] for one in runs]
        texts = [
            f"{step['seconds']:.1f}, {step['peak_memory_bytes'] / 1e6:.0f}, {step['output_bytes'] / 1e6:.1f}"
            for step in steps
        ]
        rows.append([name, *texts, growth(counts, [step["seconds"] for step in steps])])
    return [*rows, ["images in the store", *(f"{one['dataset_bytes'] / 1e6:.1f} MB" for one in runs), ""]]


def growth(counts: list[int], seconds: list[float]) -> str:
    """The exponent of the growth between the last two runs; empty if the times are too short."""
    pairs = list(pairwise(zip(counts, seconds, strict=True)))
    if not pairs or min(seconds[-2:]) < 1:
        return ""
    (few, short_s), (many, long_s) = pairs[-1]
    return f"{math.log(long_s / short_s) / math.log(many / few):.2f}"


if __name__ == "__main__":
    main()
