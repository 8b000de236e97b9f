"""The training module, and ArcFace, a softmax over angles with an additive margin."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.embedding.loss import build_loss
from evernear.embedding.network import Architecture, build_network
from evernear.settings.train import ARCFACE

HIGHEST_PROBABILITY = 1 - 1e-7
"""True-class probability that the softmax must be able to reach without label smoothing."""
HIGHEST_SMOOTHED_PROBABILITY = 0.999
"""The same with label smoothing, whose targets are well below 1, so a lower scale suffices and
makes the loss less steep."""
MIN_CLASSES_TO_SAMPLE = 10_000
"""From this number of classes, a training step computes logits for only a random sample."""
SAMPLE_RATE = 0.1
"""Fraction of the classes to sample, with which Partial FC is as accurate as with all classes."""


class ArcFace(nn.Module):
    r"""Additive angular margin logits (Deng et al. 2019, "ArcFace", arXiv:1801.07698, equation 3).

    Let :math:`\theta_j` be the angle between an embedding and the center of class j. The logit of
    the true class is :math:`s \cos(\theta_y + m)`, and every other logit is
    :math:`s \cos \theta_j`. Where :math:`\theta_y + m > \pi`, the cosine would rise again, so the
    logit is :math:`s (\cos \theta_y - m \sin m)`, as in the authors' code, which still decreases as
    the angle grows.

    The sum formula :math:`\cos\theta \cos m - \sin\theta \sin m` avoids computing the arccosine.
    The sine is clamped to `MIN_SINE` because the gradient of a square root is infinite at 0.
    """

    MIN_SINE = 1e-4

    def __init__(self, classes: int, embedding_dim: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.centers = nn.Parameter(torch.empty(classes, embedding_dim))
        nn.init.xavier_uniform_(self.centers)

    def forward(
        self, embeddings: Tensor, labels: Tensor | None = None, margin: float = 0.0, sampled: Tensor | None = None
    ) -> Tensor:
        """Logits (N, classes) for ``embeddings`` (N, D).

        The ``margin`` in radians applies only with ``labels`` (N,). With ``sampled`` (S,), only
        these classes' logits (N, S) are computed, and ``labels`` are indices into it.
        """
        centers = self.centers if sampled is None else self.centers[sampled]
        cosine = F.linear(F.normalize(embeddings), F.normalize(centers))
        if labels is None:
            return self.scale * cosine
        target = cosine.gather(1, labels[:, None])
        sine = (1 - target.square()).clamp_min(self.MIN_SINE**2).sqrt()
        shifted = target * math.cos(margin) - sine * math.sin(margin)
        beyond_pi = target - margin * math.sin(margin)
        target = torch.where(target > -math.cos(margin), shifted, beyond_pi)
        return self.scale * cosine.scatter(1, labels[:, None], target)


def choose_scale(classes: int, label_smoothing: float = 0.0) -> float:
    """The smallest scale at which a softmax can give the true class a probability near 1.

    It is the lower bound from Wang et al. 2018, "CosFace", arXiv:1801.09414, equation 6, for
    `HIGHEST_PROBABILITY`, or `HIGHEST_SMOOTHED_PROBABILITY` with label smoothing. A larger scale
    only sharpens the loss for hard images.
    """
    highest = HIGHEST_SMOOTHED_PROBABILITY if label_smoothing else HIGHEST_PROBABILITY
    odds = highest / (1 - highest)
    return (classes - 1) / classes * math.log((classes - 1) * odds)


def sample_classes(labels: Tensor, classes: int, batch_labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """Sampled classes for a training step, and the positions of ``labels`` (N,) among them.

    ``batch_labels`` are the whole batch's, and ``labels`` may be only those of one process. The
    sample is the batch's classes and a random `SAMPLE_RATE` of all (An et al. 2022, "Killing Two
    Birds with One Stone: Efficient and Robust Training of Face Recognition CNNs by Partial FC",
    arXiv:2203.15565), so that the network dominates the step time rather than the head. With fewer
    than `MIN_CLASSES_TO_SAMPLE` classes, it is None: all classes.
    """
    if classes < MIN_CLASSES_TO_SAMPLE:
        return None, labels
    present = batch_labels.unique()
    others = torch.randperm(classes, device=labels.device)[: int(classes * SAMPLE_RATE)]
    return torch.cat([present, others[~torch.isin(others, present)]]), torch.searchsorted(present, labels)


class TrainingModule(nn.Module):
    """The network and one loss per member. Only the network runs in mixed precision."""

    def __init__(
        self,
        architecture: Architecture,
        classes: int,
        scale: float | None,
        label_smoothing: float,
        precision: torch.dtype,
        network: nn.Module | None = None,
        loss: str = ARCFACE,
    ) -> None:
        """By default, ``network`` has random weights, and `choose_scale` sets ``scale``."""
        super().__init__()
        self.network = network or build_network(architecture)
        self.classes, self.label_smoothing = classes, label_smoothing
        dim = architecture.embedding_dim // architecture.members
        scale = scale or choose_scale(classes, label_smoothing)
        self.heads = nn.ModuleList(
            ArcFace(classes, dim, scale) if loss == ARCFACE else build_loss(loss, classes, dim)
            for _ in range(architecture.members)
        )
        self.has_class_weights = loss == ARCFACE or hasattr(self.heads[0], "logits")
        """Whether `logits` can be computed. Otherwise, the loss compares the images of a batch."""
        self.precision = precision

    def forward(self, images: Tensor, labels: Tensor, margin: float, batch_labels: Tensor) -> Tensor:
        """The loss for ``images`` (N, C, H, W) and ``labels`` (N,), averaged over the members: with
        ArcFace, the cross-entropy. ``batch_labels`` are the whole batch's (`sample_classes`)."""
        return self.loss(self.embed(images), labels, margin, batch_labels)

    def loss(self, embeddings: Tensor, labels: Tensor, margin: float, batch_labels: Tensor) -> Tensor:
        """`forward` for the network's ``embeddings`` (N, D)."""
        sampled, positions = sample_classes(labels, self.classes, batch_labels)
        losses = [
            F.cross_entropy(head(chunk, positions, margin, sampled), positions, label_smoothing=self.label_smoothing)
            if isinstance(head, ArcFace)
            else head(F.normalize(chunk), labels)
            for head, chunk in self._of_members(embeddings)
        ]
        return torch.stack(losses).mean()

    def logits(self, images: Tensor) -> Tensor:
        """The members' mean logits (N, classes) for ``images`` (N, C, H, W), without the margin."""
        members = self._of_members(self.embed(images))
        logits = [
            head(chunk) if isinstance(head, ArcFace) else cast(Any, head).logits(F.normalize(chunk))
            for head, chunk in members
        ]
        return torch.stack(logits).mean(dim=0)

    def embed(self, images: Tensor) -> Tensor:
        """The network's output (N, D) for ``images`` (N, C, H, W)."""
        with torch.autocast(images.device.type, self.precision, enabled=self.precision != torch.float32):
            return self.network(images)

    def _of_members(self, embeddings: Tensor) -> Iterable[tuple[nn.Module, Tensor]]:
        return zip(self.heads, embeddings.chunk(len(self.heads), dim=1), strict=True)
