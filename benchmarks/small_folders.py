"""The README's own command on small folders: ``python benchmarks/small_folders.py --directory DIRECTORY``.

Each run is ``evernear run --source folder:IMAGES --workdir mine`` in an empty directory, on free ports, with the
default settings: it trains, passes the gate or not, and deploys to a TorchServe that answers the stored queries. The
images are PNG files of scikit-learn's handwritten digits, two to five classes of equal size, which the seed chooses. A
folder may be refused by validation or held by the gate. A release that passed the gate must go live.

The smoke test of many more folders is replayed in this process: a small network is trained for seconds, and the release
is packed and asked for its stored queries, one at a time as by TorchServe, whose batches round differently.

``--directory`` stores the outcome of each run: a killed benchmark continues with the next one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import machine
import numpy as np
from PIL import Image
from releases import build_system, release_maker, settings_on_free_ports
from sklearn.datasets import load_digits

from evernear.deployment.smoke import smoke
from evernear.errors import DataError, ServingError
from evernear.release.archive_reader import open_release
from evernear.serving.core import Predictor
from evernear.serving.responses import Prediction
from evernear.settings import ServingSettings

SIZES = (12, 30, 60, 120, 300)
OUTCOMES = ("refused", "held by the gate", "promoted", "failed after the gate", "failed elsewhere")
AFTER_THE_GATE = ("archive", "deploy", "notify")
PARTS = {"run": "evernear run", "replay": "smoke test alone"}
Outcome = dict[str, str]
EVERNEAR = str(Path(sys.executable).parent / "evernear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--replays", type=int, default=20, help="seeds of the smoke tests in this process")
    arguments = parser.parse_args()
    machine_info = machine.describe()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    rows = [
        stored(arguments.directory / f"{part.__name__}-{images}-{seed}.json", part, images, seed)
        for part, seeds in ((replay, arguments.replays), (run, arguments.seeds))
        for seed, images in product(range(seeds), arguments.sizes)
    ]
    machine.write("small_folders", machine_info, {"rows": rows}, table(rows))
    if any(row["outcome"].startswith("failed") for row in rows):
        sys.exit("A run failed.")


def stored(file: Path, part: Callable[[int, int], Outcome], images: int, seed: int) -> dict[str, Any]:
    """The outcome of a run or a replay, which is stored in ``file``."""
    if not file.exists():
        row = {"part": part.__name__, "images": images, "seed": seed, **part(images, seed)}
        file.write_text(json.dumps(row))
        print(row, flush=True)
    return json.loads(file.read_text())


def run(images: int, seed: int) -> Outcome:
    """The outcome of the command, and the last line that it printed."""
    with tempfile.TemporaryDirectory() as scratch:
        write_images(Path(scratch) / "IMAGES", images, seed)
        ports = settings_on_free_ports().model_dump(
            include={n for n in ServingSettings.model_fields if n[-5:] == "_port"}
        )
        options = [word for name, port in ports.items() for word in ("--set", f"serving.{name}={port}")]
        command = [EVERNEAR, "run", "--source", "folder:IMAGES", "--workdir", "mine", "--json", *options]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        subprocess.run([EVERNEAR, "stop", "--workdir", "mine"], cwd=scratch, capture_output=True)
    if done.returncode == 0:
        result = json.loads(done.stdout)
        return {"outcome": "promoted" if result["promoted"] else "held by the gate", "message": result["summary"]}
    failed = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("  !! ")]
    step = failed[0] if failed else ""
    kind = "failed after the gate" if step in AFTER_THE_GATE else "failed elsewhere"
    return {
        "outcome": "refused" if step in ("ingest", "validate") else kind,
        "message": done.stderr.strip().splitlines()[-1],
    }


def replay(images: int, seed: int) -> Outcome:
    """The outcome of the smoke test alone."""
    with tempfile.TemporaryDirectory() as scratch:
        write_images(Path(scratch) / "IMAGES", images, seed)
        try:
            system = build_system(Path(scratch) / "system", f"folder:{scratch}/IMAGES")
            packed = release_maker(system, lambda: Path(scratch))()
        except DataError as error:
            return {"outcome": "refused", "message": str(error)}
        parts = open_release(packed.archive, Path(scratch) / "opened")
        try:
            answered = smoke(OneByOne(Predictor.open(parts)), parts)
        except ServingError as error:
            return {"outcome": "failed after the gate", "message": str(error)}
        return {"outcome": "promoted", "message": f"{answered} stored queries"}


@dataclass
class OneByOne:
    """A client of a predictor in this process."""

    predictor: Predictor

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """The prediction in a batch of one."""
        (answer,) = self.predictor.predict([image])
        assert isinstance(answer, Prediction)
        return answer


def write_images(folder: Path, images: int, seed: int) -> None:
    """Write ``images`` digits as PNG files, one subfolder per class."""
    digits, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    classes = rng.choice(10, 2 + seed % 4, replace=False)
    for number, label in enumerate(classes):
        count = len(range(number, images, len(classes)))
        directory = folder / f"digit-{label}"
        directory.mkdir(parents=True)
        for row in rng.permutation(np.flatnonzero(labels == label))[:count]:
            Image.fromarray((digits[row].reshape(8, 8) * 255 / 16).astype(np.uint8)).save(directory / f"{row}.png")


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    counts: dict[tuple[str, int], Counter[str]] = {}
    for row in rows:
        counts.setdefault((row["part"], row["images"]), Counter())[row["outcome"]] += 1
    return [
        ["", "images", "folders", *OUTCOMES],
        *(
            [PARTS[part], str(images), str(count.total()), *(str(count[kind]) for kind in OUTCOMES)]
            for (part, images), count in sorted(counts.items())
        ),
    ]


if __name__ == "__main__":
    main()
