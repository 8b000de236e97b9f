"""A head on the features of a pretrained backbone,
compared with whitened features and with logistic regression on the same features.

``python benchmarks/head.py --source signs=DIRECTORY --source clothing=DIRECTORY`` with
class folders of photographs in ``DIRECTORY/train`` and ``DIRECTORY/test``. The settings
are those of the preset photos, whose queries are used by no method. Each method knows
the same training and gallery images: all of them, or a random sample of 5 or 20 images
of each class. The features, the whitening, the head and the center are those of the
train and export steps. A test image is recognized by the nearest of the known images,
which are the gallery of a release with a frozen backbone. The logistic regression of
scikit-learn (C = 1) trains on the features, each divided by its standard deviation.

The results are written after each sample. ``--add`` keeps them, so that only missing
samples are measured. ``--directory`` keeps the features too.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, settings_of
from evernear.common.store import open_store
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.export import class_center
from evernear.embedding.freeze import Pretrained, open_pretrained
from evernear.embedding.frozen_backbone import FrozenHead
from evernear.embedding.head import train_head, whitening_for
from evernear.embedding.timm_member import Whitening
from evernear.settings import TrainSettings

HEADING = (
    "photographs",
    "images of a class",
    "known images, test images",
    "logistic regression",
    "whitened",
    "head, no views",
    "head",
    "as served",
    "errors as served, relative to logistic regression",
)
METHODS = ("regression", "whitened", "head_without_views", "head", "served")


class Labeled(NamedTuple):
    """Features (N, F) and their classes (N,)."""

    features: Tensor
    classes: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=DIRECTORY", help="repeatable")
    parser.add_argument("--images-per-class", nargs="+", type=int, default=[5, 20], help="beside all images")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the samples and of the heads")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--directory", type=Path, help="keeps the images and their features; temporary by default")
    parser.add_argument("--add", action="store_true", help="keep the results, and measure what they lack")
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), load_runs() if arguments.add else []
    samples = [(count, seed) for count in (None, *arguments.images_per_class) for seed in arguments.seeds]
    with tempfile.TemporaryDirectory() as scratch:
        for name, _, source in (each.partition("=") for each in arguments.source):
            known = [(run["images_per_class"], run["seed"]) for run in runs if run["source"] == name]
            missing = [sample for sample in samples if sample not in known]
            if not missing:
                continue
            directory = (arguments.directory or Path(scratch)) / name
            dataset = ingest_dataset(f"folder:{source}", directory, "photos", *arguments.set)
            for count, seed in missing:
                settings = settings_of("photos", *arguments.set, f"train.seed={seed}").train
                run = {"source": name, "images_per_class": count, "seed": seed, "load": os.getloadavg()[0]}
                runs.append(run | measure(dataset, settings, directory, count))
                print(runs[-1], flush=True)
                machine.write(
                    "head",
                    "A head on pretrained features, compared with logistic regression",
                    machine_info,
                    {"settings": arguments.set, "runs": runs},
                    table(runs),
                )


def load_runs() -> list[dict[str, Any]]:
    return json.loads((machine.RESULTS / "head.json").read_text())["runs"]


class Sample(TrainingImages):
    """The train and gallery splits with ``count`` random images of each class, or with
    all images if ``count`` is None.

    The gallery's share of a sample is that of the dataset, but at least one image of
    each class.
    """

    def __init__(self, dataset: Dataset, count: int | None, seed: int) -> None:
        super().__init__(dataset, frozenset())
        self._chosen = {
            split: draw(dataset, split, images, seed) for split, images in split_counts(dataset, count).items()
        }
        self.count = len(self._chosen["train"])
        self._all = self._chosen["train"] | self._chosen["gallery"]

    def classes_of(self, block: Block) -> NDArray[np.int64]:
        return np.where([each.tobytes() in self._all for each in block.digests], super().classes_of(block), -1)


def split_counts(dataset: Dataset, count: int | None) -> dict[Split, int | None]:
    """The number of images of each class in a sample's train and gallery splits."""
    if count is None:
        return {"train": None, "gallery": None}
    gallery, train = (dataset.count(split) for split in ("gallery", "train"))
    in_gallery = max(1, round(count * gallery / (gallery + train)))
    return {"train": count - in_gallery, "gallery": in_gallery}


