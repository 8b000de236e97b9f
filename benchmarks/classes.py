"""Time of an ArcFace head and of the gate with many classes:
``python benchmarks/classes.py``.

A step of the head is its forward pass, its backward pass and the optimizer step on the
embeddings of a batch: with all classes, and with the sample of
`evernear.embedding.arcface.sample_classes`. The gate decides on an evaluation with ten
test images per class, in which candidate and champion know every class.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from gate import make_evaluation
from torch.nn import functional as F

from benchmarks import machine
from evernear.embedding.arcface import ArcFace, choose_scale, sample_classes
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import Outcomes
from evernear.settings import GateSettings

BATCH_SIZE, DIM, STEPS, IMAGES_PER_CLASS, ACCURACY = 256, 128, 5, 10, 0.95


def main() -> None:
    machine_info = machine.describe()
    rows = [measure(classes) for classes in (100, 10_000, 100_000)]
    heading = ["classes", "head, all classes", "head, as trained", "gate"]
    table = [
        [
            f"{row['classes']:,}",
            f"{row['all_s'] * 1e3:.0f} ms",
            f"{row['sampled_s'] * 1e3:.0f} ms",
            f"{row['gate_s']:.2f} s",
        ]
        for row in rows
    ]
    machine.write(
        "classes",
        "Time of an ArcFace head's training step and of the gate, by number of classes",
        machine_info,
        {"rows": rows},
        [heading, *table],
    )


def measure(classes: int) -> dict[str, float]:
    return {
        "classes": classes,
        "all_s": head_step_s(classes, sample=False),
        "sampled_s": head_step_s(classes, sample=True),
        "gate_s": gate_s(classes),
    }


def head_step_s(classes: int, sample: bool) -> float:
    """Median time of a few steps."""
    torch.manual_seed(0)
    head = ArcFace(classes, DIM, choose_scale(classes))
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, fused=True)
    embeddings = torch.randn(BATCH_SIZE, DIM, requires_grad=True)
    labels = torch.randint(0, classes, (BATCH_SIZE,))

    def step() -> None:
        sampled, positions = sample_classes(labels, classes, labels) if sample else (None, labels)
        optimizer.zero_grad()
        F.cross_entropy(head(embeddings, positions, 0.3, sampled), positions).backward()
        optimizer.step()

    step()
    return statistics.median(seconds(step) for _ in range(STEPS))


def gate_s(classes: int) -> float:
    labels = tuple(f"class {number}" for number in range(classes))
    truth = np.repeat(np.arange(classes, dtype=np.int32), IMAGES_PER_CLASS)
    rng = np.random.default_rng(0)
    challenger, champion = (Outcomes(rng.random(len(truth)) < ACCURACY, truth) for _ in range(2))
    evaluation = make_evaluation(challenger, champion, labels)
    return seconds(lambda: decide(evaluation, GateSettings()))


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
