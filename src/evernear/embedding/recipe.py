"""How a network is trained: defaults that depend on the images, device, precision, optimizer and schedules."""

import math

import torch
from torch import Tensor

from evernear.common.output import quantity
from evernear.data.shards import Dataset
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.architecture import Architecture
from evernear.embedding.memory import training_batch_size
from evernear.embedding.muon import Muon
from evernear.embedding.network import MEMBERS
from evernear.errors import TrainingError
from evernear.settings import TrainSettings

WARM_UP = 0.2
"""Fraction of all steps in which the learning rate rises to its peak."""
MARGIN_WARM_UP = 0.5
"""Fraction of all steps in which the margin rises from 0 to `TrainSettings.margin`.

With the full margin from the first step, training on images harder than digits stays at chance. The annealing of
SphereFace (Liu et al. 2017, arXiv:1704.08063) begins without a margin for the same reason.
"""
TOTAL_DECAY = 1.8
"""Default of learning rate x weight decay x steps for Muon and AdamW on color images.

With decoupled weight decay, weights are a moving average of the updates, whose length is then the same fraction of
every training run (Wang and Aitchison 2024, "How to set AdamW's weight decay as you scale model and dataset size",
arXiv:2405.13698). Measured in docs/decisions/measurements/training.md.
"""
PRETRAINED_RATE_FACTOR = 0.1
"""Learning rate of a pretrained backbone, relative to the rate of the new layers."""


def with_defaults(settings: TrainSettings, dataset: Dataset) -> TrainSettings:
    """``settings`` with the values that depend on the images filled in.

    Gray images are mostly drawings and scans. Color photographs vary more, and need a larger network, more steps and
    more regularization.
    """
    color = dataset.shape[2] == 3
    optimizer = settings.optimizer
    if optimizer == "auto":
        is_compact = settings.backbone in ("auto", *MEMBERS) and not settings.weights
        optimizer = "muon" if color and is_compact else "adamw"
    epochs, min_steps, width = (12, 300, 16) if not color else (10, 400, 48) if optimizer == "muon" else (24, 600, 32)
    label_smoothing = 0.1 if color and not settings.scale else 0.0
    filled = settings.model_copy(
        update={
            "optimizer": optimizer,
            "epochs": settings.epochs or epochs,
            "min_steps": settings.min_steps if settings.min_steps >= 0 else min_steps,
            "width": settings.width or width,
            "augment": settings.augment if settings.augment != "auto" else "shift" if color else "affine",
            "label_smoothing": settings.label_smoothing if settings.label_smoothing >= 0 else label_smoothing,
        }
    )
    if filled.weight_decay >= 0:
        return filled
    if color and filled.optimizer != "sgd":
        images = dataset.manifest.count("train")
        steps = filled.epochs * steps_per_epoch(filled, images, min(filled.batch_size, images))
        return filled.model_copy(update={"weight_decay": TOTAL_DECAY / (filled.learning_rate * steps)})
    return filled.model_copy(update={"weight_decay": 0.01})


def steps_per_epoch(settings: TrainSettings, images: int, batch_size: int) -> int:
    """The steps that cover ``images`` once, or more if ``train.min_steps`` requires them."""
    return max(images // batch_size, math.ceil(settings.min_steps / settings.epochs))


def choose_device(settings: TrainSettings, rank: int) -> torch.device:
    """The GPU of the node's process ``rank`` if there is one and the settings allow it, otherwise the CPU.

    Raises:
        TrainingError: ``train.device`` is ``cuda`` and there are not enough GPUs.
    """
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    if settings.device == "cuda" and rank >= gpus:
        raise TrainingError(
            f"train.device is cuda, but process {rank + 1} of {settings.processes} finds only {quantity(gpus, 'GPU')}; "
            "lower train.processes or set train.device=auto."
        )
    return torch.device("cuda", rank) if rank < gpus else torch.device("cpu")


def choose_precision(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """The data type of the network's activations; ``auto`` selects half precision if the device computes in it."""
    if settings.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    cpu = torch.cpu.get_capabilities()
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32


def choose_micro_batches(
    module: TrainingModule, architecture: Architecture, batch_size: int, device: torch.device
) -> int:
    """Number of micro-batches in a batch, so that memory is bounded; their gradients are accumulated.

    A micro-batch has at least two images, because batch normalization needs a variance.
    """
    height, width, channels = architecture.shape
    image = torch.zeros((1, channels, height, width), dtype=torch.uint8, device=device)
    count = math.ceil(batch_size / training_batch_size(module.network, image, device))
    return max(1, min(count, batch_size // 2))


def choose_optimizer(module: TrainingModule, settings: TrainSettings, precision: torch.dtype) -> torch.optim.Optimizer:
    """Muon, AdamW or SGD with Nesterov momentum, without weight decay for normalization layers and biases.

    Muon updates the weights of convolutions and linear layers, except depthwise convolutions, which have one input.

    The learning rate of a group is the schedule's times the group's ``rate_factor``.
    """
    backbone_factor = settings.backbone_learning_rate_factor or (PRETRAINED_RATE_FACTOR if settings.weights else 1.0)
    groups: dict[tuple[bool, bool, bool], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        decayed = parameter.ndim > 1
        orthogonal = decayed and min(parameter.shape[:2]) > 1 and not name.startswith("heads.")
        groups.setdefault((".backbone." in name, decayed, orthogonal), []).append(parameter)
    options = [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "rate_factor": backbone_factor if in_backbone else 1.0,
            "orthogonal": orthogonal,
        }
        for (in_backbone, decayed, orthogonal), parameters in groups.items()
    ]
    rate, momentum = settings.learning_rate, settings.momentum
    if settings.optimizer == "muon":
        return Muon(options, rate, momentum, precision)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(options, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=True)
    return torch.optim.AdamW(options, lr=rate, fused=True)


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """The learning rate at ``progress`` (0..1) of all steps.

    Triangular and cosine schedules rise linearly over `WARM_UP` and fall to 0. The triangle is one cycle of Smith 2017,
    "Cyclical Learning Rates", arXiv:1506.01186; the cosine is Loshchilov and Hutter 2017, arXiv:1608.03983.
    """
    if settings.schedule == "constant":
        return settings.learning_rate
    if progress < WARM_UP:
        return settings.learning_rate * max(progress / WARM_UP, 0.01)
    remaining = (1 - progress) / (1 - WARM_UP)
    factor = remaining if settings.schedule == "triangular" else (1 - math.cos(math.pi * remaining)) / 2
    return settings.learning_rate * factor


def margin(settings: TrainSettings, progress: float) -> float:
    """The margin (radians) at ``progress`` (0..1) of all steps."""
    return settings.margin * min(progress / MARGIN_WARM_UP, 1.0)
