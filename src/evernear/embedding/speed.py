"""Measure this machine's speed, from which training within a time limit is planned."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding.image_vectors import one_torch_thread
from evernear.embedding.monitor import measure_gallery
from evernear.embedding.plan import Plan, Speed, find_plan
from evernear.embedding.recipe import Recipe, choose_device
from evernear.embedding.torchscript import freeze_parameters
from evernear.embedding.train import train_step
from evernear.embedding.training_setup import Training, prepare_training
from evernear.settings import TrainSettings

MEASURED_IMAGES = 16
COMPILING_CALLS = 2
"""Calls during which TorchScript compiles a network."""


def plan_of_run(record: RunRecord, dataset: Dataset, settings: TrainSettings, report: Callable[[str], None]) -> Plan:
    """The plan for ``settings.minutes``, kept in ``record`` so that a retry follows it. ``report``
    receives it in words."""
    plan = record.find("plan", Plan)
    if plan is None:
        report("measuring the speed of this machine")
        plan = plan_training(dataset, settings, record.store)
        record.save(plan=plan)
    report(plan.sentence)
    return plan


def plan_training(dataset: Dataset, settings: TrainSettings, store: Store | None) -> Plan:
    """See `evernear.embedding.plan.find_plan`."""
    return find_plan(dataset, settings, store, partial(measure_speed, dataset))


def measure_speed(dataset: Dataset, recipe: Recipe) -> Speed:
    """Measured with a few batches of ``dataset``. With a frozen backbone, no training step is."""
    device = torch.device("cpu") if recipe.keeps_backbone else choose_device(0)
    trained = recipe.model_copy(update={"layers": "all"}) if recipe.keeps_backbone else recipe
    training = prepare_training(dataset, trained, frozenset(), device, start=False)
    pixels, classes = next(training.images.batches(training.batch_size, 0, 0, 0, 1))
    few = pixels[:MEASURED_IMAGES], classes[:MEASURED_IMAGES]
    if recipe.keeps_backbone:
        embed_s = _embed_s(training.module.network, few[0])
        return Speed(train_s=0.0, validate_s=embed_s, embed_s=embed_s)
    train_s = _train_s(training, pixels, classes)
    validate_s = _fastest_s(lambda: measure_gallery(training.module, [few], device)) / len(few[0])
    return Speed(train_s, validate_s, _embed_s(training.module.network.cpu(), few[0]))


def _train_s(training: Training, pixels: Tensor, classes: Tensor) -> float:
    """Seconds per image of a training step at the network's input size."""
    training.module.train()
    if training.recipe.weights:
        from evernear.embedding.stages import prepare_epoch  # timm takes seconds to import

        prepare_epoch(training.module, 1.0, training.architecture.pretrained)
    generator = torch.Generator().manual_seed(0)
    return _fastest_s(lambda: train_step(training, pixels, classes, 0.0, (), generator)) / len(pixels)


def _embed_s(network: nn.Module, pixels: Tensor) -> float:
    """Seconds per image of embedding on the CPU, with one concurrent batch per thread."""
    scripted = freeze_parameters(network)

    def embed(batch: Tensor) -> Tensor:
        with torch.inference_mode():
            return scripted(batch)

    with one_torch_thread() as threads, ThreadPoolExecutor(threads) as pool:
        for _ in range(COMPILING_CALLS):
            embed(pixels)
        return _fastest_s(lambda: list(pool.map(embed, [pixels] * threads))) / (threads * len(pixels))


def _fastest_s(function: Callable[[], object]) -> float:
    """The shorter of two calls, after one that allocates memory."""
    times_s: list[float] = []
    for _ in range(3):
        started_s = time.monotonic()
        function()
        times_s.append(time.monotonic() - started_s)
    return min(times_s[1:])
