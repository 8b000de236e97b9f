"""Peak memory of ingest and reading, with 1 and 10 times the images:
``python benchmarks/ingest_memory.py``.

Each value is the high-water mark (VmHWM of /proc) of a separate process. The images are
incompressible noise: 28 x 28 gray as IDX files, and 32 x 32 color as PNG files in class
folders.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import machine

TIMES = 10
TARGET = 1.1

INGEST = """
import sys
from pathlib import Path
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.settings import DataSettings
source, store, artifact = sys.argv[1:]
save_manifest(ingest_source(DataSettings(source=source), store), Path(artifact))
"""
READ = """
import sys
from pathlib import Path
from evernear.data.shards import Dataset
dataset = Dataset.open(Path(sys.argv[3]))
for block in dataset.blocks("train"):
    pass
"""
SHUFFLE = """
import sys
from pathlib import Path
from evernear.data.shards import Dataset
dataset = Dataset.open(Path(sys.argv[3]))
for batch in dataset.shuffled_batches("train", 256, seed=0, epoch=0):
    pass
"""
REPORT = """
print(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM")))
"""
STEPS = {"ingest": INGEST, "again": INGEST, "read": READ, "shuffle": SHUFFLE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idx-images", type=int, default=70_000)
    parser.add_argument("--png-images", type=int, default=20_000)
    arguments = parser.parse_args()
    machine_info, rows = machine.describe(), []
    for kind, make, count in (
        ("mnist", make_idx, arguments.idx_images),
        ("folder", make_folder, arguments.png_images),
    ):
        small_run, large_run = (measure(kind, make, count * times) for times in (1, TIMES))
        for step in STEPS:
            small, large = small_run[step], large_run[step]
            rows.append(
                {
                    "source": kind,
                    "step": step,
                    "images": count,
                    "peak_bytes": small["peak_bytes"],
                    "wall_s": small["wall_s"],
                    "times": TIMES,
                    "peak_bytes_of_more": large["peak_bytes"],
                    "wall_s_of_more": large["wall_s"],
                    "ratio": round(large["peak_bytes"] / small["peak_bytes"], 3),
                }
            )
            print(rows[-1], flush=True)
    heading = [
        "source",
        "step",
        "images",
        "peak",
        f"peak with {TIMES} times the images",
        "ratio",
        "images per second",
    ]
    table = [heading]
    for row in rows:
        peaks = [f"{row[key] / 2**20:.0f} MiB" for key in ("peak_bytes", "peak_bytes_of_more")]
        speed = f"{row['images'] / row['wall_s']:,.0f}"
        table.append([row["source"], row["step"], f"{row['images']:,}", *peaks, f"{row['ratio']:.2f}", speed])
    machine.write(
        "ingest_memory",
        "Peak memory of ingest and reading with ten times the images",
        machine_info,
        {"target_ratio": TARGET, "rows": rows},
        table,
    )
    if any(row["ratio"] > TARGET for row in rows):
        sys.exit(f"A memory ratio is above {TARGET}.")


def measure(kind: str, make: Callable[[Path, int], None], count: int) -> dict[str, dict[str, float]]:
    """Measure peak memory and wall time of each step on ``count`` images."""
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "images"
        make(source, count)
        arguments = [f"{kind}:{source}", (Path(scratch) / "store").as_uri(), str(Path(scratch) / "artifact")]
        for step, script in STEPS.items():
            started_s = time.monotonic()
            completed = subprocess.run(
                [sys.executable, "-c", script + REPORT, *arguments], check=True, capture_output=True, text=True
            )
            wall_s = round(time.monotonic() - started_s, 2)
            result[step] = {"peak_bytes": int(completed.stdout) * 1024, "wall_s": wall_s}
    return result


def make_idx(directory: Path, count: int) -> None:
    """Write files in MNIST's format, with six training images for each test image."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    for part, images in (("train", count - count // 7), ("t10k", count // 7)):
        with (directory / f"{part}-images-idx3-ubyte").open("wb") as file:
            file.write(bytes([0, 0, 8, 3]) + np.array([images, 28, 28], ">u4").tobytes())
            for start in range(0, images, 10_000):
                file.write(rng.bytes(784 * min(10_000, images - start)))
        labels = rng.integers(0, 10, images, np.uint8)
        header = bytes([0, 0, 8, 1]) + np.array([images], ">u4").tobytes()
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def make_folder(directory: Path, count: int) -> None:
    """Write ten class folders of PNG files."""
    rng = np.random.default_rng(0)
    for number in range(count):
        folder = directory / f"class-{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        buffer = BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(buffer, "PNG", compress_level=1)
        (folder / f"{number}.png").write_bytes(buffer.getvalue())


if __name__ == "__main__":
    main()
