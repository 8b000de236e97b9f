"""The ArcFace head: softmax over angles, with a margin that the true class has to keep."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ArcFace(nn.Module):
    r"""Additive angular margin logits, of Deng et al. 2019, "ArcFace", arXiv:1801.07698 (equation 3).

    With :math:`\theta_j` the angle between an embedding and the centre of class j, the logit of the true
    class is :math:`s \cos(\theta_y + m)`, of every other :math:`s \cos \theta_j`. Where :math:`\theta_y + m >
    \pi` the cosine would rise again, so there the authors' code goes on with :math:`s (\cos \theta_y - m \sin
    m)`, which keeps the logit falling with the angle.

    The sum formula :math:`\cos\theta \cos m - \sin\theta \sin m` needs no arccosine; the sine is kept above
    `SMALLEST_SINE`, because the gradient of a square root is infinite at 0.
    """

    SMALLEST_SINE = 1e-4

    def __init__(self, classes: int, embedding_dim: int, scale: float, margin: float) -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin
        self.centres = nn.Parameter(torch.empty(classes, embedding_dim))
        nn.init.xavier_uniform_(self.centres)

    def forward(self, embeddings: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (N, classes) of ``embeddings`` (N, D); the margin applies where ``labels`` (N,) are
        given."""
        cosine = F.linear(F.normalize(embeddings), F.normalize(self.centres))
        if labels is None:
            return self.scale * cosine
        own = cosine.gather(1, labels[:, None])
        sine = (1 - own.square()).clamp_min(self.SMALLEST_SINE**2).sqrt()
        shifted = own * math.cos(self.margin) - sine * math.sin(self.margin)
        beyond = own - self.margin * math.sin(self.margin)
        own = torch.where(own > -math.cos(self.margin), shifted, beyond)
        return self.scale * cosine.scatter(1, labels[:, None], own)
