"""Measure the drift of live queries from the champion's reference. Two two-sample tests are used,
each with an effect size.

A p-value shows that two samples differ, but not that the difference matters. With enough queries,
every difference is significant. Drift is therefore reported only if the effect reaches a bound
*and* the p-value is at most the test's share of the false alarm rate (Bonferroni).

The mix of classes among live queries changes with the hour and the day of the week. Such changes
are not drift. Each test therefore compares the live queries with a reference that has the same mix
of predicted classes. Reference queries are weighted to get this mix. The permutations for the
p-values exchange queries only within a class (a stratified permutation test). The p-values are
exact for any mix if the live queries of a class are independent draws from the reference's
distribution of that class. The rate of false alarms is then at most the stated rate.

Live queries arrive in blocks, such as the frames of one scene or a burst from one camera.
`independent_queries` uses only one query of each block, so that a test is valid for any block size
(Hoffman, Sen and Weinberg 2001, "Within-cluster resampling"). The log does not show where a block
ends, so the selected queries are apart by twice the smallest gap at which they are no more similar
to the queries just before them than to others of the same predicted class: at the smallest gap
itself, a few pairs from one block go unnoticed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evernear.serving.live_queries import Floats, Queries

Measure = Literal["unknown_rise", "embedding_shift"]
Weights = NDArray[np.float64]
_Statistic = Callable[[Weights], Weights]

SAMPLE = 500
"""Live queries in one test. With 1,000 reference queries, the distances take 9 MB."""
MIN_QUERIES = 20
"""Minimum number of independent live queries, and also of reference queries, in one test."""
POWER = 0.9
_MIN_PERMUTATIONS = 400
_MIN_SHARED = 5
"""Fewest reference queries in a stratum with classes that have no reference query."""


@dataclass(frozen=True)
class Shift:
    measure: Measure
    effect: float
    bound: float
    p: float
    level: float
    detectable: float
    """The smallest effect that is detected with a probability of `POWER`."""

    @property
    def detected(self) -> bool:
        return self.effect >= self.bound and self.p <= self.level


def measure_drift(
    reference: Queries, live: Queries, bounds: dict[Measure, float], false_alarm_rate: float, seed: int = 0
) -> list[Shift]:
    """Compare ``live`` with ``reference``, using each measure in ``bounds``. Embeddings are not
    compared if either side has no embeddings. The result is empty if either side has fewer than
    `MIN_QUERIES` queries. ``seed`` determines the sample and the permutations."""
    if min(len(reference), len(live)) < MIN_QUERIES:
        return []
    rng = np.random.default_rng(seed)
    if len(live) > SAMPLE:
        live = live.select(np.sort(rng.choice(len(live), SAMPLE, replace=False)))
    is_live = np.repeat([False, True], [len(reference), len(live)])
    _, classes = np.unique(np.concatenate([reference.labels, live.labels]), return_inverse=True)
    classes = _without_empty(classes, is_live)
    level = false_alarm_rate / len(bounds)
    actual, permute = _weights(is_live, classes), partial(_weights, is_live, classes, rng)
    is_unknown = np.concatenate([reference.is_unknown, live.is_unknown])
    # The increase in the unknown rate, after direct standardization to the live class mix.
    statistics: dict[Measure, _Statistic] = {"unknown_rise": lambda weights: is_unknown @ weights}
    if reference.coordinates.shape[1] == live.coordinates.shape[1] > 0:
        points = np.concatenate([reference.coordinates, live.coordinates])
        statistics["embedding_shift"] = _energy(points, actual)
    shifts: list[Shift] = []
    for measure, statistic in statistics.items():
        if bound := bounds.get(measure):
            effect = float(statistic(actual)[0])
            null = _permuted(effect, statistic, permute, level)
            p = (1 + int((null >= effect - _ROUNDING).sum())) / (1 + len(null))  # Phipson and Smyth 2010
            shifts.append(Shift(measure, effect, bound, p, level, _detectable(null, level, bound)))
    return shifts


_ROUNDING = 1e-6
"""Tolerance for rounding errors. Without this tolerance, a permutation that leaves the two sides
unchanged could have a smaller effect."""


def _weights(
    is_live: NDArray[np.bool_], classes: NDArray[np.intp], rng: np.random.Generator | None = None, count: int = 1
) -> Weights:
    """Return signed weights of shape (N, ``count``) for the pooled sample, permuted within the
    classes unless ``rng`` is None.

    Each live query weighs 1/n. Reference queries have negative weights, so that the weights of
    each class add up to zero.
    """
    weights = np.zeros((len(classes), count))
    for label in np.unique(classes):
        rows = np.flatnonzero(classes == label)
        share = is_live[rows].sum() / is_live.sum()
        signed = np.where(is_live[rows], 1 / is_live.sum(), -share / max(1, (~is_live[rows]).sum()))
        columns = np.repeat(signed[:, None], count, axis=1)
        weights[rows] = rng.permuted(columns, axis=0) if rng else columns
    return weights


def _permuted(effect: float, statistic: _Statistic, permute: Callable[[int], Weights], level: float) -> Weights:
    """The statistics of permutations. After the first ones, the others are only made if the p-value
    can still be at most ``level`` (Besag and Clifford 1991), which changes no decision."""
    null = statistic(permute(_MIN_PERMUTATIONS))
    count = max(_MIN_PERMUTATIONS, math.ceil(1 / level))
    if 1 + int((null >= effect - _ROUNDING).sum()) > level * (1 + count):
        return null
    return np.concatenate([null, statistic(permute(count - _MIN_PERMUTATIONS))])


def _without_empty(classes: NDArray[np.intp], is_live: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Merge classes without a reference query with the rarest others, up to `_MIN_SHARED`."""
    counts = np.bincount(classes[~is_live], minlength=int(classes.max()) + 1)
    if counts.min():
        return classes
    rarest = np.argsort(counts, kind="stable")
    last = int(np.searchsorted(np.cumsum(counts[rarest]), _MIN_SHARED))
    return np.where(np.isin(classes, rarest[: last + 1]), rarest[0], classes)