def draw(dataset: Dataset, split: Split, count: int | None, seed: int) -> set[bytes]:
    """The digests of ``count`` random images of each class in ``split``; None: all."""
    blocks = list(dataset.blocks(split, 1024))
    labels, digests = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("labels", "digests"))
    order = np.random.default_rng(seed).permutation(len(labels))
    rows = [order[labels[order] == label][:count] for label in np.unique(labels)]
    return {digests[row].tobytes() for row in np.concatenate(rows)}


def measure(dataset: Dataset, settings: TrainSettings, directory: Path, count: int | None) -> dict[str, Any]:
    """Test accuracy of each method that knows ``count`` images of each class."""
    pretrained = open_pretrained(dataset, settings, open_store((directory / "store").as_uri()))
    images = Sample(dataset, count, settings.seed)
    everything = TrainingImages(dataset, frozenset())
    splits: tuple[Split, ...] = ("gallery", "train")
    gallery, train = (read(pretrained, dataset, split, images) for split in splits)
    test = read(pretrained, dataset, "test", everything)
    known = Labeled(*(torch.cat(parts) for parts in zip(gallery, train, strict=True)))

    def accuracy(last_layer: Whitening) -> float:
        return nearest_neighbor_accuracy(embedder(pretrained, last_layer, gallery, images.classes), known, test)

    whitened = accuracy(whitening_for(pretrained.features, dataset, images))
    trained = {
        name: train_head(pretrained.features, pretrained.architecture, dataset, images, chosen)
        for name, chosen in (
            ("head_without_views", settings.model_copy(update={"views": 0})),
            ("head", settings),
        )
    }
    accuracies = {name: accuracy(head.map) for name, head in trained.items()}
    return {
        "known_images": len(known.classes),
        "test_images": len(test.classes),
        "regression": regression_accuracy(known, test),
        "whitened": whitened,
        **accuracies,
        "served": accuracies["head"] if trained["head"].test.used else whitened,
        "tests": {name: head.test.model_dump() for name, head in trained.items()},
    }


def read(pretrained: Pretrained, dataset: Dataset, split: Split, images: TrainingImages) -> Labeled:
    """The features and classes of ``split``."""
    batches = list(pretrained.features.batches(dataset, split, images))
    return Labeled(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def embedder(
    pretrained: Pretrained, last_layer: Whitening, gallery: Labeled, classes: int
) -> Callable[[Tensor], Tensor]:
    """Maps features (N, F) to vectors (N, D), centered as in the export step."""
    pretrained.member.standardize = last_layer
    head = FrozenHead(pretrained.network).eval()
    head.center = class_center([(head(gallery.features), gallery.classes)], classes)
    return head


@torch.inference_mode()
def nearest_neighbor_accuracy(embed: Callable[[Tensor], Tensor], gallery: Labeled, test: Labeled) -> float:
    """Share of ``test`` whose nearest neighbor in ``gallery`` is of the same class."""
    nearest = (embed(test.features) @ embed(gallery.features).T).argmax(dim=1)
    return float((gallery.classes[nearest] == test.classes).float().mean())


def regression_accuracy(known: Labeled, test: Labeled) -> float:
    """Test accuracy of a logistic regression."""
    regression = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=2000))
    known_rows, test_rows = ((each.features.numpy(), each.classes.numpy()) for each in (known, test))
    return float(regression.fit(*known_rows).score(*test_rows))


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each source and number of images, with means over seeds."""
    rows = [list(HEADING)]
    for source, count in dict.fromkeys((run["source"], run["images_per_class"]) for run in runs):
        matching = [run for run in runs if (run["source"], run["images_per_class"]) == (source, count)]
        means = [statistics.mean(run[method] for run in matching) for method in METHODS]
        images = f"{matching[0]['known_images']:,}, {matching[0]['test_images']:,}"
        errors = f"{(1 - means[-1]) / (1 - means[0]):.2f}" if means[0] < 1 else "-"
        rows.append([source, str(count or "all"), images, *(f"{mean:.1%}" for mean in means), errors])
    return rows


if __name__ == "__main__":
    main()
