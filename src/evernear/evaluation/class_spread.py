"""The variance of the open-set probe's figures, including the spread between classes.

The figures are meant to describe classes that nobody has seen yet, and classes differ from each
other more than images of one class do. The sample therefore consists of classes: two classes of a
thousand images each are two observations. The images of one group (``data.group``) also count as
one observation.

Each function imports SciPy itself, which takes half a second, and reading an earlier measurement
does not need it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.evaluation.statistics import deviations

PRIOR_DEVIATION = 0.8
"""Prior for the standard deviation, between classes, of a figure's log-odds. On three sets of
photographs, it was 0.6 to 0.9 for the AUROC (docs/decisions/0008-unknown-images.md)."""
PRIOR_DEGREES = 4
"""Weight of `PRIOR_DEVIATION`, in degrees of freedom."""
Clusters = NDArray[np.int32]
"""The class number or group number of each image (N,)."""


class Spread(NamedTuple):
    """The estimated variance of a mean, on the log-odds scale, and its degrees of freedom."""

    variance: float
    degrees: float

    def half_width(self, confidence: float) -> float:
        """Half the width of a two-sided interval of the log-odds, from Student's t distribution."""
        from scipy.stats import t

        return float(t.ppf((1 + confidence) / 2, self.degrees)) * math.sqrt(self.variance)


def spread_of_mean(values: NDArray[np.floating], clusterings: Sequence[Clusters]) -> Spread:
    """The spread of the mean of ``values`` (N,), each between 0 and 1, whose clusters are a sample.

    N must be at least 1. The clustering that gives the widest interval is used. The variance
    between the means of clusters is moderated (Smyth 2004, Stat Appl Genet Mol Biol 3:3): it is
    averaged with the variance for `PRIOR_DEVIATION`, weighted by the degrees of freedom. Two
    clusters contain almost no information about the variance between clusters, so their interval
    from Student's t distribution would otherwise be nearly 0 to 1.
    """
    return max((_moderated(values, clusters) for clusters in clusterings), key=lambda spread: spread.half_width(0.95))


def sum_of_spreads(spreads: Sequence[Spread]) -> Spread:
    """The spread of a sum of independent means, with degrees of freedom according to Welch and
    Satterthwaite (1946)."""
    variance = sum(spread.variance for spread in spreads)
    return Spread(variance, variance**2 / sum(spread.variance**2 / spread.degrees for spread in spreads))


def effective_images(accepted: NDArray[np.bool_], clusterings: Sequence[Clusters], confidence: float) -> float:
    """The number of independent images, at most N, that would contain as much information about the
    share of accepted images as ``accepted`` (N,)."""
    count, total = int(accepted.sum()), len(accepted)
    share = _inside(count / total, total)
    half = spread_of_mean(accepted.astype(np.float64), clusterings).half_width(confidence)
    return min(float(total), deviations(confidence) ** 2 / (share * (1 - share) * half**2))


def _moderated(values: NDArray[np.floating], clusters: Clusters) -> Spread:
    _, members = np.unique(clusters, return_inverse=True)
    sizes = np.bincount(members)
    count, weights = len(sizes), sizes / sizes.sum()
    means = np.bincount(members, weights=values) / sizes
    mean = float(values.mean())
    share = _inside(mean, len(values))
    between = float((weights * (means - mean) ** 2).sum()) * count / max(1, count - 1)
    measured = between / (share * (1 - share)) ** 2  # variance of the log-odds, by the delta method
    degrees = PRIOR_DEGREES + count - 1
    moderated = (PRIOR_DEGREES * PRIOR_DEVIATION**2 + (count - 1) * measured) / degrees
    return Spread(float((weights**2).sum()) * moderated, degrees)


def _inside(share: float, total: int) -> float:
    """The share after half an image of each outcome has been added, because the log-odds of 0 and 1
    are infinite."""
    return (share * total + 0.5) / (total + 1)
