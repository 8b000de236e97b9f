"""ArcFace: softmax over angles with an additive margin, and the module that trains a network with it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.embedding.network import Architecture, build

HIGHEST_PROBABILITY = 1 - 1e-7


class ArcFace(nn.Module):
    r"""Additive angular margin logits (Deng et al. 2019, "ArcFace", arXiv:1801.07698, equation 3).

    With :math:`\theta_j` the angle between an embedding and the center of class j, the logit of the true class is
    :math:`s \cos(\theta_y + m)` and every other logit is :math:`s \cos \theta_j`. Where :math:`\theta_y + m > \pi` the
    cosine would rise again. There the logit is :math:`s (\cos \theta_y - m \sin m)`, as in the authors' code, so that
    it keeps falling with the angle.

    The sum formula :math:`\cos\theta \cos m - \sin\theta \sin m` avoids the arccosine. The sine is clamped to
    `SMALLEST_SINE` because the gradient of a square root is infinite at 0.
    """

    SMALLEST_SINE = 1e-4

    def __init__(self, classes: int, embedding_dim: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.centers = nn.Parameter(torch.empty(classes, embedding_dim))
        nn.init.xavier_uniform_(self.centers)

    def forward(self, embeddings: Tensor, labels: Tensor | None = None, margin: float = 0.0) -> Tensor:
        """Logits (N, classes) of ``embeddings`` (N, D). If ``labels`` (N,) are passed, ``margin`` (radians) applies."""
        cosine = F.linear(F.normalize(embeddings), F.normalize(self.centers))
        if labels is None:
            return self.scale * cosine
        target = cosine.gather(1, labels[:, None])
        sine = (1 - target.square()).clamp_min(self.SMALLEST_SINE**2).sqrt()
        shifted = target * math.cos(margin) - sine * math.sin(margin)
        beyond_pi = target - margin * math.sin(margin)
        target = torch.where(target > -math.cos(margin), shifted, beyond_pi)
        return self.scale * cosine.scatter(1, labels[:, None], target)


def choose_scale(classes: int) -> float:
    """The smallest scale at which the softmax of ``classes`` classes can give the true class `HIGHEST_PROBABILITY`.

    It is the lower bound of Wang et al. 2018, "CosFace", arXiv:1801.09414, equation 6. A larger scale only sharpens the
    loss of images that are hard.
    """
    odds = HIGHEST_PROBABILITY / (1 - HIGHEST_PROBABILITY)
    return (classes - 1) / classes * math.log((classes - 1) * odds)


class TrainingModule(nn.Module):
    """The embedding network and one ArcFace head per member; a ``scale`` of 0 is that of `choose_scale`.

    Only the network runs in mixed precision.
    """

    def __init__(self, architecture: Architecture, classes: int, scale: float, precision: torch.dtype) -> None:
        super().__init__()
        self.network = build(architecture)
        dim = architecture.embedding_dim // architecture.members
        self.heads = nn.ModuleList(
            ArcFace(classes, dim, scale or choose_scale(classes)) for _ in range(architecture.members)
        )
        self.precision = precision

    def forward(self, images: Tensor, classes: Tensor | None = None, margin: float = 0.0) -> Tensor:
        """Logits (N, classes, members) of ``images`` (N, C, H, W), with ``margin`` if ``classes`` (N,) are passed."""
        with torch.autocast(images.device.type, self.precision, enabled=self.precision != torch.float32):
            embeddings = self.network(images)
        parts = embeddings.chunk(len(self.heads), dim=1)
        return torch.stack([head(part, classes, margin) for head, part in zip(self.heads, parts, strict=True)], dim=2)


def cross_entropy(logits: Tensor, classes: Tensor, label_smoothing: float) -> Tensor:
    """Mean over images and members of `TrainingModule` logits (N, classes, members) and ``classes`` (N,)."""
    targets = classes[:, None].expand(-1, logits.shape[2])
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
