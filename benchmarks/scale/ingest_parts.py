"""Ingest in parts: ``python -m benchmarks.scale.ingest_parts``.

A folder of PNG files, 28 x 28 gray, is ingested twice by processes that run
``python -m evernear.kubeflow.part``, as the pods of an Indexed Job do, one after the other: all
files as one part, and in four parts. With four nodes, the step would take as long as the longest
part and the stages in the step's own process: list, plan, combine and publish.

CPU time is what a node with as many cores needs at least; it does not depend on what else the
machine does.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import machine
from benchmarks.scale.embed import Took, run_worker
from evernear.common.parts import OpenWorker, Parts
from evernear.data import parts as parts_stage
from evernear.data.ingest import ingest_source
from evernear.settings import DataSettings

CLASSES = 100
PARTS = 4
UNITS = ("wall_s", "cpu_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    images = parser.parse_args().images
    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        write_images(Path(scratch, "images"), images)
        rows = [ingest(Path(scratch), parts, -(-images // parts)) for parts in (1, PARTS)]
    alone, divided = rows
    equal = alone["digest"] == divided["digest"]
    ratios = {unit: round(divided[unit] / alone[unit], 3) for unit in UNITS}
    result = {"images": images, "equal": equal, "ratios": ratios, "rows": rows}
    table = [
        ["", "CPU seconds"],
        ["all files in one part, and the other stages", f"{alone['cpu_s']:.1f}"],
        [f"the longest of {PARTS} parts, and the other stages", f"{divided['cpu_s']:.1f}"],
        ["of which list, plan, combine and publish", f"{divided['stages']['cpu_s']:.1f}"],
        ["ratio", f"{ratios['cpu_s']:.2f}"],
        ["digests equal", "yes" if equal else "NO"],
    ]
    machine.write("scale_ingest_parts", f"Ingest of {images:,} files in parts", machine_info, result, table)


def ingest(scratch: Path, parts: int, part_names: int) -> dict:
    """Ingest in parts that run one after the other; the times are those of the longest part and the
    other stages."""
    took: list[Took] = []

    def run(planned: Parts, _: OpenWorker) -> None:
        took.extend(run_worker(planned, index, parts) for index in range(parts))

    parts_stage.PART_NAMES = part_names
    settings = DataSettings(source=f"folder:{scratch / 'images'}")
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    manifest = ingest_source(settings, (scratch / f"store-{parts}").as_uri(), run=run)
    wall_s = time.monotonic() - started_s - sum(each.wall_s for each in took)
    stages = Took(wall_s, time.process_time() - started_cpu_s)
    row = {unit: getattr(stages, unit) + max(getattr(each, unit) for each in took) for unit in UNITS}
    row |= {"digest": manifest.digest, "stages": stages._asdict(), "took": [each._asdict() for each in took]}
    print(row, flush=True)
    return row


def write_images(folder: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / f"class-{label:03}").mkdir(parents=True)
    for number in range(count):
        pixels = generator.integers(0, 256, (28, 28), np.uint8)
        Image.fromarray(pixels).save(folder / f"class-{number % CLASSES:03}" / f"{number}.png", compress_level=1)


if __name__ == "__main__":
    main()
