"""The last layer of every network: an affine map that whitens vectors within classes."""

from collections.abc import Iterable
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PRIOR_IMAGES = 0.3
"""Shrinkage of the covariance toward equal variances, in images per dimension."""
VARIANCE_RTOL = 1e-9
"""Relative size below which a variance is a rounding error."""

Floats = NDArray[np.float64]


class Whitening(nn.Module):
    """An affine map of vectors (N, F), fitted by `whiten`. The map of a trained head includes its
    projection."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("matrix", torch.eye(features, dim))
        self.mean: Tensor
        self.matrix: Tensor

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) @ self.matrix


@torch.inference_mode()
def whiten(module: Whitening, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
    """Fit ``module``, whose matrix is square, to batches of vectors (N, F) and classes (N,)."""
    dim = len(module.mean)
    counts, sums = np.zeros(classes), np.zeros((classes, dim))
    products = np.zeros((dim, dim))
    for vectors, numbers in batches:
        batch = cast(Floats, vectors.double().numpy())
        np.add.at(sums, numbers.numpy(), batch)
        counts += np.bincount(numbers.numpy(), minlength=classes)
        products += batch.T @ batch
    present = counts > 0
    mean, matrix = whitening_within(counts[present], sums[present], products)
    module.mean.copy_(torch.from_numpy(mean))
    module.matrix.copy_(torch.from_numpy(matrix))


def whitening_within(counts: Floats, sums: Floats, products: Floats) -> tuple[Floats, Floats]:
    """The mean (D,) and the matrix (D, D) that whiten vectors within classes.

    A network separates the classes that it was trained on along a few directions, and images of
    each of them vary little there. A class that is added later differs from the others, and from
    itself, in all directions. Divided by the standard deviation within classes, as in linear
    discriminant analysis (Fukunaga 1990, "Introduction to Statistical Pattern Recognition", section
    10.2), all directions count alike. See docs/decisions/0008-unknown-images.md. Because there are
    often fewer images than dimensions, the covariance is shrunk as if `PRIOR_IMAGES` images per
    dimension varied equally in all directions.

    The mean is that of the class means, because a mean over images would follow the largest class.

    ``counts`` (C,) has the number of images of each class, ``sums`` (C, D) the sums of their
    vectors, and ``products`` (D, D) the sum of all vectors' outer products. The matrix is the
    identity if the vectors do not vary within classes, or each class has only one image.
    """
    means, dim = sums / counts[:, None], len(products)
    mean, within = means.mean(axis=0), products - sums.T @ means
    degrees, total = counts.sum() - len(counts), np.trace(within)
    if degrees < 1 or not total > VARIANCE_RTOL * np.trace(products):  # not greater also if they are NaN
        return mean, np.eye(dim)
    prior = PRIOR_IMAGES * dim
    covariance = (within + prior * total / degrees / dim * np.eye(dim)) / (degrees + prior)
    variances, axes = np.linalg.eigh(covariance)
    return mean, axes / np.sqrt(variances)
