"""Measure the drift of live queries from the champion's reference. Three two-sample tests are used,
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
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Measure = Literal["unknown_rise", "distance_shift", "embedding_shift"]
Floats = NDArray[np.float32]
Weights = NDArray[np.float64]
_Statistic = Callable[[Weights], Weights]

SAMPLE = 500
"""Live queries in one test. With 1,000 reference queries, the distances take 9 MB."""
MIN_QUERIES = 20
"""Minimum number of independent live queries, and also of reference queries, in one test."""
POWER = 0.9
_MIN_SHARED = 5
"""Fewest reference queries in a stratum with classes that have no reference query."""
_BATCH = 400
"""Permutations after which the test checks whether p-values can still become small enough."""


@dataclass(frozen=True)
class Queries:
    """Queries of one release. Among the ``total`` queries, ``unknown`` queries show unknown images.
    The arrays contain the predictions for a sample of N queries."""

    total: int
    unknown: int
    distances: Floats
    """L2 distance to the nearest gallery image, (N,)."""
    coordinates: Floats
    """Projected embeddings (N, D). D is 0 if the release has no projection."""
    is_unknown: NDArray[np.bool_]
    at_s: NDArray[np.float64]
    """Arrival times in Unix time, (N,), or zeros in a reference."""
    labels: NDArray[np.str_]

    @property
    def unknown_rate(self) -> float:
        return self.unknown / self.total if self.total else 0.0

    def __len__(self) -> int:
        return len(self.distances)

    def select(self, rows: NDArray[np.intp]) -> "Queries":
        return Queries(
            self.total,
            self.unknown,
            self.distances[rows],
            self.coordinates[rows],
            self.is_unknown[rows],
            self.at_s[rows],
            self.labels[rows],
        )


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
    strata = _Strata.of(reference, live)
    statistics = _statistics(reference, live, strata.weights())
    level = false_alarm_rate / len(bounds)
    measures: list[Measure] = [measure for measure in bounds if measure in statistics]
    observed, null = _permute(strata, [statistics[measure] for measure in measures], level, rng)
    shifts: list[Shift] = []
    for measure, effect, permuted in zip(measures, observed, null, strict=True):
        p = (1 + int((permuted >= effect - _ROUNDING).sum())) / (1 + len(permuted))
        shifts.append(Shift(measure, effect, bounds[measure], p, level, _detectable(permuted, level, bounds[measure])))
    return shifts


_ROUNDING = 1e-6
"""Tolerance for rounding errors. Without this tolerance, a permutation that leaves the two sides
unchanged could have a smaller effect."""


@dataclass(frozen=True)
class _Strata:
    """A pooled sample, reference first. ``order`` sorts it by class; ``ends`` are the classes'
    ends."""

    is_live: NDArray[np.bool_]
    order: NDArray[np.intp]
    ends: list[int]

    @staticmethod
    def of(reference: Queries, live: Queries) -> "_Strata":
        is_live = np.repeat([False, True], [len(reference), len(live)])
        _, classes = np.unique(np.concatenate([reference.labels, live.labels]), return_inverse=True)
        classes = _without_empty(classes, is_live)
        order = np.argsort(classes, kind="stable")
        return _Strata(is_live, order, np.cumsum(np.unique(classes, return_counts=True)[1]).tolist())

    def weights(self, permutations: int = 0, rng: np.random.Generator | None = None) -> Weights:
        """Return signed weights of shape (N, ``permutations``) for the pooled sample, for
        permutations within the classes.

        Each live query weighs 1/n. Reference queries have negative weights, so that the weights of
        each class add up to zero. If ``rng`` is None, return the weights of the actual sides, with
        shape (N, 1).
        """
        total = int(self.is_live.sum())
        weights = np.zeros((len(self.order), permutations if rng else 1))
        for start, end in zip([0, *self.ends], self.ends, strict=False):
            rows = self.order[start:end]
            live = int(self.is_live[rows].sum())
            if not live:
                continue
            signed = np.where(self.is_live[rows], 1 / total, -live / total / max(1, len(rows) - live))
            if rng:
                weights[rows] = rng.permuted(np.repeat(signed[:, None], permutations, axis=1), axis=0)
            else:
                weights[rows, 0] = signed
        return weights


def _without_empty(classes: NDArray[np.intp], is_live: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Merge classes without a reference query with the rarest others, up to `_MIN_SHARED`."""
    counts = np.bincount(classes[~is_live], minlength=int(classes.max()) + 1)
    if counts.min():
        return classes
    rarest = np.argsort(counts, kind="stable")
    last = int(np.searchsorted(np.cumsum(counts[rarest]), _MIN_SHARED))
    return np.where(np.isin(classes, rarest[: last + 1]), rarest[0], classes)


def _statistics(reference: Queries, live: Queries, weights: Weights) -> dict[Measure, _Statistic]:
    """Functions that map signed weights of shape (N, P) to statistics of shape (P,). ``weights``
    contains the weights of the actual sides, before any permutation."""
    statistics: dict[Measure, _Statistic] = {
        "unknown_rise": unknown_rise(np.concatenate([reference.is_unknown, live.is_unknown])),
        "distance_shift": distance_shift(np.concatenate([reference.distances, live.distances])),
    }
    if reference.coordinates.shape[1] == live.coordinates.shape[1] and live.coordinates.shape[1]:
        points = np.concatenate([reference.coordinates, live.coordinates])
        statistics["embedding_shift"] = embedding_shift(points, weights)
    return statistics


def unknown_rise(is_unknown: NDArray[np.bool_]) -> _Statistic:
    """The increase in the unknown rate, after direct standardization to the live class mix."""
    return lambda weights: is_unknown @ weights


def distance_shift(distances: Floats) -> _Statistic:
    """The Kolmogorov-Smirnov distance: the largest gap between two distribution functions."""
    order = np.argsort(distances, kind="stable")
    is_last = np.append(np.diff(distances[order]) > 0, True)  # the last of equal distances
    return lambda weights: np.abs(np.cumsum(weights[order], axis=0)[is_last]).max(axis=0)


def embedding_shift(points: Floats, weights: Weights) -> _Statistic:
    """The energy coefficient of two samples, which are subsets of ``points``.

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


def _permute(
    strata: _Strata, statistics: list[_Statistic], level: float, rng: np.random.Generator
) -> tuple[list[float], list[Weights]]:
    """Return the statistics of the actual sides and of the permutations (Phipson and Smyth 2010).
    The test stops early when no p-value can reach ``level`` anymore (Besag and Clifford 1991).
    Stopping early does not change any decision."""
    observed = [float(statistic(strata.weights())[0]) for statistic in statistics]
    null: list[list[Weights]] = [[] for _ in statistics]
    # One more permutation than necessary is made, because rounding may move 1 / (1 / level) above
    # ``level``. No p-value could then reach the level.
    wanted = max(_BATCH, math.ceil(1 / level))
    exceeding = np.zeros(len(statistics), int)
    done = 0
    while done < wanted and (not done or (exceeding.min() + 1) / (wanted + 1) <= level):
        weights = strata.weights(min(_BATCH, wanted - done), rng)
        for number, statistic in enumerate(statistics):
            null[number].append(statistic(weights))
            exceeding[number] += int((null[number][-1] >= observed[number] - _ROUNDING).sum())
        done += weights.shape[1]
    return observed, [np.concatenate(parts) for parts in null]


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
