"""Measure training on the gallery split, which is the validation set."""

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from evernear.common.output import quantity
from evernear.embedding import distributed
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.artifact import Epoch, FlipTest, TrainingResult
from evernear.embedding.augmentation import Flip, flip
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.recipe import Recipe
from evernear.errors import TrainingError

FLIP_TOLERANCE = 0.1
"""Maximum accuracy loss under a harmless flip, as a fraction of the accuracy above chance."""
FEWEST_STEPS = 200
"""Fewest steps of fine-tuning after which a network has learned more than it has forgotten."""
FIRST_EPOCHS = 2
"""Epochs after which fine-tuning may end for lack of time. A retry continues after the first."""
MAX_SATURATED_ERROR = 0.02
"""Largest standard error of a gallery accuracy that ends training: that of 35 correct images."""
NEIGHBOR_ROWS = 1024
"""Images whose similarities to all others are in memory at once."""
FLIP_TEST_MIN_ERRORS = 8
"""Number of standard errors above chance at which the accuracy is high enough to compare flips."""


class GalleryMetrics(TypedDict):
    gallery_loss: float
    gallery_accuracy: float
    gallery_accuracy_error: float


@torch.no_grad()
def measure_gallery(
    module: TrainingModule, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> GalleryMetrics:
    """Cross-entropy and accuracy of the heads' mean logits, without the margin. For a loss without
    class weights, see `_measure_neighbors`.

    The ``batches`` of all processes together make up the gallery split. The standard error adds
    half a correct and half a wrong prediction (the Jeffreys prior), so it is not zero if all are
    correct.
    """
    module.eval()
    if not module.has_class_weights:
        return _measure_neighbors(module, batches, device)
    count, correct, total_loss = 0, 0, 0.0
    for pixels, classes in batches:
        classes = classes.to(device)
        logits = module.logits(pixels.to(device))
        total_loss += F.cross_entropy(logits, classes, reduction="none").double().sum().item()
        correct += int((logits.argmax(dim=1) == classes).sum())
        count += len(classes)
    sums = distributed.all_reduce_sum(torch.tensor([total_loss, correct, count], dtype=torch.float64, device=device))
    total_loss, correct, count = sums.tolist()
    return _metrics(total_loss / count, correct, count)


def _measure_neighbors(
    module: TrainingModule, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> GalleryMetrics:
    """The mean loss of the batches, and the share of images whose nearest other image of the
    gallery is of their class. Images that are alone in their class are not counted.

    Raises:
        TrainingError: every image is alone in its class.
    """
    embedded, total_loss = list[tuple[Tensor, Tensor]](), 0.0
    for pixels, classes in batches:
        classes = classes.to(device)
        embeddings = module.embed(pixels.to(device))
        total_loss += float(module.loss(embeddings, classes, 0.0, classes)) * len(classes)
        embedded.append((F.normalize(embeddings.float()), classes))
    vectors, classes = (torch.cat(parts) for parts in zip(*embedded, strict=True))
    has_other = classes.bincount()[classes] > 1
    count, correct = int(has_other.sum()), 0
    if not count:
        raise TrainingError(
            "Each gallery image is alone in its class, so nearest neighbors cannot measure the training; raise "
            "data.gallery_fraction, add images, or use a loss with class weights."
        )
    for rows in torch.arange(len(classes), device=device).split(NEIGHBOR_ROWS):
        similarity = vectors[rows] @ vectors.T
        similarity[torch.arange(len(rows), device=device), rows] = -math.inf
        correct += int(((classes[similarity.argmax(dim=1)] == classes[rows]) & has_other[rows]).sum())
    return _metrics(total_loss / len(classes), correct, count)


def _metrics(loss: float, correct: float, count: float) -> GalleryMetrics:
    proportion = (correct + 0.5) / (count + 1)
    return {
        "gallery_loss": loss,
        "gallery_accuracy": correct / count,
        "gallery_accuracy_error": math.sqrt(proportion * (1 - proportion) / (count + 1)),
    }


def recognizes_all(history: Sequence[Epoch]) -> bool:
    """Whether the last two epochs made no error in a gallery that is large enough to say so. Only a
    falling learning rate can then improve the network."""
    return len(history) > 1 and all(
        epoch.gallery_accuracy == 1 and epoch.gallery_accuracy_error <= MAX_SATURATED_ERROR for epoch in history[-2:]
    )


def choose_flips(history: Sequence[Epoch]) -> tuple[Flip, ...]:
    return tuple(test.direction for epoch in history for test in epoch.flip_tests if test.harmless)


def measure_flips(
    module: TrainingModule, images: TrainingImages, device: torch.device, metrics: Epoch
) -> tuple[FlipTest, ...]:
    """Compare the accuracy on the mirrored gallery with that on the original one.

    The network was trained without flips. If the mirror image is as likely as the image, as for a
    photographed dog, it recognizes both equally well. A mirrored digit is a different symbol. A
    flip is harmless if the accuracy above chance falls by no more than the fraction
    `FLIP_TOLERANCE` plus two standard errors. While the accuracy is too low to compare flips
    (`FLIP_TEST_MIN_ERRORS`), nothing is returned.
    """
    above_chance, error = metrics.gallery_accuracy - images.chance_accuracy, metrics.gallery_accuracy_error
    if above_chance < FLIP_TEST_MIN_ERRORS * error:
        return ()
    min_accuracy = metrics.gallery_accuracy - FLIP_TOLERANCE * above_chance - 2 * error

    def measure(direction: Flip) -> FlipTest:
        mirrored = (
            (flip(pixels, direction), classes) for pixels, classes in images.gallery(*distributed.rank_and_world_size())
        )
        accuracy = measure_gallery(module, mirrored, device)["gallery_accuracy"]
        return FlipTest(direction=direction, gallery_accuracy=accuracy, harmless=accuracy >= min_accuracy)

    return measure("horizontal"), measure("vertical")


def collapse_warnings(history: Sequence[Epoch], best_epoch: int, recipe: Recipe) -> tuple[str, ...]:
    """A warning if the gallery accuracy fell by over four standard errors after the best epoch."""
    best, last = history[best_epoch - 1], history[-1]
    error = math.hypot(best.gallery_accuracy_error, last.gallery_accuracy_error)
    if best.gallery_accuracy - last.gallery_accuracy <= 4 * error:
        return ()
    return (
        f"Training collapsed after epoch {best_epoch}: the gallery accuracy fell from {best.gallery_accuracy:.1%} to "
        f"{last.gallery_accuracy:.1%}. The weights of epoch {best_epoch} were saved; lower train.learning_rate (it is "
        f"{recipe.learning_rate:g}).",
    )


def too_few_steps(epoch: Epoch, recipe: Recipe) -> str:
    """Why fine-tuning is not worth its time, as one of its first epochs shows, or empty."""
    expected = epoch.steps * recipe.epochs
    if not (recipe.minutes and recipe.weights and epoch.epoch <= FIRST_EPOCHS and expected < FEWEST_STEPS):
        return ""
    return (
        f"Fine-tuning ended early, because the time is enough for about {quantity(expected, 'step')}, and after fewer "
        f"than {FEWEST_STEPS} the pretrained network is better; raise train.minutes."
    )


def require_learned(result: TrainingResult, recipe: Recipe) -> None:
    """Raise `TrainingError` if the best epoch is within one standard error of chance."""
    best = result.best
    longer = "longer (train.minutes)" if recipe.minutes else f"more epochs (train.epochs is {recipe.epochs})"
    if best.gallery_accuracy <= result.chance_accuracy + best.gallery_accuracy_error:
        raise TrainingError(
            f"The network learned nothing: its best gallery accuracy in {quantity(len(result.epochs), 'epoch')} is "
            f"{best.gallery_accuracy:.1%}, and always predicting the most frequent class gives "
            f"{result.chance_accuracy:.1%}. Lower train.learning_rate (it is {recipe.learning_rate:g}), train "
            f"{longer}, or check the labels."
        )
