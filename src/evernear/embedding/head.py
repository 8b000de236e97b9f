"""A linear head on the features of a pretrained backbone that does not change.

The features of the training images, plain and in a few augmented views, are computed once and
cached. A training step on them takes milliseconds.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.common.output import quantity
from evernear.data.shards import Dataset
from evernear.embedding.arcface import ArcFace, TrainingModule
from evernear.embedding.augmentation import augment_block, view_name
from evernear.embedding.clock import Clock, OnStep, Steps
from evernear.embedding.data_loader import TrainingImages, one_torch_thread
from evernear.embedding.features import FrozenBackbone, FrozenFeatures, View
from evernear.embedding.network import Architecture, EmbeddingNetwork
from evernear.embedding.optimizer import choose_optimizer
from evernear.embedding.recipe import HEAD, Recipe, learning_rate, margin, size_factor, steps_per_epoch
from evernear.embedding.timm_member import TimmMember, prepare_epoch
from evernear.embedding.whitening import Whitening, whiten

DROPOUT = 0.5
"""Share of the features that a training step ignores."""
MAX_BYTES = 2**30
"""Maximum size of the training features in memory. Beyond it, only every nth image is used."""
VIEWS_SHARE = 0.8
"""Share of the time (``train.minutes``) after which no more views are computed."""
START_IMAGES = 1000
"""Images on which the head is trained from which fine-tuning starts: ten seconds on two cores."""
HEAD_SHARE = 0.5
"""Share of the head in the similarity of two embeddings. The rest is the whitened features'. On
four sets of photographs, half of each beats a head alone
(docs/decisions/0030-pretrained-weights.md)."""


class LinearHead(nn.Module):
    """Maps whitened features (N, F) to unit vectors (N, D). The initial map is a rotation, which
    preserves the angles between features."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.project = nn.Linear(features, dim, bias=False)
        nn.init.orthogonal_(self.project.weight)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(self.project(self.dropout(features)))


