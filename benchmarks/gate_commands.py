"""A chain of real runs, each with a worse network:
``python benchmarks/gate_commands.py``.

180 handwritten digits of scikit-learn are a source with 18 test images. Each
``evernear run`` trains on them with fewer steps than the run before it, so that the
network becomes a little worse each time. The chain ends when the gate holds a release.
"New digits" is the accuracy on the 1,617 other digits, measured with
``evernear batch-predict``. The rules that compare a release with fixed numbers are off,
so that only the comparisons with champion and anchor can hold it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks import machine

IMAGES, TEST_FRACTION = 180, 0.1
STEPS = (300, 60, 40, 30, 24, 20, 16, 13, 10, 8)
GATE_OFF = ("gate.accuracy_floor=0", "gate.beat_baseline=false", "gate.false_reject_ceiling=1")


def evernear(workdir: Path, *words: str, settings: tuple[str, ...] = ()) -> str:
    """The output of a command. A held release is not an error."""
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "evernear", *words, "--workdir", str(workdir), *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def write_digits(directory: Path) -> None:
    """Write ``source`` with class folders, and ``new`` with the other digits, whose
    names begin with the label."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    for place, row in enumerate(order.tolist()):
        label, image = str(digits.target[row]), Image.fromarray((digits.images[row] * 15.9).astype(np.uint8))
        path = (
            directory / "source" / label / f"{row}.png" if place < IMAGES else directory / "new" / f"{label}-{row}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def accuracy_on_new(directory: Path, workdir: Path, version: str) -> float:
    """The share of the new digits whose class the release predicts, known or not."""
    out = directory / "answers" / version
    evernear(
        workdir, "batch-predict", "--source", f"folder:{directory / 'new'}", "--out", str(out), "--release", version
    )
    table = pq.read_table(out, columns=["path", "label"]).to_pydict()
    return float(np.mean([Path(path).name[0] == label for path, label in zip(*table.values(), strict=True)]))


def main() -> None:
    """Run the chain and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    description = machine.describe()
    table = [["run", "steps", "accuracy on the test images", "new digits", "verdict", "reason"]]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="evernear-chain-") as temporary:
        directory = Path(temporary)
        write_digits(directory)
        for number, steps in enumerate(STEPS, 1):
            settings = (f"train.min_steps={steps}", "train.epochs=1", f"data.test_fraction={TEST_FRACTION}", *GATE_OFF)
            source = ("--source", f"folder:{directory / 'source'}", "--preset", "quick")
            evernear(directory / "work", "run", *source, settings=("target=registry", *settings))
            release = json.loads(evernear(directory / "work", "registry", "list", "--json"))[-1]
            verdict = release["verdict"]
            run = {
                "steps": steps,
                "accuracy": release["metrics"]["accuracy"],
                "test_images": release["metrics"]["test_images"],
                "new": accuracy_on_new(directory, directory / "work", release["version"]),
                "promoted": verdict["promote"],
                "reasons": verdict["reasons"],
            }
            runs.append(run)
            share = f"{run['accuracy']:.1%} of {run['test_images']:.0f}"
            said = "promoted" if run["promoted"] else "held"
            reasons = "" if run["promoted"] else " ".join(verdict["reasons"])
            table.append([str(number), str(steps), share, f"{run['new']:.1%}", said, reasons])
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
            if not run["promoted"]:
                break
    title = "A chain of real runs, each with a worse network"
    machine.write("gate_commands", title, description, {"runs": runs}, table)


if __name__ == "__main__":
    main()
