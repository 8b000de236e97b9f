"""Measure the drift of live queries from the champion's reference with three two-sample
tests, each of which has an effect size.

A p-value shows that two samples differ, not that the difference matters. With enough
queries, any difference is significant. Drift is therefore reported only if the effect
reaches a bound *and* the p-value is at most its share of the false alarm rate
(Bonferroni).

The class mix of live queries changes with the hour and the weekday. Such changes are
not drift. Each test therefore compares the queries with a reference that has the same
mix of predicted classes. Reference queries are weighted, and the permutations behind
the p-values exchange queries only within a class (a stratified permutation test). If
the live queries of a class are independent draws from the reference's distribution of
this class, the p-values are exact for any mix, and the rate of false alarms is at most
the stated rate. `evernear.data.query_blocks` removes dependent queries first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.spatial.distance import cdist

Measure = Literal["unknown_rise", "distance_shift", "embedding_shift"]
Floats = NDArray[np.float32]
Weights = NDArray[np.float64]
_Statistic = Callable[[Weights], Weights]

SAMPLE = 500
"""Number of live queries in a test. With 1,000 reference queries the matrix of
distances then takes 9 MB.
"""
MIN_QUERIES = 20
"""Minimum number of independent live queries, and of reference queries, for a test."""
POWER = 0.9
_MIN_SHARED = 5
"""Minimum number of reference queries that share a stratum with classes without any."""
_BATCH = 400
"""Number of permutations between checks whether the p-values can still become small
enough.
"""


@dataclass(frozen=True)
class Queries:
    """Queries of one release. ``unknown`` of the ``total`` queries are unknown images.
    The arrays hold the predictions for a sample of N queries.
    """

    total: int
    unknown: int
    distances: Floats
    """L2 distance to the nearest gallery image, (N,)."""
    coordinates: Floats
    """Projected embeddings, (N, D); D is 0 if the release has no projection."""
    is_unknown: NDArray[np.bool_]
    """Whether each query of the sample is unknown, (N,)."""
    at_s: NDArray[np.float64]
    """Unix times, (N,), or zeros in a reference."""
    labels: NDArray[np.str_] | None = None
    """Predicted classes, (N,), or None for the reference of a release that an earlier
    version of evernear archived.
    """

    @property
    def unknown_rate(self) -> float:
        """The proportion of unknown images."""
        return self.unknown / self.total if self.total else 0.0

    def __len__(self) -> int:
        """The size of the sample."""
        return len(self.distances)

    def select(self, rows: NDArray[np.intp]) -> "Queries":
        """Return the same queries with the ``rows`` of this sample as the sample."""
        return Queries(
            self.total,
            self.unknown,
            self.distances[rows],
            self.coordinates[rows],
            self.is_unknown[rows],
            self.at_s[rows],
            None if self.labels is None else self.labels[rows],
        )


@dataclass(frozen=True)
class Shift:
    """One measure of drift."""

    measure: Measure
    effect: float
    bound: float
    p: float
    level: float
    detectable: float
    """The smallest effect that samples of this size detect with a probability of
    `POWER`.
    """

    @property
    def detected(self) -> bool:
        """Whether the effect reaches the bound and is significant."""
        return self.effect >= self.bound and self.p <= self.level


def measure_drift(
    reference: Queries, live: Queries, bounds: dict[Measure, float], false_alarm_rate: float, seed: int = 0
) -> list[Shift]:
    """Compare ``live`` with ``reference`` by each measure in ``bounds``.

    The embeddings are skipped if either side has none. The result is empty if either
    side has fewer than `MIN_QUERIES`. ``seed`` chooses the sample and the permutations.
    """
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
"""Tolerance, so that rounding does not make a permutation with the same two sides look
smaller.
"""


@dataclass(frozen=True)
class _Strata:
    """The classes of a pooled sample, in which the reference comes first. ``order``
    sorts the sample by class, and ``ends`` are the ends of the classes.
    """

    is_live: NDArray[np.bool_]
    order: NDArray[np.intp]
    ends: list[int]

    @staticmethod
    def of(reference: Queries, live: Queries) -> "_Strata":
        is_live = np.repeat([False, True], [len(reference), len(live)])
        classes = np.zeros(len(is_live), np.intp)
        if reference.labels is not None and live.labels is not None:
            _, classes = np.unique(np.concatenate([reference.labels, live.labels]), return_inverse=True)
            classes = _without_empty(classes, is_live)
        order = np.argsort(classes, kind="stable")
        return _Strata(is_live, order, np.cumsum(np.unique(classes, return_counts=True)[1]).tolist())

    def weights(self, permutations: int = 0, rng: np.random.Generator | None = None) -> Weights:
        """Return signed weights of the pooled sample, (N, ``permutations``), for
        permutations within the classes.

        Each live query weighs 1/n. Reference queries have negative weights, so that
        each class sums to zero. Without ``rng``, return the weights of the actual
        sides, (N, 1).
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
    """Merge the classes without a reference query with the rarest other classes, until
    the merged classes have `_MIN_SHARED` reference queries.
    """
    counts = np.bincount(classes[~is_live], minlength=int(classes.max()) + 1)
    if counts.min():
        return classes
    rarest = np.argsort(counts, kind="stable")
    last = int(np.searchsorted(np.cumsum(counts[rarest]), _MIN_SHARED))
    return np.where(np.isin(classes, rarest[: last + 1]), rarest[0], classes)


