"""The recipe of training: image-dependent defaults, device, precision,
optimizer and schedules.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evernear.common.output import quantity
from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.architecture import Architecture
from evernear.embedding.memory import training_batch_size
from evernear.embedding.muon import Muon
from evernear.embedding.network import MEMBERS, EmbeddingNetwork
from evernear.errors import TrainingError
from evernear.settings import TrainSettings

Recipe = dict[str, Any]
"""Values by setting, for settings that are not set."""
WARM_UP = 0.2
"""Fraction of all steps during which the learning rate rises to its peak."""
MARGIN_WARM_UP = 0.5
"""Fraction of all steps during which the margin rises from 0 to `TrainSettings.margin`.

With the full margin from the first step, accuracy on images harder than digits stays at
chance. The annealing of SphereFace (Liu et al. 2017, arXiv:1704.08063) begins without a
margin for the same reason.
"""
TOTAL_DECAY = 1.8
"""Default of learning rate x weight decay x steps for Muon and AdamW on color images.

With decoupled weight decay, weights are a moving average of the updates. This default
makes the length of the average the same fraction of every training run (Wang and
Aitchison 2024, "How to set AdamW's weight decay as you scale model and dataset size",
arXiv:2405.13698). See docs/decisions/0018-training.md.
"""
FIRST_SIZE = 5 / 6
"""Size of the training images in the first epochs of fine-tuning,
relative to the last epochs.
"""
FIRST_EPOCHS = 0.6
"""Share of the epochs with the first size. Training on small images first, and on
smaller images than in use (Touvron et al. 2019, "Fixing the train-test resolution
discrepancy", arXiv:1906.06423), is faster and better than training at one size.
"""
EMA_DECAY = 0.99
"""Largest default of ``train.ema_decay``."""
EMA_SHARE = 1 / 15
"""Share of the steps over which the weights are averaged.
A decay of 0.99 averages over 100 of 1,500 steps.
"""
MOST_VIEWS = 4
"""Largest default of ``train.views``."""
MOST_VIEWED_IMAGES = 20_000
"""Largest number of augmented images by default. More images need fewer views, and a
CPU takes minutes for 20,000 augmented images.
"""

GRAY: Recipe = {
    "optimizer": "adamw",
    "epochs": 12,
    "min_steps": 300,
    "batch_size": 256,
    "learning_rate": 0.01,
    "weight_decay": 0.01,
    "width": 16,
    "augment": "affine",
    "label_smoothing": 0.0,
    "ema_decay": 0.0,
    "views": 0,
    "size_factor": 1.0,
}
"""Defaults for gray images, mostly drawings and scans."""
COLOR = GRAY | {"epochs": 24, "min_steps": 600, "width": 32, "augment": "shift", "label_smoothing": 0.1}
"""Defaults for color images. Photographs vary more, and need a larger network, more
steps and more regularization.
"""
MUON = COLOR | {"optimizer": "muon", "epochs": 10, "min_steps": 400, "width": 48}
HEAD = GRAY | {
    "epochs": 30,
    "min_steps": 600,
    "max_steps": 3000,
    "batch_size": 128,
    "learning_rate": 0.001,
    "weight_decay": 0.1,
    "augment": "none",
    "scale": 16.0,
}
"""Defaults for a head on a pretrained network's features
(`evernear.embedding.head`).
"""
FINE_TUNING = GRAY | {
    "epochs": 16,
    "min_steps": 200,
    "batch_size": 32,
    "learning_rate": 0.001,
    "weight_decay": 0.05,
    "label_smoothing": 0.1,
    "size_factor": 6 / 7,
}
"""Defaults for fine-tuning the layers of a pretrained network,
starting from a trained head.
"""


def shown_images(settings: TrainSettings, dataset: Dataset) -> int:
    """The largest number of images that training shows to a frozen backbone:
    the images of all splits, and the views of train images.
    """
    return sum(dataset.count(split) for split in SPLITS) + settings.views * dataset.count("train")


def with_defaults(settings: TrainSettings, dataset: Dataset) -> TrainSettings:
    """``settings`` with the defaults filled in,
    which depend on the images and the network.
    """
    color = dataset.shape[2] == 3
    is_compact = settings.backbone in ("auto", *MEMBERS) and not settings.weights
    if settings.keeps_backbone:
        recipe = HEAD | {"views": 0 if settings.frozen else _choose_views(dataset.count("train"))}
    elif settings.weights:
        recipe = FINE_TUNING | {"augment": "photograph" if color else "affine"}
    elif not color:
        recipe = GRAY
    else:
        recipe = MUON if settings.optimizer == "muon" or (settings.optimizer == "auto" and is_compact) else COLOR
    if settings.scale:
        recipe = recipe | {"label_smoothing": 0.0}
    chosen = {name: value for name, value in recipe.items() if getattr(settings, name) == _unset(name)}
    filled = settings.model_copy(update=chosen)
    images = dataset.manifest.count("train")
    steps = filled.epochs * steps_per_epoch(filled, images, min(filled.batch_size, images))
    if settings.weight_decay < 0 and color and not settings.weights and filled.optimizer != "sgd":
        return filled.model_copy(update={"weight_decay": TOTAL_DECAY / (filled.learning_rate * steps)})
    if settings.ema_decay < 0 and settings.weights and not settings.keeps_backbone:
        return filled.model_copy(update={"ema_decay": min(EMA_DECAY, max(0.0, 1 - 1 / (steps * EMA_SHARE)))})
    return filled


def _choose_views(images: int) -> int:
    """Number of augmented views of each of ``images`` whose features a head is trained
    on.
    """
    return max(1, min(MOST_VIEWS, MOST_VIEWED_IMAGES // max(1, images)))


def _unset(name: str) -> Any:
    """The value of a setting that means the recipe's value."""
    return TrainSettings.model_fields[name].default


def size_factor(settings: TrainSettings, epoch: int) -> float:
    """Side length of the training images in ``epoch``, relative to the network's input.

    The first epoch is 0.
    """
    if settings.size_factor >= 1 or not settings.weights:
        return settings.size_factor
    return settings.size_factor * (FIRST_SIZE if epoch < FIRST_EPOCHS * settings.epochs else 1)


def settings_of_head(settings: TrainSettings, embedding_dim: int) -> TrainSettings:
    """The settings of the head from which the training of a pretrained network
    with embeddings of ``embedding_dim`` dimensions starts.
    """
    names = {"weights", "backbone", "backbone_size_px", "views", "flip", "seed"}
    return TrainSettings(layers="head", embedding_dim=embedding_dim, **settings.model_dump(include=names))


def steps_per_epoch(settings: TrainSettings, images: int, batch_size: int) -> int:
    """Number of steps in an epoch.

    The steps cover ``images`` once, unless ``train.min_steps`` or ``train.max_steps``
    requires a different number.
    """
    steps = max(images // batch_size, math.ceil(settings.min_steps / settings.epochs))
    return max(1, min(steps, settings.max_steps // settings.epochs)) if settings.max_steps else steps


def choose_device(settings: TrainSettings, rank: int) -> torch.device:
    """The GPU of the node's process ``rank``, or the CPU.

    Return the CPU if the process has no GPU or the settings do not allow a GPU.

    Raises:
        TrainingError: ``train.device`` is ``cuda``, and the node has too few GPUs.
    """
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    if settings.device == "cuda" and rank >= gpus:
        raise TrainingError(
            f"train.device is cuda, but process {rank + 1} of {settings.processes} finds only {quantity(gpus, 'GPU')}; "
            "lower train.processes or set train.device=auto."
        )
    return torch.device("cuda", rank) if rank < gpus else torch.device("cpu")


def choose_precision(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """The data type of the network's activations.

    ``auto`` selects half precision if the device computes in half precision.
    """
    if settings.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    cpu = torch.cpu.get_capabilities()
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32


def choose_micro_batches(
    module: TrainingModule, architecture: Architecture, batch_size: int, device: torch.device
) -> int:
    """Number of micro-batches in a batch, which bound the memory.

    The micro-batches' gradients are accumulated. A micro-batch has at least two images,
    because batch normalization needs a variance.
    """
    height, width, channels = architecture.shape
    image = torch.zeros((1, channels, height, width), dtype=torch.uint8, device=device)
    count = math.ceil(batch_size / training_batch_size(module.network, image, device))
    return max(1, min(count, batch_size // 2))


def choose_optimizer(module: TrainingModule, settings: TrainSettings, precision: torch.dtype) -> torch.optim.Optimizer:
    """Muon, AdamW or SGD with Nesterov momentum,
    without weight decay for normalization layers and biases.

    Muon updates the weights of convolutions and linear layers, except depthwise
    convolutions, which have one input channel.

    The learning rate of a group is the schedule's learning rate times the group's
    ``rate_factor``.
    """
    backbone_factor = settings.backbone_learning_rate_factor or 1.0
    of_stages = _stage_factors(module) if settings.weights and settings.trained_layers != "head" else {}
    groups: dict[tuple[float, bool, bool], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = backbone_factor * of_stages.get(name, 1.0) if ".backbone." in name else 1.0
        decayed = parameter.ndim > 1
        orthogonal = decayed and min(parameter.shape[:2]) > 1 and not name.startswith("heads.")
        groups.setdefault((factor, decayed, orthogonal), []).append(parameter)
    options = [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "rate_factor": factor,
            "orthogonal": orthogonal,
        }
        for (factor, decayed, orthogonal), parameters in groups.items()
    ]
    rate, momentum = settings.learning_rate, settings.momentum
    if settings.optimizer == "muon":
        return Muon(options, rate, momentum, precision)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(options, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=True)
    return torch.optim.AdamW(options, lr=rate, fused=True)


def choose_average(module: TrainingModule, settings: TrainSettings) -> AveragedModel | None:
    """A running average of the weights of ``module``,
    or None if ``train.ema_decay`` is 0.

    The average includes the batch normalization statistics (Polyak and Juditsky 1992,
    "Acceleration of stochastic approximation by averaging").
    """
    if settings.ema_decay <= 0:
        return None
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay), use_buffers=True)


def _stage_factors(module: TrainingModule) -> dict[str, float]:
    from evernear.embedding.stages import rate_factors  # timm takes seconds to import

    return {
        f"network.members.{number}.backbone.{name}": factor
        for number, member in enumerate(cast(EmbeddingNetwork, module.network).members)
        for name, factor in rate_factors(cast(nn.Module, member.backbone)).items()
    }


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """The learning rate at ``progress`` (0..1) of all steps.

    Triangular and cosine schedules rise linearly during `WARM_UP` and then fall to 0.
    The triangle is one cycle of Smith 2017, "Cyclical Learning Rates",
    arXiv:1506.01186. The cosine schedule is from Loshchilov and Hutter 2017,
    arXiv:1608.03983.
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
