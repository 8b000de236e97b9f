"""The variance of the open-set probe's figures: classes differ from each other more than their images do.

The probe holds out some classes, and its figures describe classes that nobody has seen yet. The classes are therefore
the sample, not their images: two classes of a thousand images each are two observations. Images of one group
(``data.group``) are one observation as well.

The functions import SciPy, which takes half a second, so that reading an earlier measurement does not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.evaluation.statistics import deviations

PRIOR_DEVIATION = 0.8
"""Standard deviation between classes of the log-odds of a figure, before it is measured: 0.6 to 0.9 for the AUROC on
three sets of photographs (docs/decisions/0077-an-honest-unknown.md)."""
PRIOR_DEGREES = 4
"""The number of classes that `PRIOR_DEVIATION` counts as."""
Clusters = NDArray[np.int32]
"""The number of the class, or of the group, of each image (N,)."""


class Spread(NamedTuple):
    """The estimated variance of a mean on the scale of its log-odds, and the degrees of freedom of the estimate."""

    variance: float
    degrees: float

    def half_width(self, confidence: float) -> float:
        """Half of the width of a two-sided interval of the log-odds, by Student's t distribution."""
        from scipy.stats import t

        return float(t.ppf((1 + confidence) / 2, self.degrees)) * math.sqrt(self.variance)


def spread_of_mean(values: NDArray[np.floating], clusterings: Sequence[Clusters]) -> Spread:
    """The spread of the mean of ``values`` (N,), each 0 to 1, whose clusters are a sample; N >= 1.

    Of ``clusterings``, the one with the largest interval counts. The variance between the means of clusters is
    moderated (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3:3): averaged with `PRIOR_DEVIATION`, weighted by the degrees
    of freedom of each. Two clusters say almost nothing about their variance, and the interval of Student's t
    distribution for them would be nearly 0 to 1.
    """
    return max((_moderated(values, clusters) for clusters in clusterings), key=lambda spread: spread.half_width(0.95))


def sum_of_spreads(spreads: Sequence[Spread]) -> Spread:
    """The spread of a sum of independent means, with the degrees of freedom of Welch and Satterthwaite (1946)."""
    variance = sum(spread.variance for spread in spreads)
    return Spread(variance, variance**2 / sum(spread.variance**2 / spread.degrees for spread in spreads))


def effective_images(accepted: NDArray[np.bool_], clusterings: Sequence[Clusters], confidence: float) -> float:
    """The number of independent images that say as much about the share of ``accepted`` (N,) as these do; at most N."""
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
    measured = between / (share * (1 - share)) ** 2  # of the log-odds, by the delta method
    degrees = PRIOR_DEGREES + count - 1
    moderated = (PRIOR_DEGREES * PRIOR_DEVIATION**2 + (count - 1) * measured) / degrees
    return Spread(float((weights**2).sum()) * moderated, degrees)


def _inside(share: float, total: int) -> float:
    """``share`` moved away from 0 and 1, where log-odds are infinite, as if half an image of each kind was added."""
    return (share * total + 0.5) / (total + 1)