def _statistics(reference: Queries, live: Queries, weights: Weights) -> dict[Measure, _Statistic]:
    """Functions that map signed weights (N, P) to statistics (P,). ``weights`` are the
    weights of the actual sides.
    """
    statistics: dict[Measure, _Statistic] = {
        "unknown_rise": unknown_rise(np.concatenate([reference.is_unknown, live.is_unknown])),
        "distance_shift": distance_shift(np.concatenate([reference.distances, live.distances])),
    }
    if reference.coordinates.shape[1] == live.coordinates.shape[1] and live.coordinates.shape[1]:
        points = np.concatenate([reference.coordinates, live.coordinates])
        statistics["embedding_shift"] = embedding_shift(points, weights)
    return statistics


def unknown_rise(is_unknown: NDArray[np.bool_]) -> _Statistic:
    """The increase in the unknown rate, directly standardized to the live class mix."""
    return lambda weights: is_unknown @ weights


def distance_shift(distances: Floats) -> _Statistic:
    """Kolmogorov-Smirnov distance: the largest gap between the two distribution
    functions.
    """
    order = np.argsort(distances, kind="stable")
    is_last = np.append(np.diff(distances[order]) > 0, True)  # the last of equal distances
    return lambda weights: np.abs(np.cumsum(weights[order], axis=0)[is_last]).max(axis=0)


def embedding_shift(points: Floats, weights: Weights) -> _Statistic:
    """Energy coefficient of two samples of ``points``.

    With X, X' from one sample and Y, Y' from the other, E = 2 E|X-Y| - E|X-X'| -
    E|Y-Y'| is zero only if both samples have the same distribution, and H = E / 2
    E|X-Y| lies between 0 and 1 (Szekely and Rizzo 2013, "Energy statistics"). With
    signed weights u that sum to zero, E = -u'Du. For two finite samples of sizes n and
    m from one distribution, H is about 1/n + 1/m. The denominator is computed from the
    actual sides, ``weights``.
    """
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
    """Return the statistics of the actual sides, and the statistics of the permutations
    (Phipson and Smyth 2010).

    The test stops early when no p-value can reach ``level`` anymore (Besag and Clifford
    1991), which changes no decision.
    """
    observed = [float(statistic(strata.weights())[0]) for statistic in statistics]
    null: list[list[Weights]] = [[] for _ in statistics]
    # One more than needed: 1 / (1 / level) may be rounded to above ``level``,
    # which no p-value would reach.
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
    """The smallest effect that is significant with a probability of `POWER`, from the
    moments of the permutation distribution.

    The critical value is a quantile of the Pearson type III distribution with these
    moments, because a quantile as far out as ``level`` would need more permutations.
    The effect's spread is assumed to be as large as without a shift.
    """
    spread = float(permuted.std())
    if spread < _ROUNDING:
        return bound
    skew: Any = stats.skew(permuted)
    critical: Any = stats.pearson3.isf(level, max(0.0, float(skew)), permuted.mean(), spread)
    return max(bound, float(critical) + float(stats.norm.ppf(POWER)) * spread)
