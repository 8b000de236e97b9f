"""Training on photographs from random weights, compared with plain torchvision training of equal
time.

``python benchmarks/clothing.py --source clothing-dataset-small`` with a checkout of the GitHub
repository alexeygrigorev/clothing-dataset-small: 3,781 photographs of ten kinds of clothes, about
400 px wide, in train/, validation/ and test/.

The baseline is the recipe of torchvision tutorials: resnet18, random resized crops and flips, SGD
with one cycle of the learning rate, cross-entropy. It decodes the images once, trains on images of
the same size and in the same precision, and stops after the CPU seconds that evernear's training
took. Each training run has a separate process, whose peak memory is measured.
"""

import argparse
import math
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, mean_interval, run, settings_of
from evernear.data.shards import Dataset
from evernear.embedding.optimizer import choose_precision

BATCH_SIZE = 64
LEARNING_RATE = 0.1
WARM_UP = 0.2
RESIZE = 256 / 224
"""Shorter side of a decoded image, relative to the side of the crops."""
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ``ru_maxrss``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path, help="a directory with train/ and test/")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        run_in_process(ingest_dataset, f"folder:{arguments.source}", scratch, "default", *arguments.set)
        side = Dataset.open(scratch).shape[0]
        for seed in arguments.seeds:
            evernear = run_in_process(train_evernear, scratch, seed, arguments.set)
            runs.append({"training": "evernear", "seed": seed, **evernear})
            print(runs[-1], flush=True)
            baseline = run_in_process(train_torchvision, arguments.source, side, evernear["train_cpu_s"], seed)
            runs.append({"training": "torchvision", "seed": seed, **baseline})
            print(runs[-1], flush=True)
    parameters = {"side_px": side, "settings": arguments.set}
    machine.write(
        "clothing",
        "Training on photographs of clothes from random weights, compared with torchvision in equal time",
        machine_info,
        {**parameters, "runs": runs},
        table(runs),
    )


def run_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` in a new process, so that its peak memory can be measured separately."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def train_evernear(dataset_dir: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    settings = settings_of("default", *overrides, f"train.seed={seed}")
    with tempfile.TemporaryDirectory() as scratch:
        metrics = run(Dataset.open(dataset_dir), settings, Path(scratch), "test")
    return {**metrics, "peak_memory_gb": peak_memory_gb()}


def train_torchvision(source: Path, side: int, cpu_s: float, seed: int) -> dict[str, Any]:
    """Train a resnet18 for ``cpu_s``, and measure it on the centers of the test images."""
    torch.manual_seed(seed)
    decode = v2.Compose([v2.RGB(), v2.PILToTensor(), v2.Resize(round(side * RESIZE))])
    augment = v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip()])
    normalize = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    )
    training, test = (ImageFolder(source / split, decode) for split in ("train", "test"))
    network = resnet18(num_classes=len(training.classes)).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    precision = choose_precision(torch.device("cpu"), network)

    def logits(images: list[Tensor]) -> Tensor:
        batch = normalize(torch.stack(images)).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            return network(batch).float()

    steps, started_s = 0, time.process_time()
    for images, labels in batches([training[number] for number in range(len(training))]):
        progress = (time.process_time() - started_s) / cpu_s
        if progress >= 1:
            break
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * one_cycle(progress)
        optimizer.zero_grad()
        F.cross_entropy(logits([augment(image) for image in images]), labels).backward()
        optimizer.step()
        steps += 1

    center, correct = v2.CenterCrop(side), 0
    network.eval()
    with torch.inference_mode():
        for image, label in test:
            correct += int(logits([center(image)]).argmax()) == label
    return {
        "train_cpu_s": round(time.process_time() - started_s, 1),
        "passes": round(steps * BATCH_SIZE / len(training), 1),
        "accuracy": correct / len(test),
        "queries": len(test),
        "peak_memory_gb": peak_memory_gb(),
    }


def batches(images: list[tuple[Tensor, int]]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield shuffled batches indefinitely."""
    while True:
        for rows in torch.randperm(len(images)).split(BATCH_SIZE)[:-1]:
            batch = [images[row] for row in rows]
            yield [image for image, _ in batch], torch.tensor([label for _, label in batch])


def one_cycle(progress: float) -> float:
    """Learning rate relative to its peak: a linear warm-up, and a cosine to 0."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2


def peak_memory_gb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES / 1e9, 2)


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["training", "accuracy, mean of seeds", "95% interval", "CPU time", "peak memory"]]
    for name in ("evernear", "torchvision"):
        matching = [each for each in runs if each["training"] == name]
        mean, low, high = mean_interval([each["accuracy"] for each in matching])
        rows.append(
            [
                name,
                f"{mean:.1%} of {matching[0]['queries']:,} ({len(matching)} seeds)",
                f"{low:.1%} to {high:.1%}" if len(matching) > 1 else "-",
                f"{statistics.mean(each['train_cpu_s'] for each in matching):.0f} s",
                f"{max(each['peak_memory_gb'] for each in matching):.2f} GB",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
