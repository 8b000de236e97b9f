"""Peak memory of the embed step with ten times the images.

Usage: ``python benchmarks/embed_memory.py --source mnist``. Two datasets contain the
same images, 8% or 80% of them in the gallery; each is embedded in a separate process,
whose peak (``VmHWM`` in Linux's /proc) is read at its end.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.settings import DataSettings, TrainSettings

FRACTIONS = (0.08, 0.80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist", help="a source of `evernear run`: mnist or mnist:DIRECTORY")
    parser.add_argument("--measure", nargs=3, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(peak_bytes(*arguments.measure))
        return

    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [measure(arguments.source, fraction, Path(scratch) / str(fraction)) for fraction in FRACTIONS]
    few, many = runs
    result = {
        "times_images": many["images"] / few["images"],
        "times_memory": many["peak_bytes"] / few["peak_bytes"],
        "runs": runs,
    }
    machine.write(
        "embed_memory", "Peak memory of the embed step with ten times the images", machine_info, result, table(result)
    )


def measure(source: str, gallery_fraction: float, scratch: Path) -> dict[str, Any]:
    settings = DataSettings(source=source, gallery_fraction=gallery_fraction)
    save_manifest(ingest_source(settings, (scratch / "store").as_uri()), scratch)
    dataset = Dataset.open(scratch)
    train_network(dataset, TrainSettings(epochs=1, min_steps=0), scratch / "trained")
    export_network(scratch / "trained", dataset, scratch / "network", tolerance=1e-4)
    command = [
        sys.executable,
        __file__,
        "--measure",
        str(scratch / "network"),
        str(scratch),
        str(scratch / "embeddings"),
    ]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"images": dataset.count("gallery"), "peak_bytes": peak}


def peak_bytes(network: Path, dataset: Path, embeddings: Path) -> int:
    from evernear.embedding.embed import embed_dataset

    embed_dataset(network, Dataset.open(dataset), embeddings, ("gallery",))
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def table(result: dict[str, Any]) -> list[list[str]]:
    rows = [[f"{run['images']:,}", f"{run['peak_bytes'] / 2**20:,.0f} MiB"] for run in result["runs"]]
    ratio = [f"{result['times_images']:.1f}x", f"{result['times_memory']:.3f}x"]
    return [["gallery images", "peak memory of the embed step"], *rows, ratio]


if __name__ == "__main__":
    main()
