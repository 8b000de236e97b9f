"""The recipe of training: defaults that depend on the images, and schedules."""

import math
from collections.abc import Callable
from typing import Any, Literal

from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.embedding.network import MEMBERS
from evernear.settings.train import Augment, TrainingChoices, TrainSettings

WARM_UP = 0.2
"""Fraction of the steps during which the learning rate rises to its peak."""
MARGIN_WARM_UP = 0.5
"""Fraction of the steps during which the margin rises from 0 to `TrainSettings.margin`. With the
full margin from the first step, accuracy on images harder than digits stays at chance. SphereFace
(Liu et al. 2017, arXiv:1704.08063) begins without a margin for the same reason."""
TOTAL_DECAY = 1.8
"""Default of learning rate x weight decay x steps for Muon and AdamW on color images.

With decoupled weight decay, weights are a moving average of the updates, and this product makes its
length the same fraction of every run (Wang and Aitchison 2024, "How to set AdamW's weight decay as
you scale model and dataset size", arXiv:2405.13698). See docs/decisions/0018-training.md.
"""
FIRST_SIZE = 5 / 6
"""Size of fine-tuning's first training images, relative to the last."""
FIRST_SHARE = 0.6
"""Share of the training with the first size. Training on small images first, and on smaller ones
than in use, is faster and better than at one size (Touvron et al. 2019, "Fixing the train-test
resolution discrepancy", arXiv:1906.06423)."""
EMA_DECAY = 0.99
"""Largest decay per step of the weight average."""
EMA_SHARE = 1 / 15
"""Share of the steps over which weights are averaged. Of 1,500, a decay of 0.99 averages 100."""
EPOCHS_OF_TIME = 5
"""Epochs into which a time is divided. Each ends with a measurement on the gallery."""
MOST_PASSES = 30
"""Passes over the images after which more time does not help."""
MOST_REPETITIONS = 4
"""The same on a small dataset, as a multiple of the default of ``train.min_steps``."""
PROBE_DRAWS = 5
"""Draws of the probe if the backbone is frozen. Each holds out another fifth of the classes."""
PROBE_SHARE = 0.25
"""Ratio of probe epochs to training epochs, and of their time."""
PROBE_SHARE_WITH_MUON = 0.6
"""The same with Muon, whose training is short. After three of ten epochs on CIFAR-10, unseen
classes are not yet as well separated as after all ten."""
HEAD_STEP_S = 0.01
FROZEN_PROBE_S = 8.0
"""Seconds to load a pretrained network, and to measure `PROBE_DRAWS` draws of its features."""
MOST_VIEWS = 4
"""Most augmented views of an image."""
MOST_VIEWED_IMAGES = 20_000
"""Most augmented images by default. With more images, fewer views are needed, and a CPU takes
minutes for 20,000."""


Precision = Literal["float32", "bfloat16", "float16"]


class Recipe(TrainingChoices):
    """All settings of a training run, including those that images and network determine."""

    epochs: int
    min_steps: int
    """Fewest steps in all epochs."""
    max_steps: int | None = None
    """Most steps in all epochs."""
    batch_size: int
    muon: bool = False
    """Whether Muon trains the network, instead of AdamW."""
    learning_rate: float
    weight_decay: float
    decays_by_steps: bool = False
    """Whether ``weight_decay`` is for all steps, and rises if the time allows fewer."""
    width: int
    augment: Augment
    label_smoothing: float
    ema_decay: float = 0.0
    """Decay per step of the weight average, which the release gets. With 0, nothing is averaged."""
    views: int = 0
    """Augmented views of each training image on which a head is trained, beside the plain image."""
    precision: Precision | None = None
    """Data type of activations. By default, the device determines it."""
    size_factor: float = 1.0
    """Side of a timm backbone's training images in the last epochs, relative to its input."""


Values = dict[str, Any]
GRAY: Values = {
    "epochs": 12,
    "min_steps": 300,
    "batch_size": 256,
    "learning_rate": 0.01,
    "weight_decay": 0.01,
    "width": 16,
    "augment": "affine",
    "label_smoothing": 0.0,
}
"""For gray images, mostly drawings and scans."""
COLOR = GRAY | {"epochs": 24, "min_steps": 600, "augment": "shift", "label_smoothing": 0.1}
"""For color images in a timm backbone. Photographs need more steps and regularization."""
MUON = COLOR | {"muon": True, "epochs": 10, "min_steps": 400, "width": 48}
"""For color images in the compact network."""
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
"""For a head on a pretrained network's features (`evernear.embedding.head`)."""
FINE_TUNING = GRAY | {
    "epochs": 16,
    "min_steps": 200,
    "batch_size": 32,
    "learning_rate": 0.001,
    "weight_decay": 0.05,
    "label_smoothing": 0.1,
    "size_factor": 6 / 7,
}
"""For fine-tuning a pretrained network's layers, starting from a trained head."""


def shown_images(recipe: Recipe, dataset: Dataset) -> int:
    """The most images that a frozen backbone sees: of all splits, and the train images' views."""
    return sum(dataset.count(split) for split in SPLITS) + recipe.views * dataset.count("train")


