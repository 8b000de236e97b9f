"""A head on the features of a pretrained backbone, compared with whitened features and with
logistic regression on the same features.

``python benchmarks/head.py --source signs=DIRECTORY --source clothing=DIRECTORY`` with class
folders of photographs in ``DIRECTORY/train`` and ``DIRECTORY/test``. The settings are those of the
preset photos. Each method knows the same training and gallery images: all of them, or a random
sample of 5 or 20 images of each class. The features, the whitening and the head are those of the
train step. A test image is recognized by the nearest of the known images, which are the gallery of
a release with a frozen backbone, moved toward the means of their classes. A release is served with
the head if the queries prefer it. The logistic regression of
scikit-learn (C = 1) trains on the features, each divided by its standard deviation.

The results are written after each sample. ``--add`` keeps them, so that only missing samples are
measured. ``--directory`` keeps the features too.
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
from evernear.embedding.candidate import CandidateName
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.features import FrozenHead
from evernear.embedding.freeze import Pretrained, open_pretrained
from evernear.embedding.head import train_head, whitening_for
from evernear.embedding.recipe import with_defaults
from evernear.embedding.whitening import Whitening
from evernear.evaluation.choice import prefer
from evernear.index.description import TOWARD_MEAN
from evernear.index.vectors import move_toward, noise_of_means
from evernear.settings import TrainSettings

HEADING = (
    "photographs",
    "images of a class",
    "known images, test images, seeds",
    "logistic regression",
    "whitened",
    "head, no views",
    "head",
    "as served",
    "errors as served, relative to logistic regression",
)
SAMPLED: tuple[Split, ...] = ("gallery", "train", "query")
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
    samples = [(count, seed) for seed in arguments.seeds for count in (None, *arguments.images_per_class)]
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
    """A dataset whose train and gallery splits have ``count`` random images of each class together,
    or all images if ``count`` is None.

    The shares of the gallery and of the queries are those of the dataset, but at least one image of
    each class.
    """

    def __init__(self, dataset: Dataset, count: int | None, seed: int) -> None:
        super().__init__(dataset, frozenset())
        counts = split_counts(dataset, count)
        chosen = {split: draw(dataset, split, counts[split], seed) for split in SAMPLED}
        self.count = len(chosen["train"])
        self._chosen = set().union(*chosen.values())

    def classes_of(self, block: Block) -> NDArray[np.int64]:
        return np.where([each.tobytes() in self._chosen for each in block.digests], super().classes_of(block), -1)


def split_counts(dataset: Dataset, count: int | None) -> dict[Split, int | None]:
    """The number of images of each class in each split of a sample."""
    if count is None:
        return dict.fromkeys(SAMPLED)
    known = dataset.count("gallery") + dataset.count("train")
    gallery, queries = (max(1, round(count * dataset.count(split) / known)) for split in ("gallery", "query"))
    return {"gallery": gallery, "train": count - gallery, "query": queries}


def draw(dataset: Dataset, split: Split, count: int | None, seed: int) -> set[bytes]:
    """The digests of ``count`` random images of each class in ``split``; None: all."""
    blocks = list(dataset.blocks(split, 1024))
    labels, digests = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("labels", "digests"))
    order = np.random.default_rng(seed).permutation(len(labels))
    rows = [order[labels[order] == label][:count] for label in np.unique(labels)]
    return {digests[row].tobytes() for row in np.concatenate(rows)}


def measure(dataset: Dataset, settings: TrainSettings, directory: Path, count: int | None) -> dict[str, Any]:
    """Test accuracy of each method that knows ``count`` images of each class."""
    recipe = with_defaults(settings, dataset)
    pretrained = open_pretrained(dataset, recipe, open_store((directory / "store").as_uri()))
    images = Sample(dataset, count, settings.seed)
    everything = TrainingImages(dataset, frozenset())
    gallery, train, queries = (read(pretrained, dataset, split, images) for split in SAMPLED)
    test = read(pretrained, dataset, "test", everything)
    known = Labeled(*(torch.cat(parts) for parts in zip(gallery, train, strict=True)))

    asked: dict[CandidateName, NDArray[np.bool_]] = {}

    def recognize(last_layer: Whitening, name: CandidateName | None = None) -> float:
        embed = embedder(pretrained, last_layer)
        if name:
            asked[name] = correct_answers(embed, known, queries)
        return float(correct_answers(embed, known, test).mean())

    whitened = recognize(whitening_for(pretrained.features, dataset, images), "pretrained")
    trained = {
        name: train_head(pretrained.features, pretrained.architecture, dataset, images, chosen)
        for name, chosen in (
            ("head_without_views", recipe.model_copy(update={"views": 0})),
            ("head", recipe),
        )
    }
    recognized = {
        "whitened": whitened,
        "head_without_views": recognize(trained["head_without_views"].map),
        "head": recognize(trained["head"].map, "head"),
    }
    return {
        "known_images": len(known.classes),
        "test_images": len(test.classes),
        "regression": regression_accuracy(known, test),
        **recognized,
        "served": recognized["head" if prefer(asked) == "head" else "whitened"],
    }


def read(pretrained: Pretrained, dataset: Dataset, split: Split, images: TrainingImages) -> Labeled:
    """The features and classes of ``split``."""
    batches = list(pretrained.features.batches(dataset, split, images))
    return Labeled(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def embedder(pretrained: Pretrained, last_layer: Whitening) -> Callable[[Tensor], Tensor]:
    """Maps features (N, F) to vectors (N, D)."""
    pretrained.member.standardize = last_layer
    return FrozenHead(pretrained.network).eval()


@torch.inference_mode()
def correct_answers(embed: Callable[[Tensor], Tensor], known: Labeled, queries: Labeled) -> NDArray[np.bool_]:
    """Whether each of the ``queries`` (N,) is recognized by the nearest known image."""
    vectors, references = embed(queries.features), embed(known.features)
    numbers = known.classes.numpy()
    means = np.stack([references[known.classes == label].mean(dim=0).numpy() for label in range(numbers.max() + 1)])
    noise = noise_of_means(means, np.bincount(numbers))
    moved = move_toward(references.numpy(), means[numbers], noise[numbers], TOWARD_MEAN)
    nearest = (vectors @ torch.from_numpy(moved).T).argmax(dim=1)
    return (known.classes[nearest] == queries.classes).numpy()


def regression_accuracy(known: Labeled, test: Labeled) -> float:
    """Test accuracy of a logistic regression."""
    regression = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=2000))
    known_rows, test_rows = ((each.features.numpy(), each.classes.numpy()) for each in (known, test))
    return float(regression.fit(*known_rows).score(*test_rows))


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each source and number of images, with means over seeds."""
    rows: list[list[str]] = [[*HEADING]]
    for source, count in dict.fromkeys((run["source"], run["images_per_class"]) for run in runs):
        matching = [run for run in runs if (run["source"], run["images_per_class"]) == (source, count)]
        means = [statistics.mean(run[method] for run in matching) for method in METHODS]
        images = f"{matching[0]['known_images']:,}, {matching[0]['test_images']:,}, {len(matching)}"
        errors = f"{(1 - means[-1]) / (1 - means[0]):.2f}" if means[0] < 1 else "-"
        rows.append([source, str(count or "all"), images, *(f"{mean:.1%}" for mean in means), errors])
    return rows


if __name__ == "__main__":
    main()
