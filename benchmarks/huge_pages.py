"""Effect of huge pages on the speed of training and embedding on a CPU:
``python benchmarks/huge_pages.py``.

evernear sets torch's variable ``THP_MEM_ALLOC_ENABLE`` on Linux. Each workload runs in
alternating processes with and without huge pages, and the medians are reported. Images
and weights are random, because their values do not affect the speed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import machine

VARIABLE = "THP_MEM_ALLOC_ENABLE"
CALLS = 8


class Workload(NamedTuple):
    """What is measured, with images of ``(size_px, size_px, channels)``."""

    title: str
    backbone: str
    size_px: int
    channels: int
    batch_size: int
    trains: bool


WORKLOADS = {
    "compact": Workload("train the compact network", "compact", 28, 1, 256, True),
    "fine_tune": Workload("fine-tune EfficientNet-Lite0", "tf_efficientnet_lite0", 160, 3, 32, True),
    "features": Workload("features of EfficientNet-Lite0", "tf_efficientnet_lite0", 224, 3, 32, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="processes per workload and page size")
    parser.add_argument("--measure", choices=WORKLOADS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(WORKLOADS[arguments.measure])))
        return

    machine_info = machine.describe()
    result = {name: compare(name, arguments.repeats) for name in WORKLOADS}
    machine.write("huge_pages", "Training and embedding with huge pages", machine_info, result, table(result))


def compare(name: str, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {"0": [], "1": []}
    for _ in range(repeats):
        for enabled, measured in runs.items():
            command = [sys.executable, __file__, "--measure", name]
            ran = subprocess.run(command, check=True, capture_output=True, env=os.environ | {VARIABLE: enabled})
            measured.append(json.loads(ran.stdout))
    small, huge = ({key: statistics.median(run[key] for run in each) for key in each[0]} for each in runs.values())
    return {
        "small_pages": small,
        "huge_pages": huge,
        "times_faster": huge["images_per_s"] / small["images_per_s"],
        "times_memory": huge["peak_bytes"] / small["peak_bytes"],
    }


def measure(workload: Workload) -> dict[str, float]:
    """Images per second, share of CPU time in the kernel, and peak memory."""
    import torch

    images = torch.randint(0, 256, (workload.batch_size, workload.channels, workload.size_px, workload.size_px))
    call = (_training if workload.trains else _embedding)(workload, images.to(torch.uint8))
    for _ in range(3):
        call()
    started, started_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    for _ in range(CALLS):
        call()
    time_s, ended = time.monotonic() - started_s, resource.getrusage(resource.RUSAGE_SELF)
    system_s, user_s = ended.ru_stime - started.ru_stime, ended.ru_utime - started.ru_utime
    return {
        "images_per_s": CALLS * workload.batch_size / time_s,
        "kernel_share": system_s / (system_s + user_s),
        "peak_bytes": ended.ru_maxrss * 1024,
    }


def _training(workload: Workload, images: Any) -> Callable[[], object]:
    import torch
    from torch.nn import functional as F

    network = _network(workload).train()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
    classes = torch.randint(0, 100, (len(images),))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images), classes).backward()
        optimizer.step()

    return step


def _embedding(workload: Workload, images: Any) -> Callable[[], object]:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import torch

    from evernear.embedding.image_vectors import embed_images
    from evernear.embedding.torchscript import freeze_parameters

    network, threads = freeze_parameters(_network(workload)), torch.get_num_threads()
    torch.set_num_threads(1)
    pool, pixels = ThreadPoolExecutor(threads), images.permute(0, 2, 3, 1).contiguous().numpy()
    return lambda: list(pool.map(lambda part: embed_images(network, part), np.array_split(pixels, threads)))


def _network(workload: Workload) -> Any:
    from evernear.embedding.architecture import Architecture
    from evernear.embedding.network import build_network, choose_patch

    shape = (workload.size_px, workload.size_px, workload.channels)
    return build_network(
        Architecture(
            shape=shape,
            mean=(0.5,) * workload.channels,
            std=(0.5,) * workload.channels,
            patch_px=choose_patch(*shape[:2]),
            width=16,
            embedding_dim=128,
            backbone=workload.backbone,
        )
    )


def table(result: dict[str, dict[str, Any]]) -> list[list[str]]:
    heading = ["workload", "size", "images/s", "with huge pages", "ratio", "kernel share of CPU time", "peak memory"]
    return [heading] + [
        [
            WORKLOADS[name].title,
            f"{WORKLOADS[name].size_px} px",
            f"{each['small_pages']['images_per_s']:,.0f}",
            f"{each['huge_pages']['images_per_s']:,.0f}",
            f"{each['times_faster']:.2f}",
            f"{each['small_pages']['kernel_share']:.0%} to {each['huge_pages']['kernel_share']:.0%}",
            f"{each['times_memory']:.2f} times",
        ]
        for name, each in result.items()
    ]


if __name__ == "__main__":
    main()
