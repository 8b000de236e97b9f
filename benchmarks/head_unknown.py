"""How well a head on the features of a pretrained backbone tells known images from
images of unknown classes, compared with whitened features.

``python benchmarks/head_unknown.py --source signs=DIRECTORY``, where ``DIRECTORY`` has
class folders of photographs in ``train`` and ``test``. ``--source`` is repeatable. The
settings are those of the preset photos. Each draw holds out a fifth of the classes, at
least two. The last layer is trained without these classes, and none of their images is
known. The table shows the area under the ROC curve of a test image's distance to the
nearest known image. The settings of "head alone" set ``train.embedding_dim``, so its
embedding does not contain the whitened features.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, settings_of
from benchmarks.head import Labeled, embedder, read
from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.freeze import open_pretrained
from evernear.embedding.head import train_head, whitening_for
from evernear.embedding.timm_member import Whitening
from evernear.evaluation.statistics import auroc
from evernear.settings import TrainSettings

HEADING = ("photographs", "draw", "held-out classes", "whitened", "head alone", "head")
METHODS = ("whitened", "head_alone", "head")
CONFIDENCE = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=DIRECTORY", help="repeatable")
    parser.add_argument("--draws", type=int, default=3, help="without replacement")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--directory", type=Path, help="keeps the images and their features; temporary by default")
    arguments = parser.parse_args()

    machine_info, runs, settings = machine.describe(), list[dict[str, Any]](), settings_of("photos", *arguments.set)
    with tempfile.TemporaryDirectory() as scratch:
        for name, _, source in (each.partition("=") for each in arguments.source):
            directory = (arguments.directory or Path(scratch)) / name
            dataset = ingest_dataset(f"folder:{source}", directory, "photos", *arguments.set)
            for number, held_out in enumerate(draws(dataset.labels, arguments.draws)):
                run = {"source": name, "draw": number + 1, "held_out": sorted(held_out)}
                runs.append(run | measure(dataset, settings.train, directory, held_out))
                print(runs[-1], flush=True)
    machine.write(
        "head_unknown",
        "Known and unknown images by a head on pretrained features",
        machine_info,
        {"settings": arguments.set, "runs": runs},
        table(runs),
    )


def draws(labels: tuple[str, ...], count: int) -> Iterator[frozenset[str]]:
    """Disjoint random fifths of ``labels``, at most ``count``."""
    order = np.random.default_rng(0).permutation(len(labels))
    size = max(2, len(labels) // 5)
    for start in range(0, min(count, len(labels) // size) * size, size):
        yield frozenset(labels[number] for number in order[start : start + size])


def measure(dataset: Dataset, settings: TrainSettings, directory: Path, held_out: frozenset[str]) -> dict[str, float]:
    """The area under the ROC curve of each method that does not know ``held_out``."""
    pretrained = open_pretrained(dataset, settings, open_store((directory / "store").as_uri()))
    images = TrainingImages(dataset, held_out)
    gallery, train = (read(pretrained, dataset, split, images) for split in ("gallery", "train"))
    test = read(pretrained, dataset, "test", TrainingImages(dataset, frozenset()))
    known = Labeled(*(torch.cat(parts) for parts in zip(gallery, train, strict=True)))
    is_unknown = np.isin(test.classes.numpy(), [dataset.labels.index(label) for label in held_out])

    @torch.inference_mode()
    def area(last_layer: Whitening) -> float:
        embed = embedder(pretrained, last_layer, gallery, images.classes)
        distances = 1 - (embed(test.features) @ embed(known.features).T).amax(dim=1).numpy()
        return auroc(distances[~is_unknown], distances[is_unknown], CONFIDENCE).value

    alone = settings.model_copy(update={"embedding_dim": pretrained.architecture.embedding_dim})
    heads = {
        name: train_head(pretrained.features, pretrained.architecture, dataset, images, chosen).map
        for name, chosen in (("head_alone", alone), ("head", settings))
    }
    maps = {"whitened": whitening_for(pretrained.features, dataset, images), **heads}
    return {name: area(last_layer) for name, last_layer in maps.items()}


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each draw, and one for the mean of each source."""
    rows = [list(HEADING)]
    for source in dict.fromkeys(run["source"] for run in runs):
        matching = [run for run in runs if run["source"] == source]
        for run in matching:
            values = (f"{run[method]:.3f}" for method in METHODS)
            rows.append([source, str(run["draw"]), str(len(run["held_out"])), *values])
        means = (statistics.mean(run[method] for run in matching) for method in METHODS)
        rows.append([source, "mean", "", *(f"{mean:.3f}" for mean in means)])
    return rows


if __name__ == "__main__":
    main()
