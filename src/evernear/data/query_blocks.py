"""Select independent queries from live queries. Live queries arrive in blocks, such as the frames
of one scene or a burst from one camera.

Statistical tests assume independent queries. Without this selection, ten frames of one scene would
count as ten queries. Therefore, only the first query of each block is used. A test with such a
sample is valid for any block size (Hoffman, Sen and Weinberg 2001, "Within-cluster resampling").

The log does not show where a block ends, so the selected queries are at least a certain gap in time
apart. The smallest sufficient gap is the gap at which queries are no more similar to the queries
just before them than to other queries of the same predicted class. The selection uses twice this
gap, because the test does not notice a few pairs from the same block at the smallest gap. If all
queries are independent, all queries are selected.
"""

import numpy as np
from numpy.typing import NDArray

from evernear.data.drift import MIN_QUERIES, Floats, Queries

GAPS_S = (0.0, *(float(2**power) for power in range(13)))
"""The gaps in seconds that are tried. The gaps double up to 68 minutes."""
SAMPLE = 2000
_COMPARED = 8
"""Preceding queries of which the nearest counts, because cameras may take turns."""
_ALIKE = 0.9
"""Alike: at most this fraction of the distance to other queries, and significantly so."""
_FALSE_ALARM_RATE = 0.001
"""Probability that the independent queries of a window count as similar. They would then be
discarded, and too few would remain to test for drift. The rate is divided by the number of
comparisons."""
_MIN_CLASS = 10


def independent_queries(live: Queries, seed: int = 0) -> tuple[Queries, float]:
    """Return a sample without dependent queries, and the minimum gap between its queries in
    seconds. If queries are still similar at the largest gap, or if too few queries remain for the
    comparison, the sample for the last gap is returned."""
    rng = np.random.default_rng(seed)
    rows = np.arange(len(live)) if len(live) <= SAMPLE else rng.choice(len(live), SAMPLE, replace=False)
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
