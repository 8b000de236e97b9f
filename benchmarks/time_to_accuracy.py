"""Time to the accuracy of the source project's recipe:
``python benchmarks/time_to_accuracy.py --source mnist``.

In each repeat, the recipe (`source_recipe`) trains for five epochs and its accuracy is measured
after the first and the fifth; evernear trains with two short schedules. All train on the same train
split and are measured in the same way: float32 embeddings of the gallery, labels of the queries by
the nearest. Times cover training and reading the data, but not measuring; the minimum
of several runs is reported, because noise only adds time.

The schedules were chosen with ``--split query``, never on the test split.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import machine, source_recipe
from benchmarks.accuracy import ingest_dataset
from evernear.data.shards import Dataset
from evernear.embedding.artifact import load_trained
from evernear.embedding.data_loader import to_tensor
from evernear.embedding.train import train_network
from evernear.settings import TrainSettings

SHORT = TrainSettings(epochs=1, min_steps=0, patch_px=2, width=16, augment="none")
LONGER = TrainSettings(epochs=3, min_steps=0, patch_px=2, width=16)
NAMES = {
    "recipe_1": "source recipe, 1 epoch",
    "recipe_5": "source recipe, 5 epochs",
    "ours_1": "evernear, 1 short epoch",
    "ours_5": "evernear, 3 short epochs",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist", help="a source of `evernear run`: mnist or mnist:DIRECTORY")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--split", choices=["test", "query"], default="test")
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch:
        dataset, directory = ingest_dataset(arguments.source, Path(scratch)), Path(scratch)
        source_recipe.write_arrays(dataset, directory / "arrays")
        warm_up(dataset, directory)
        for seed in range(arguments.repeats):
            runs += [train_evernear("ours_1", SHORT, dataset, directory, seed, arguments.split)]
            runs += train_recipe(dataset, directory, seed, arguments.split)
            runs += [train_evernear("ours_5", LONGER, dataset, directory, seed, arguments.split)]
            print(*runs[-4:], sep="\n", flush=True)
    summaries = {name: summarize([run for run in runs if run["name"] == name]) for name in NAMES}
    result = {
        "split": arguments.split,
        "speedup_1": summaries["recipe_1"]["least_s"] / summaries["ours_1"]["least_s"],
        "speedup_5": summaries["recipe_5"]["least_s"] / summaries["ours_5"]["least_s"],
        "reached_1": summaries["ours_1"]["mean_accuracy"] >= summaries["recipe_1"]["mean_accuracy"],
        "reached_5": summaries["ours_5"]["mean_accuracy"] >= summaries["recipe_5"]["mean_accuracy"],
        "summaries": summaries,
        "runs": runs,
    }
    if arguments.split == "test":
        machine.write(
            "time_to_accuracy",
            "Time to the accuracy of the source project's recipe",
            machine_info,
            result,
            table(result),
        )
    else:
        print(*table(result), sep="\n")


def warm_up(dataset: Dataset, directory: Path) -> None:
    """Pay for imports and first calls, which are measured for neither side."""
    for _ in islice(source_recipe.epochs(directory / "arrays", len(dataset.labels), 0), 1):
        pass
    train_network(dataset, SHORT, directory / "trained")


def train_evernear(
    name: str, settings: TrainSettings, dataset: Dataset, directory: Path, seed: int, split: Literal["test", "query"]
) -> dict[str, Any]:
    started_s = time.perf_counter()
    train_network(dataset, settings.model_copy(update={"seed": seed}), directory / "trained")
    duration_s = time.perf_counter() - started_s
    _, network = load_trained(directory / "trained")
    return {"name": name, "seed": seed, "duration_s": duration_s, **accuracies(dataset, split, network)}


def train_recipe(dataset: Dataset, directory: Path, seed: int, split: Literal["test", "query"]) -> list[dict[str, Any]]:
    runs, duration_s, started_s = [], 0.0, time.perf_counter()
    recipe = source_recipe.epochs(directory / "arrays", len(dataset.labels), seed)
    for epoch, network in enumerate(islice(recipe, 5), start=1):
        duration_s += time.perf_counter() - started_s
        if epoch in (1, 5):
            network.eval()
            scores = accuracies(dataset, split, lambda images, net=network: F.normalize(net(normalize(images))))
            runs.append({"name": f"recipe_{epoch}", "seed": seed, "duration_s": duration_s, **scores})
        started_s = time.perf_counter()
    return runs


def normalize(images: Tensor) -> Tensor:
    return (images.float() / 255 - source_recipe.MEAN) / source_recipe.STD


@torch.inference_mode()
def accuracies(
    dataset: Dataset, split: Literal["test", "query"], network: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    gallery, gallery_labels = embed_split(dataset, "gallery", network)
    queries, labels = embed_split(dataset, split, network)
    return {"accuracy": float((gallery_labels[(queries @ gallery.T).argmax(dim=1).numpy()] == labels).mean())}


def embed_split(
    dataset: Dataset, split: Literal["gallery", "test", "query"], network: Callable[[Tensor], Tensor]
) -> tuple[Tensor, np.ndarray]:
    blocks = list(dataset.blocks(split, 512))
    vectors = torch.cat([network(to_tensor(block.images)) for block in blocks])
    return vectors, np.concatenate([block.labels for block in blocks])


def summarize(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "least_s": min(run["duration_s"] for run in runs),
        "median_s": statistics.median(run["duration_s"] for run in runs),
        "mean_accuracy": statistics.mean(run["accuracy"] for run in runs),
        "lowest_accuracy": min(run["accuracy"] for run in runs),
    }


def table(result: dict[str, Any]) -> list[list[str]]:
    rows = [["training", "minimum time", "accuracy, mean", "speedup"]]
    for name in ("recipe_1", "ours_1", "recipe_5", "ours_5"):
        summary = result["summaries"][name]
        faster = f"{result['speedup_' + name[-1]]:.1f}" if name.startswith("ours") else ""
        rows.append(
            [
                NAMES[name],
                f"{summary['least_s']:.1f} s",
                f"{summary['mean_accuracy']:.2%}",
                faster,
            ]
        )
    return rows


if __name__ == "__main__":
    main()
