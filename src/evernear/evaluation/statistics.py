"""Proportions and areas under the ROC curve, with confidence intervals. Each function imports SciPy
itself, which takes half a second, and reading an earlier measurement does not need it.

SciPy's `binomtest` takes integers only, which excludes effective numbers of images, and is 100 to
400 times slower than its special functions. Its `bootstrap` is 40 to 800 times slower than
`false_accepts_at`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from evernear.common.frozen import Frozen
from evernear.index.description import clopper_pearson, wilson

ROC_POINTS = 200
CONFIDENCE = 0.95
BOOTSTRAP = 10_000


class Proportion(Frozen):
    """``count`` out of ``total``, with an interval that is also valid near 0 and 1 and for small
    totals. The interval is Wilson's (1927), unless `exact_proportion` computed it."""

    count: int = Field(ge=0)
    total: int = Field(ge=1)
    low: float = Field(ge=0, le=1, allow_inf_nan=False)
    high: float = Field(ge=0, le=1, allow_inf_nan=False)
    effective: float | None = None
    """Effective number of independent images, or None if all images are independent."""

    @property
    def value(self) -> float:
        return self.count / self.total

    def __str__(self) -> str:
        return f"{self.value:.2%} ({self.low:.2%} to {self.high:.2%})"


class Interval(Frozen):
    value: float = Field(ge=0, le=1, allow_inf_nan=False)
    low: float = Field(ge=0, le=1, allow_inf_nan=False)
    high: float = Field(ge=0, le=1, allow_inf_nan=False)

    def __str__(self) -> str:
        return f"{self.value:.2%} ({self.low:.2%} to {self.high:.2%})"


class Auroc(Interval):
    """Area under the ROC curve: the probability that an unknown image is farther from the gallery
    than a known one."""

    known: int
    unknown: int

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


class Placements(NamedTuple):
    """The ranks of known images among unknown images, and vice versa. The mean of each column is
    the area under the ROC curve."""

    known_below: NDArray[np.float64]
    """For each known image (N,), the share of unknown images that are farther from the gallery."""
    beyond_known: NDArray[np.float64]
    """For each unknown image (M,), the share of known images that are nearer to the gallery."""


class Roc(Frozen):
    """The ROC curve of a distance threshold, with at most `ROC_POINTS` points, all finite."""

    false_accepts: tuple[float, ...]
    """Proportion of unknown images within the threshold, the x-coordinate of the curve (FAR)."""
    true_accepts: tuple[float, ...]
    """Proportion of known images within the threshold, the y-coordinate of the curve (1 - FRR)."""
    thresholds: tuple[float, ...]

    def false_accepts_at(self, false_reject_rate: float) -> float:
        """The smallest false-accept rate among thresholds with a false-reject rate of at most
        ``false_reject_rate``."""
        pairs = zip(self.false_accepts, self.true_accepts, strict=True)
        # rounded, because 1 - 0.95 is slightly more than 0.05
        return min(accepted for accepted, true_accepts in pairs if round(1 - true_accepts, 9) <= false_reject_rate)


def proportion(count: int, total: int, confidence: float, effective: float | None = None) -> Proportion:
    """``count`` out of ``total`` (at least 1), with an interval. See `effective_totals`."""
    low, high = wilson(count / total, total if effective is None else effective, deviations(confidence))
    return Proportion(count=count, total=total, low=low, high=high, effective=effective)


def is_higher(share: Proportion | Interval, other: Proportion | Interval) -> bool:
    """Whether ``share`` is significantly higher than the independent ``other``: the interval of the
    difference, which combines both intervals (Newcombe 1998, Statist Med 17:873, method 10), lies
    above 0."""
    return share.value - other.value > math.hypot(share.value - share.low, other.high - other.value)


TRANSFER_DEVIATION = 1.0
"""Standard deviation of the log-odds between a share that a probe measures and the same share of a
release, on images of another day and of other classes, beyond the spread between the classes of the
probe. With it, 95% intervals held in 15 of 16 draws of groceries, and 7 of 8 of clothes; without
it, in 13 and 3 (docs/decisions/0008-unknown-images.md)."""