def _energy(points: Floats, weights: Weights) -> _Statistic:
    """A function that maps signed weights (N, P) to the energy coefficients (P,) of two samples,
    which are subsets of ``points``.

    Let X and X' be from one sample, and Y and Y' from the other sample. E = 2 E|X-Y| - E|X-X'| -
    E|Y-Y'| is zero only if both samples have the same distribution. H = E / 2 E|X-Y| is between 0
    and 1 (Szekely and Rizzo 2013, "Energy statistics"). With signed weights u that add up to zero,
    E = -u'Du. For two finite samples of sizes n and m from the same distribution, H is about 1/n +
    1/m. The denominator of H is computed from ``weights``, the weights of the actual sides.
    """
    from scipy.spatial.distance import cdist  # scipy takes a second to import

    distances = cdist(points, points).astype(np.float32)
    sides = weights[:, 0]
    across = -2 * float(np.minimum(sides, 0) @ distances @ np.maximum(sides, 0)) or 1.0

    def energy(weights: Weights) -> Weights:
        signed = weights.astype(np.float32)
        return -np.einsum("ij,ij->j", signed, distances @ signed, dtype=np.float64) / across

    return energy


def _detectable(permuted: Weights, level: float, bound: float) -> float:
    """The smallest effect that is significant with a probability of `POWER`, estimated from the
    moments of the permutation distribution.

    The critical value is a quantile of the Pearson type III distribution with these moments. A
    quantile of the permutations at ``level`` would require more permutations. The effect is assumed
    to have the same standard deviation as without a shift.
    """
    from scipy import stats  # takes seconds to import

    spread = float(permuted.std())
    if spread < _ROUNDING:
        return bound
    skew: Any = stats.skew(permuted)
    critical: Any = stats.pearson3.isf(level, max(0.0, float(skew)), permuted.mean(), spread)
    return max(bound, float(critical) + float(stats.norm.ppf(POWER)) * spread)


GAPS_S = (0.0, *(float(2**power) for power in range(13)))
"""The gaps in seconds that are tried. The gaps double up to 68 minutes."""
GAP_SAMPLE = 2000
_COMPARED = 8
"""Preceding queries of which the nearest counts, because cameras may take turns."""
_ALIKE = 0.9
"""Alike: at most this fraction of the distance to other queries, and significantly so."""
_FALSE_ALARM_RATE = 0.001
"""Probability that the independent queries of a window count as similar. They would then be
discarded, and too few would remain to test for drift. The rate is divided by the number of
comparisons."""
_MIN_CLASS = 10