class HeadExamples(NamedTuple):
    """Whitened features of length sqrt(F) that replace the train split's images."""

    features: NDArray[np.float32]
    """(V + 1, N, F): the features of the plain images, then of each of the V augmented views."""
    classes: NDArray[np.int64]
    """Class numbers (N,)."""

    def batches(self, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Indefinitely yield shuffled features (N, F), each of a random view, and classes (N,)."""
        rng, order = np.random.default_rng(seed), np.empty(0, np.int64)
        while True:
            while len(order) < batch_size:
                order = np.concatenate([order, rng.permutation(len(self.classes))])
            rows, order = order[:batch_size], order[batch_size:]
            views = rng.integers(len(self.features), size=batch_size)
            yield torch.from_numpy(self.features[views, rows]), torch.from_numpy(self.classes[rows])


class Head(NamedTuple):
    map: Whitening
    """The whitening and the head's map in one, which a network applies to features."""
    views: int
    """Augmented views of each image on which it was trained."""
    warnings: tuple[str, ...]


def whitening_for(features: FrozenFeatures, dataset: Dataset, images: TrainingImages) -> Whitening:
    """Fit the whitening of ``features`` to the train split."""
    whitening = Whitening(features.dim, features.dim)
    whiten(whitening, features.batches(dataset, "train", images), images.classes)
    return whitening


def train_head(
    features: FrozenFeatures,
    architecture: Architecture,
    dataset: Dataset,
    images: TrainingImages,
    recipe: Recipe,
    on_step: OnStep | None = None,
    clock: Clock | None = None,
) -> Head:
    """Train a head on the train split.

    Its map is the projection beside the whitened features or, with ``recipe.embedding_dim``, the
    projection alone, which has that dimension. Views that take more than `VIEWS_SHARE` of the time
    are left out.
    """
    clock = clock or Clock()
    used_s = clock.used_s
    whitening = whitening_for(features, dataset, images)
    clock.reserve(clock.used_s - used_s)
    examples = read_examples(features, whitening, dataset, images, recipe, clock)
    projection, _ = _fit(examples, architecture, images.classes, recipe, on_step, clock)
    weight = projection if recipe.embedding_dim else beside_whitened(projection, examples)
    views = len(examples.features) - 1
    # Without the normalization between whitening and projection: the length of the whitened
    # features does not matter, because the network normalizes its output.
    folded = Whitening(features.dim, len(weight))
    folded.mean.copy_(whitening.mean)
    folded.matrix.copy_(whitening.matrix @ weight.T)
    warning = f"The time was enough for {views} of {quantity(recipe.views, 'augmented view')}."
    return Head(folded, views, (warning,) if views < recipe.views else ())


def _fit(
    examples: HeadExamples,
    architecture: Architecture,
    classes: int,
    recipe: Recipe,
    on_step: OnStep | None = None,
    clock: Clock | None = None,
) -> tuple[Tensor, Tensor]:
    """The trained projection (D, F) and class centers (C, D)."""
    torch.manual_seed(recipe.seed)
    layer = LinearHead(examples.features.shape[2], architecture.embedding_dim)
    module = TrainingModule(architecture, classes, recipe.scale, recipe.label_smoothing, torch.float32, layer)
    centers = cast(ArcFace, module.heads[0]).centers
    with one_torch_thread():
        _start_at_class_means(centers, layer, examples)
        _train(module, examples, recipe, on_step, clock or Clock())
    return layer.project.weight.detach(), centers.detach()


@torch.no_grad()
def beside_whitened(projection: Tensor, examples: HeadExamples) -> Tensor:
    """A map (F + D, F) of whitened features to these, followed by their ``projection`` (D, F).

    Both parts are scaled so that, for features of average length, the similarity of two embeddings
    is the mean of the parts' similarities, weighted by `HEAD_SHARE`.
    """
    plain = torch.from_numpy(examples.features[0])
    scale = plain.norm(dim=1).mean() / (plain @ projection.T).norm(dim=1).mean()
    whitened = torch.eye(projection.shape[1])
    return torch.cat([(1 - HEAD_SHARE) ** 0.5 * whitened, HEAD_SHARE**0.5 * scale * projection])


def read_examples(
    features: FrozenFeatures,
    whitening: Whitening,
    dataset: Dataset,
    images: TrainingImages,
    recipe: Recipe,
    clock: Clock,
) -> HeadExamples:
    """Compute the features of the train split, plain and in ``recipe.views`` views, of which those
    are left out that ``clock`` leaves no time for."""
    mirror = dataset.shape[2] == 3  # color images are mostly photographs
    views = [
        View(view_name(number, mirror), partial(augment_block, view=number, mirror=mirror))
        for number in range(recipe.views)
    ]
    every = max(1, math.ceil(images.count * (len(views) + 1) * features.dim * 4 / MAX_BYTES))
    rows = np.empty((len(views) + 1, math.ceil(images.count / every), features.dim), np.float32)
    numbers = np.empty(rows.shape[1], np.int64)
    for read, view in enumerate([None, *views]):
        seen = filled = 0
        for batch, classes in features.batches(dataset, "train", images, view):
            if view and clock.share >= VIEWS_SHARE:
                return HeadExamples(rows[:read], numbers)
            chosen = torch.arange(-seen % every, len(classes), every)
            part = slice(filled, filled + len(chosen))
            rows[read, part] = _whitened(whitening, batch[chosen]).numpy()
            numbers[part] = classes[chosen].numpy()
            seen, filled = seen + len(classes), part.stop
    return HeadExamples(rows, numbers)


def start_at_head(module: TrainingModule, architecture: Architecture, images: TrainingImages, recipe: Recipe) -> None:
    """Initialize the last layer and ArcFace's centers of a pretrained ``module`` from a head that
    is trained with ArcFace on the features of a sample, at the size of the first training images.

    A random head would distort the features at first (Kumar et al. 2022, "Fine-tuning can distort
    pretrained features and underperform out-of-distribution", arXiv:2202.10054).
    """
    network = cast(EmbeddingNetwork, module.network)
    prepare_epoch(module.train(), size_factor(recipe, 0), fixed_statistics=True)
    count, backbone = min(images.count, max(START_IMAGES, 10 * images.classes)), FrozenBackbone(network)
    size = min(recipe.batch_size, count)
    batches = islice(images.batches(size, recipe.seed, 0, 0, 1), math.ceil(count / size))
    with torch.inference_mode():
        sample = [(backbone(pixels), classes) for pixels, classes in batches]
    features, classes = (torch.cat(parts) for parts in zip(*sample, strict=True))
    whitening = Whitening(features.shape[1], features.shape[1])
    whiten(whitening, sample, images.classes)
    examples = HeadExamples(_whitened(whitening, features)[None].numpy(), classes.numpy())
    of_head = recipe.model_copy(update=HEAD | {"layers": "head"})
    projection, centers = _fit(examples, architecture, images.classes, of_head)
    project = cast(nn.Linear, cast(TimmMember, network.members[0]).project)
    with torch.no_grad():
        project.weight.copy_(projection @ whitening.matrix.T)
        project.bias.copy_(-project.weight @ whitening.mean)
        if isinstance(head := module.heads[0], ArcFace):
            head.centers.copy_(centers)


def _train(
    module: TrainingModule, examples: HeadExamples, recipe: Recipe, on_step: OnStep | None, clock: Clock
) -> None:
    batch_size = min(recipe.batch_size, len(examples.classes))
    steps = recipe.epochs * steps_per_epoch(recipe, len(examples.classes), batch_size)
    optimizer, begin = choose_optimizer(module, recipe, torch.float32), clock.share
    module.train()
    for step, (features, classes) in enumerate(islice(examples.batches(batch_size, recipe.seed), steps)):
        progress = max(step / steps, (clock.share - begin) / max(1 - begin, 1e-9))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress)
        optimizer.zero_grad()
        module(features, classes, margin(recipe, progress), classes).backward()
        optimizer.step()
        if on_step is not None:
            on_step(Steps(step + 1, steps, steps))
    module.eval()


@torch.no_grad()
def _start_at_class_means(centers: Tensor, layer: LinearHead, examples: HeadExamples) -> None:
    """Set ``centers`` (C, D) to the mean embedding of each class's plain training images."""
    embeddings = F.normalize(torch.from_numpy(examples.features[0]) @ layer.project.weight.T)
    sums = torch.zeros_like(centers).index_add_(0, torch.from_numpy(examples.classes), embeddings)
    present = sums.norm(dim=1) > 0
    centers[present] = F.normalize(sums[present])


@torch.no_grad()
def _whitened(whitening: Whitening, features: Tensor) -> Tensor:
    """Whiten ``features`` (N, F), and scale each row to the length sqrt(F)."""
    return F.normalize(whitening(features)) * features.shape[1] ** 0.5
