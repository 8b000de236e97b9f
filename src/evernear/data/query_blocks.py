"""Independent queries among live ones, which come in blocks: the frames of one picture, or a burst of one camera.

Statistical tests assume independent queries, and ten frames of one picture would count as ten. From each block only its
first query counts. A test of such a sample is valid whatever the size of the blocks (Hoffman, Sen and Weinberg 2001,
"Within-cluster resampling").

The log does not say where a block ends. Queries that are at least a gap apart in time are taken, and the gap is the
smallest at which queries that follow each other are not more alike than others of their predicted class. Of independent
queries, all are taken.
"""

import numpy as np
from numpy.typing import NDArray

from evernear.data.drift import MIN_QUERIES, Floats, Queries

GAPS_S = (0.0, *(float(2**power) for power in range(13)))
"""The gaps in seconds that are tried: up to 68 minutes."""
SAMPLE = 2000
"""Queries that are looked at."""
_PREDECESSORS = 5
"""Queries of the same class before a query, of which the nearest counts. Cameras may take turns."""
_SHUFFLES = 100
_ALIKE = 0.9
"""Queries are alike if the distance to the nearest predecessor is at most this share of the expected distance."""


def independent_queries(live: Queries, seed: int = 0) -> tuple[Queries, float]:
    """The sample without dependent queries, and the gap between two queries in seconds.

    If even the largest gap leaves queries that are alike, or too few to say, the sample of the last gap is returned.
    """
    rng = np.random.default_rng(seed)
    rows = np.arange(len(live)) if len(live) <= SAMPLE else rng.choice(len(live), SAMPLE, replace=False)
    live = live.select(rows[np.argsort(live.at_s[rows], kind="stable")])
    gap_s, thinned = 0.0, live
    for gap_s in GAPS_S:
        thinned = live.select(_apart(live.at_s, gap_s))
        if len(thinned) < MIN_QUERIES or not _are_alike(thinned, rng):
            break
    return thinned, gap_s


def _apart(at_s: NDArray[np.float64], gap_s: float) -> NDArray[np.intp]:
    """Rows, in the order of time, at least ``gap_s`` apart."""
    rows: list[int] = []
    last = -np.inf
    for row, time_s in enumerate(at_s.tolist()):
        if time_s - last >= gap_s:
            rows.append(row)
            last = time_s
    return np.array(rows, np.intp)


def _are_alike(queries: Queries, rng: np.random.Generator) -> bool:
    """Whether queries are more like those shortly before them than like others of their class.

    The order of time is compared with random orders. Within classes, because the mix of classes changes with time.
    """
    points = queries.coordinates if queries.coordinates.shape[1] else queries.distances[:, None]
    labels = queries.labels if queries.labels is not None else np.zeros(len(queries), "U1")
    actual, shuffled = 0.0, np.zeros(_SHUFFLES)
    for label in np.unique(labels):
        own = points[labels == label]
        if len(own) < 2:
            continue
        orders = np.stack([np.arange(len(own)), *(rng.permutation(len(own)) for _ in range(_SHUFFLES))])
        sums = _nearest_predecessors(own, orders)
        actual += float(sums[0])
        shuffled += sums[1:]
    return actual < _ALIKE * shuffled.mean() and int((shuffled <= actual).sum()) < 0.05 * _SHUFFLES


def _nearest_predecessors(points: Floats, orders: NDArray[np.intp]) -> NDArray[np.float64]:
    """For each order (S, N) of ``points``, the sum of the distances to the nearest of the `_PREDECESSORS` before."""
    squares = (points**2).sum(axis=1)
    distances = np.sqrt(np.maximum(0.0, squares[:, None] + squares - 2 * points @ points.T))
    nearest = np.full(orders.shape, np.inf)
    for lag in range(1, min(_PREDECESSORS, orders.shape[1] - 1) + 1):
        own = distances[orders[:, lag:], orders[:, :-lag]]
        nearest[:, lag:] = np.minimum(nearest[:, lag:], own)
    return nearest[:, 1:].sum(axis=1)