def expected_share(share: Proportion, classes: float = 1.0) -> Interval:
    """``share`` of new images, with an interval that includes `TRANSFER_DEVIATION`.

    ``classes`` is the number of classes of the release relative to that of the probe, if each may
    cause the event: an image of an unseen class is accepted if it is near any of them.
    """
    from scipy.special import expit, logit

    transfer = deviations(CONFIDENCE) * TRANSFER_DEVIATION
    middle = logit(share.value if 0 < share.count < share.total else _inside(share.value, share.total))
    below, above = (math.hypot(middle - logit(limit), transfer) for limit in (share.low, share.high))
    ends = Interval(value=share.value, low=float(expit(middle - below)), high=float(expit(middle + above)))
    return near_any(ends, classes)


def near_any(share: Interval, classes: float) -> Interval:
    """The ``share`` of images that are near one of some classes, for ``classes`` times as many
    classes."""
    value, low, high = (1 - (1 - each) ** classes for each in (share.value, share.low, share.high))
    return Interval(value=value, low=min(low, value), high=max(high, value))


def exact_proportion(count: int, total: int, confidence: float) -> Proportion:
    """``count`` out of ``total`` (at least 1), with the exact two-sided interval of Clopper and
    Pearson (1934). Wilson's interval contains a true proportion of 99% in only 92% of samples of
    100 images."""
    low, high = clopper_pearson(count, total, (1 - confidence) / 2)
    return Proportion(count=count, total=total, low=low, high=high)


def place(known: NDArray[np.float32], unknown: NDArray[np.float32]) -> Placements:
    """Compare the distances of known (N,) and unknown (M,) images. Ties count half."""
    return Placements(1 - _shares_below(known, unknown), _shares_below(unknown, known))


