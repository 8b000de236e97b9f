"""Drift of live queries from the champion's reference: three two-sample tests, each with an effect size.

A p-value shows that two samples differ, not that the difference matters: with enough queries any difference is
significant. Drift is therefore reported if the effect is at least a bound *and* the p-value is at most its share of the
false alarm rate (Bonferroni). If live queries are independent draws from the reference distribution, a measurement
raises a false alarm at most at that rate. The bounds only lower it. Queries that come in bursts (one camera, one hour)
are not independent; then the bounds limit false alarms, not the p-values.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.spatial.distance import cdist

Measure = Literal["unknown_rise", "distance_shift", "embedding_shift"]
Floats = NDArray[np.float32]

SAMPLE = 500
"""Points per side in the energy test. Its distance matrix then takes 4 MB."""


@dataclass(frozen=True)
class Queries:
    """Queries of one release: ``unknown`` of ``total``, and the distances and coordinates of a sample."""

    total: int
    unknown: int
    distances: Floats
    """L2 distance to the nearest gallery image, (N,)."""
    coordinates: Floats
    """Projected embeddings, (N, D); D is 0 if the release has no projection."""

    @property
    def unknown_rate(self) -> float:
        """The proportion of unknown images."""
        return self.unknown / self.total if self.total else 0.0


@dataclass(frozen=True)
class Shift:
    """One measure of drift."""

    measure: Measure
    effect: float
    bound: float
    p: float
    level: float

    @property
    def detected(self) -> bool:
        """Whether the effect is large enough and significant."""
        return self.effect >= self.bound and self.p <= self.level


def measure_drift(
    reference: Queries, live: Queries, bounds: dict[Measure, float], false_alarm_rate: float, seed: int = 0
) -> list[Shift]:
    """Compare ``live`` with ``reference`` by each measure of ``bounds``.

    The embeddings are skipped if one side has none. ``seed`` chooses the energy test's sample and permutations.
    """
    level = false_alarm_rate / len(bounds)
    shifts: list[Shift] = []
    for measure, bound in bounds.items():
        if measure == "unknown_rise":
            effect, p = unknown_rise(reference, live)
        elif measure == "distance_shift":
            effect, p = distance_shift(reference.distances, live.distances)
        elif reference.coordinates.shape[1] != live.coordinates.shape[1] or not live.coordinates.shape[1]:
            continue
        else:
            # One more than needed: 1 / (1 / level) may be rounded to above ``level``, which no p-value would reach.
            effect, p = embedding_shift(reference.coordinates, live.coordinates, math.ceil(1 / level), seed)
        shifts.append(Shift(measure, effect, bound, p, level))
    return shifts


def unknown_rise(reference: Queries, live: Queries) -> tuple[float, float]:
    """The increase of the unknown rate, and Fisher's exact one-sided p-value.

    The exact test is conservative: with few unknown images it rejects more rarely than its level.
    """
    table = [[live.unknown, live.total - live.unknown], [reference.unknown, reference.total - reference.unknown]]
    result: Any = stats.fisher_exact(table, alternative="greater")
    return live.unknown_rate - reference.unknown_rate, float(result.pvalue)


def distance_shift(reference: Floats, live: Floats) -> tuple[float, float]:
    """Kolmogorov-Smirnov distance of two samples (largest gap of their distribution functions), and its p-value.

    The p-value is asymptotic (Hodges 1958); for samples of 100 and more it is accurate or slightly too large.
    """
    result: Any = stats.ks_2samp(reference, live, method="asymp")
    return float(result.statistic), float(result.pvalue)


def embedding_shift(reference: Floats, live: Floats, permutations: int, seed: int = 0) -> tuple[float, float]:
    """Energy coefficient of two samples of points, and its permutation p-value.

    With X, X' of one and Y, Y' of the other, E = 2 E|X-Y| - E|X-X'| - E|Y-Y'| is zero only if both have one
    distribution, and H = E / 2 E|X-Y| lies between 0 and 1 (Szekely and Rizzo 2013, "Energy statistics"). Of two
    finite samples of one distribution it is about 2 / `SAMPLE`. The p-value is (1 + permutations at least as large)
    / (1 + all permutations), which is exact (Phipson and Smyth 2010).
    """
    rng = np.random.default_rng(seed)
    first, second = _draw(reference, rng), _draw(live, rng)
    points = np.concatenate([first, second])
    distances = cdist(points, points).astype(np.float32)
    sides = np.zeros((len(points), permutations + 1), np.float32)
    sides[: len(first), 0] = 1
    for column in range(1, permutations + 1):
        sides[rng.permutation(len(points))[: len(first)], column] = 1
    energies, across = _energies(distances, sides, len(first))
    # Rounding must not make a permutation with the same two sides look smaller.
    count = int((energies[1:] >= energies[0] - 1e-6 * across[0]).sum())
    return float(energies[0] / across[0]) if across[0] else 0.0, (1 + count) / (1 + permutations)


def _draw(points: Floats, rng: np.random.Generator) -> Floats:
    return points if len(points) <= SAMPLE else points[rng.choice(len(points), SAMPLE, replace=False)]


def _energies(distances: Floats, sides: Floats, first: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """E and 2 E|X-Y| of each column of ``sides``, which has 1 for the ``first`` points, of X, and 0 for Y's."""
    second = len(distances) - first
    within_first = np.einsum("ij,ij->j", sides, distances @ sides, dtype=np.float64)
    rows = distances.sum(axis=1, dtype=np.float64)
    across = rows @ sides - within_first
    within_second = rows.sum() - 2 * across - within_first
    mean_across = 2 * across / (first * second)
    return mean_across - within_first / first**2 - within_second / second**2, mean_across