def independent_queries(live: Queries) -> tuple[Queries, float]:
    """Return a sample without dependent queries, and the smallest gap between its queries in
    seconds. If even the largest gap or too few queries do not suffice, it is that of the last
    gap."""
    rng = np.random.default_rng(0)
    rows = np.arange(len(live)) if len(live) <= GAP_SAMPLE else rng.choice(len(live), GAP_SAMPLE, replace=False)
    live = live.select(rows[np.argsort(live.at_s[rows], kind="stable")])
    gap_s, thinned = 0.0, live
    for gap_s in GAPS_S:
        thinned = live.select(_apart(live.at_s, gap_s))
        if len(thinned) < MIN_QUERIES or not _are_alike(thinned, rng):
            break
    return (live.select(_apart(live.at_s, 2 * gap_s)), 2 * gap_s) if gap_s else (thinned, 0.0)


def _apart(at_s: NDArray[np.float64], gap_s: float) -> NDArray[np.intp]:
    rows: list[int] = []
    last = -np.inf
    for row, time_s in enumerate(at_s.tolist()):
        if time_s - last >= gap_s:
            rows.append(row)
            last = time_s
    return np.array(rows, np.intp)


def _are_alike(queries: Queries, rng: np.random.Generator) -> bool:
    """Whether the queries of any class, or of all classes together, are similar to the queries just
    before them. Queries are compared within classes, because the mix of classes changes with
    time."""
    points = queries.coordinates if queries.coordinates.shape[1] else queries.distances[:, None]
    classes = [
        _nearest(points[own], queries.at_s[own], rng)
        for own in (queries.labels == label for label in np.unique(queries.labels))
    ]
    samples = [*classes, np.concatenate(classes, axis=1)]
    large = [sample for sample in samples if sample.shape[1] >= _MIN_CLASS]
    return any(_differ(before, others, _FALSE_ALARM_RATE / len(large)) for before, others in large)


def _differ(before: Floats, others: Floats, false_alarm_rate: float) -> bool:
    """Whether ``before`` is smaller than ``others`` by `_ALIKE` and in a paired t-test."""
    from scipy.stats import ttest_rel

    if before.mean() > _ALIKE * others.mean():
        return False
    return bool(ttest_rel(before, others, alternative="less").pvalue < false_alarm_rate)


def _nearest(points: Floats, at_s: NDArray[np.float64], rng: np.random.Generator) -> Floats:
    """Distances (2, M) from points in chronological order to the nearest of up to `_COMPARED` other
    points.

    In the first row, each point is compared with the points just before it. In the second row, each
    point is compared with as many points from other times. These are drawn with weights that count
    a burst as one point (Efraimidis and Spirakis 2006, "Weighted random sampling with a
    reservoir"), so that a burst is not mostly compared with itself.
    """
    count = len(points)
    spacing_s = (at_s[-1] - at_s[0]) / (2 * count)
    in_burst = np.searchsorted(at_s, at_s + spacing_s, "right") - np.searchsorted(at_s, at_s - spacing_s, "left")
    drawn = rng.exponential(size=(count, count)) * in_burst
    drawn[np.abs(at_s[:, None] - at_s) <= spacing_s] = np.inf
    order = np.argsort(drawn, axis=1)[:, :_COMPARED]
    available = np.minimum(np.isfinite(drawn).sum(axis=1), np.minimum(np.arange(count), order.shape[1]))
    before, others = np.full((2, count), np.inf, np.float32)
    for number in range(order.shape[1]):
        rows = np.flatnonzero(available > number)
        before[rows] = np.minimum(before[rows], np.linalg.norm(points[rows] - points[rows - number - 1], axis=1))
        drawn_points = points[order[rows, number]]
        others[rows] = np.minimum(others[rows], np.linalg.norm(points[rows] - drawn_points, axis=1))
    return np.stack([before, others])[:, available > 0]