def _shares_below(values: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float64]:
    """For each of ``values`` (N,), the share of ``others`` (M,) that are lower. Ties count half."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right")) / (2 * len(others))


def auroc_interval(
    placements: Placements, known: float, unknown: float, confidence: float
) -> tuple[float, float, float]:
    """The area under the ROC curve, followed by the limits of its interval. ``known`` and
    ``unknown`` are the numbers of independent images, at least 1.

    The interval is the hull of two, because each fails where the other is valid. The first (DeLong,
    DeLong and Clarke-Pearson 1988, Biometrics 44:837), with Wilson's limits for a share of that
    variance, assumes no distribution. Its width approaches zero if the distances of known and
    unknown images hardly overlap. That of the second does not (Newcombe 2006, Statist Med 25:559,
    method 5).
    """
    value, z = float(placements.beyond_known.mean()), deviations(confidence)
    ends = [*_newcombe(value, unknown, known, z), *_delong(value, placements, known, unknown, z)]
    return value, min(ends), max(ends)


def roc(known: NDArray[np.float32], unknown: NDArray[np.float32]) -> Roc:
    """The ROC curve at thresholds that are evenly spaced over the ranks of all distances. The first
    threshold accepts no image, and the last accepts all."""
    distances = np.unique(np.concatenate([known, unknown]))
    picked = np.unique(np.linspace(0, len(distances) - 1, ROC_POINTS - 1).round().astype(int))
    thresholds = np.concatenate([[0.0], distances[picked]])
    inside = [np.searchsorted(np.sort(group), thresholds, side="right") for group in (known, unknown)]
    # the first point accepts no image, even if a distance is 0
    inside[0][0] = inside[1][0] = 0
    return Roc(
        true_accepts=tuple((inside[0] / len(known)).tolist()),
        false_accepts=tuple((inside[1] / len(unknown)).tolist()),
        thresholds=tuple(thresholds.tolist()),
    )


def p_by_chance(confusions: Iterable[tuple[object, object, int]]) -> float:
    """Probability of at least as many right labels if the predictions were assigned at random.

    ``confusions`` are (label, prediction, count). The number of correct predictions has the exact
    mean and variance of a permutation test. Its distribution is approximated by a normal one with
    continuity correction. If all predictions are the same, the result is 1.
    """
    labels: Counter[object] = Counter()
    predictions: Counter[object] = Counter()
    correct = total = 0
    for label, prediction, count in confusions:
        labels[label] += count
        predictions[prediction] += count
        correct += count if label == prediction else 0
        total += count
    products = [(labels[name] * predictions[name], labels[name], predictions[name]) for name in labels]
    matches = sum(product for product, _, _ in products)
    # The number of matches of a class has a hypergeometric distribution. The covariance between two
    # classes is proportional to the product of their entries in `products`.
    variance = sum(product * ((total - a) * (total - b) - product) for product, a, b in products) + matches**2
    if total < 2 or variance <= 0:
        return 1.0
    z = (correct - 0.5 - matches / total) / math.sqrt(variance / (total**2 * (total - 1)))
    return NormalDist().cdf(-z)


def false_accepts_at(
    known: NDArray[np.float32], unknown: NDArray[np.float32], true_accept_rate: float, confidence: float
) -> Interval:
    """Share of the unknown (M,) distances that a threshold accepts: the smallest one that accepts
    the share ``true_accept_rate`` of the known (N,) distances.

    The interval is the hull of a percentile bootstrap interval (Efron 1979) and Wilson's. The first
    includes the random variation of the threshold, whose rank has a Beta distribution in a resample
    of the known distances. The number of accepted unknown distances is binomial. Therefore, no
    resample has to be drawn. Its width is zero at 0 and 1, where Wilson's is not.
    """
    known, unknown = np.sort(known), np.sort(unknown)
    n, m = len(known), len(unknown)
    rank = math.ceil(true_accept_rate * n)
    accepted = int(np.searchsorted(unknown, known[rank - 1], side="right"))
    rng = np.random.default_rng(0)
    thresholds = known[np.minimum((rng.beta(rank, n - rank + 1, BOOTSTRAP) * n).astype(int), n - 1)]
    shares = rng.binomial(m, np.searchsorted(unknown, thresholds, side="right") / m) / m
    low, high = np.quantile(shares, ((1 - confidence) / 2, (1 + confidence) / 2))
    wilson = proportion(accepted, m, confidence)
    return Interval(value=accepted / m, low=min(float(low), wilson.low), high=max(float(high), wilson.high))


def deviations(confidence: float) -> float:
    """Half-width, in standard deviations, of the central interval of a normal distribution with
    probability ``confidence``."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _delong(value: float, placements: Placements, known: float, unknown: float, z: float) -> tuple[float, float]:
    if not 0 < value < 1 or min(map(len, placements)) < 2:
        return value, value
    variance = sum(float(part.var(ddof=1) / count) for part, count in zip(placements, (known, unknown), strict=True))
    # On the log-odds scale, the interval of 0.993 reached to 0.459 because of one image.
    return wilson(value, value * (1 - value) / variance, z) if variance else (value, value)


def _newcombe(value: float, m: float, n: float, z: float) -> tuple[float, float]:
    """The interval limits below and above ``value``. The distance of each from ``value`` is ``z``
    times the standard error at that limit."""
    from scipy.optimize import root_scalar

    def beyond(area: float) -> float:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - area) / (2 - area) + area / (1 + area))
        return abs(value - area) - z * math.sqrt(area * (1 - area) * spread / (m * n))

    def end(limit: float) -> float:
        # negative next to ``value``, and positive at 0 or 1, where the standard error is zero
        start = value + (limit - value) * 1e-9
        if start == limit or beyond(start) >= 0:
            return limit
        return float(root_scalar(beyond, bracket=(start, limit), method="brentq").root)

    return end(0.0), end(1.0)