def with_defaults(settings: TrainSettings | Recipe, dataset: Dataset, **chosen: Any) -> Recipe:
    """The defaults for images and network, overridden by ``settings``, then by ``chosen``. A recipe
    is returned unchanged."""
    if isinstance(settings, Recipe):
        return settings
    given = settings.model_dump(exclude_none=True)
    unsmoothed: Values = {"label_smoothing": 0.0} if settings.scale else {}
    recipe = Recipe(**(_defaults(settings, dataset) | unsmoothed | given | chosen))
    images = dataset.manifest.count("train")
    if settings.minutes and not settings.keeps_backbone and not {"epochs", "min_steps"} & {*given, *chosen}:
        passes = MOST_PASSES * (images // min(recipe.batch_size, images))
        steps = max(passes, MOST_REPETITIONS * recipe.min_steps)
        recipe = recipe.model_copy(update={"epochs": EPOCHS_OF_TIME, "min_steps": steps})
    steps = recipe.epochs * steps_per_epoch(recipe, images, min(recipe.batch_size, images))
    if dataset.shape[2] == 3 and not settings.weights and settings.weight_decay is None:
        decay = TOTAL_DECAY / (recipe.learning_rate * steps)
        return recipe.model_copy(update={"weight_decay": decay, "decays_by_steps": True})
    if settings.weights and not settings.keeps_backbone:
        return recipe.model_copy(update={"ema_decay": ema_decay(steps)})
    return recipe


def ema_decay(steps: float) -> float:
    return min(EMA_DECAY, max(0.0, 1 - 1 / (steps * EMA_SHARE)))


def recipe_of_training(settings: TrainSettings, dataset: Dataset) -> Recipe:
    """The recipe of the train step, which shares ``train.minutes`` with the probe."""
    recipe = with_defaults(settings, dataset)
    if not settings.minutes:
        return recipe
    return with_defaults(settings, dataset, minutes=settings.minutes / (1 + probe_share(recipe)))


def recipe_of_probe(settings: TrainSettings, dataset: Dataset, probe_epochs: int, views: int | None = None) -> Recipe:
    """The recipe of the probe, with ``probe_epochs`` or, if that is 0, a share of the epochs.
    ``views`` is the number of a head's views for which the training had time."""
    recipe = with_defaults(settings, dataset)
    share = probe_share(recipe)
    epochs = recipe.epochs if recipe.keeps_backbone else math.ceil(recipe.epochs * share)  # a head takes seconds
    chosen: Values = {"epochs": probe_epochs or epochs} | ({} if views is None else {"views": views})
    if settings.minutes:
        chosen |= {"minutes": settings.minutes * share / (1 + share), "min_steps": math.ceil(recipe.min_steps * share)}
    return with_defaults(settings, dataset, **chosen)


def probe_share(recipe: Recipe) -> float:
    return PROBE_SHARE_WITH_MUON if recipe.muon else PROBE_SHARE


def expected_probe_s(recipe: Recipe, probe_epochs: int, dataset: Dataset) -> Callable[[float], float]:
    """Estimates the probe's time from the training's. With a frozen backbone, training has computed
    the features, and only heads remain."""
    images = dataset.count("train")

    def steps(epochs: int) -> int:
        changed = recipe.model_copy(update={"epochs": epochs})
        return epochs * steps_per_epoch(changed, images, min(recipe.batch_size, images))

    if recipe.frozen:
        return lambda _: FROZEN_PROBE_S
    if recipe.keeps_backbone:
        heads_s = (1 + PROBE_DRAWS) * steps(recipe.epochs) * HEAD_STEP_S
        return lambda _: heads_s
    if recipe.minutes:
        return lambda train_s: train_s * probe_share(recipe)
    epochs = probe_epochs or math.ceil(recipe.epochs * probe_share(recipe))
    return lambda train_s: train_s * steps(epochs) / steps(recipe.epochs)


def _defaults(settings: TrainSettings, dataset: Dataset) -> Values:
    color = dataset.shape[2] == 3
    if settings.keeps_backbone:
        return HEAD | {"views": 0 if settings.frozen else _choose_views(dataset.count("train"))}
    if settings.weights:
        return FINE_TUNING | {"augment": "photograph" if color else "affine"}
    if not color:
        return GRAY
    return MUON if settings.backbone in (None, *MEMBERS) else COLOR


def _choose_views(images: int) -> int:
    return max(1, min(MOST_VIEWS, MOST_VIEWED_IMAGES // max(1, images)))


def size_factor(recipe: Recipe, progress: float) -> float:
    """Side of the images in an epoch that begins at ``progress``, relative to the network's
    input."""
    if recipe.size_factor >= 1 or not recipe.weights:
        return recipe.size_factor
    return recipe.size_factor * (FIRST_SIZE if progress < FIRST_SHARE else 1)


def steps_per_epoch(recipe: Recipe, images: int, batch_size: int) -> int:
    """Steps that cover ``images`` once, within ``min_steps`` and ``max_steps``."""
    steps = max(images // batch_size, math.ceil(recipe.min_steps / recipe.epochs))
    return max(1, min(steps, recipe.max_steps // recipe.epochs)) if recipe.max_steps else steps


def learning_rate(recipe: Recipe, progress: float) -> float:
    """The learning rate at ``progress`` (0..1) of the training.

    It rises linearly during `WARM_UP` and then falls linearly to 0, one cycle of Smith 2017,
    "Cyclical Learning Rates", arXiv:1506.01186.
    """
    if progress < WARM_UP:
        return recipe.learning_rate * max(progress / WARM_UP, 0.01)
    return recipe.learning_rate * (1 - progress) / (1 - WARM_UP)


def margin(recipe: Recipe, progress: float) -> float:
    """The margin in radians, at ``progress`` (0..1) of the training."""
    return recipe.margin * min(progress / MARGIN_WARM_UP, 1.0)