def effective_totals(strata: NDArray[np.integer], groups: NDArray[np.integer], count: int) -> NDArray[np.float64]:
    """The effective number of independent images for each stratum that is not empty (``count``,).

    Each of the N images has a stratum from 0 to ``count`` - 1, and a group. All images of a group
    are assumed to have the same outcome, which is nearly true for frames of one scene. The result
    is then the squared sum of the group sizes divided by the sum of their squares (Kish 1965,
    Survey Sampling, section 8.2): the number of groups if all have the same size, or of images if
    every group has one.

    In simulations of 96 cases, Wilson's interval with this number contained the true proportion in
    92.6 to 100% of samples. With the number of images, the coverage fell to 23%. With the measured
    design effect, it fell to 83%, because the few groups with an error hardly show how similar the
    images of a group are. The interval is wider than necessary if the images of a group differ.
    """
    pairs, sizes = np.unique(np.stack([strata, groups]), axis=1, return_counts=True)
    images = np.bincount(pairs[0], weights=sizes, minlength=count)
    squares = np.bincount(pairs[0], weights=sizes.astype(np.float64) ** 2, minlength=count)
    return images**2 / np.maximum(squares, 1)


def sign_flip_worse(nets: Iterable[int]) -> float:
    """The p-value of the exact one-sided sign-flip test for groups (Fisher 1935; Good 2005, section
    3.2).

    ``nets`` contains the regressions minus the improvements for each group. If two systems are
    equally good, each net is as likely as its negative. With one image in each group, this is the
    exact McNemar test.
    """
    from scipy.special import bdtrc

    nets = [net for net in nets if net]
    observed, magnitudes = sum(nets), Counter(map(abs, nets))
    if set(magnitudes) <= {1}:
        regressions = sum(net > 0 for net in nets)
        return float(bdtrc(regressions - 1, len(nets), 0.5)) if regressions else 1.0
    from scipy.signal import convolve  # with scipy.stats, this takes a second
    from scipy.stats import binom

    # the number of positive nets, whose sum is `lost`, is binomial for each magnitude
    unit = math.gcd(*magnitudes)
    distribution = np.ones(1)
    for magnitude, number in sorted(magnitudes.items()):
        step = magnitude // unit
        part = np.zeros(step * number + 1)
        part[::step] = binom.pmf(np.arange(number + 1), number, 0.5)
        distribution = convolve(distribution, part)
    lost = (observed + sum(map(abs, nets))) // 2 // unit
    return float(min(1.0, max(0.0, distribution[lost:].sum())))


PRIOR_DEVIATION = 0.8
"""Prior for the standard deviation, between classes, of a figure's log-odds. On three sets of
photographs, it was 0.6 to 0.9 for the AUROC (docs/decisions/0008-unknown-images.md)."""
PRIOR_DEGREES = 4
"""Weight of `PRIOR_DEVIATION`, in degrees of freedom."""
Clusters = NDArray[np.int32] | NDArray[np.int64]
"""The class number or group number of each image (N,)."""


class Spread(NamedTuple):
    """The estimated variance of a mean, on the log-odds scale, and its degrees of freedom."""

    variance: float
    degrees: float

    def half_width(self, confidence: float) -> float:
        """Half the width of a two-sided interval of the log-odds, from Student's t distribution."""
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees, (1 + confidence) / 2)) * math.sqrt(self.variance)


def spread_of_mean(values: NDArray[np.floating], clusterings: Sequence[Clusters]) -> Spread:
    """The spread of the mean of ``values`` (N,), each between 0 and 1, whose clusters are a sample.

    The figures are meant to describe classes that nobody has seen yet, and classes differ more than
    images of one class do: two classes of a thousand images each are two observations. The
    clustering that gives the widest interval is used. The variance between clusters is moderated
    (Smyth 2004, Stat Appl Genet Mol Biol 3:3): it is averaged with that of `PRIOR_DEVIATION`,
    weighted by the degrees of freedom. Two clusters alone would give an interval of nearly 0 to 1.
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
