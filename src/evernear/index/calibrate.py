"""The open-set threshold: the distance beyond which an image is unknown."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evernear.common.output import quantity
from evernear.data.shards import Dataset
from evernear.embedding.embeddings import EmbeddingBlock
from evernear.errors import DataError
from evernear.index.description import DISTANCE_TOLERANCE, MAX_DISTANCE, Calibration
from evernear.index.vectors import ExactNeighbors, Floats, VectorIndex
from evernear.settings import IndexSettings

ROUNDING = 1e-5
"""Squared distances of float32 unit vectors that differ by less are equal (observed: 1e-6)."""
EQUAL = 1e-6
"""A float32 threshold cannot separate distances that differ by less."""
MARGIN = 2 * DISTANCE_TOLERANCE
"""Maximum difference between a threshold and one of the two distances that it separates. In the
middle of a wide gap, it would accept unknown images that are farther than any known image."""


def calibrate(
    queries: EmbeddingBlock,
    exact: ExactNeighbors,
    index: VectorIndex,
    settings: IndexSettings,
    threshold: float | None = None,
    relative_threshold: float | None = None,
) -> Calibration:
    """Set the threshold, and measure its effect on ``queries``, neither trained nor tested on.

    ``relative_threshold`` is that of `evernear.evaluation.probe`, as a multiple of `unit_of` its
    known images. With the unit of ``queries``, it becomes a distance of this network, which was
    trained longer than the probe's (`threshold_of`). ``threshold`` is that of a frozen backbone's
    probe, or of a release whose network is reused, and does not change.

    If there are too few classes for a probe, both are None, and impostors replace it: each query
    counts as unknown once, at the distance to the nearest vector of a *different* class. The
    threshold accepts ``settings.false_accept_rate`` of these distances. If it would reject more
    than ``settings.false_reject_rate`` of the queries, it is raised, because known images take
    precedence. Impostors underestimate the false-accept rate for unseen classes, because a network
    separates the classes that it was trained on. With a specified rate of 5%, the measured rate was
    70% in the draws of digits, and 56% and 5% on MNIST.

    Impostor distances are exact for every index type. An approximate search that starts within a
    query's own class would find no impostor, so the threshold would be too large.
    """
    impostor_distances = _root(exact.squared_to_others)
    if not np.isfinite(impostor_distances).all():
        raise DataError("The gallery has only one class, so no query has an impostor; raise data.gallery_fraction.")
    nearest, rows = index.search(queries.embeddings, 1)
    distances = nearest[:, 0]
    found_by = "impostors" if threshold is None and relative_threshold is None else "unseen classes"
    if relative_threshold is not None:
        threshold = threshold_of(distances, relative_threshold, settings.false_reject_rate)
    elif threshold is None:
        threshold = max(
            threshold_at(impostor_distances, settings.false_accept_rate),
            threshold_rejecting(distances, settings.false_reject_rate),
        )
    return Calibration(
        found_by=found_by,
        queries=len(distances),
        stated_false_accept_rate=settings.false_accept_rate,
        stated_false_reject_rate=settings.false_reject_rate,
        threshold=float(np.clip(threshold, 0, MAX_DISTANCE)),
        false_accepts=int((impostor_distances <= threshold).sum()),
        false_rejects=int((distances > threshold).sum()),
        nearest_found=int(is_nearest(rows[:, 0], distances, exact).sum()),
    )


def threshold_of(known_distances: Floats, relative_threshold: float, false_reject_rate: float) -> float:
    """The threshold of a network with ``known_distances`` (N,) of query images, N >= 1.

    It is raised if it would reject more than ``false_reject_rate`` of new known images, according
    to `threshold_rejecting`, unless there are too few query images for its rank.
    """
    threshold = between(known_distances, relative_threshold * unit_of(known_distances))
    if (len(known_distances) + 1) * false_reject_rate < 1:
        return threshold
    return max(threshold, threshold_rejecting(known_distances, false_reject_rate))


def unit_of(distances: Floats) -> float:
    """The unit of a relative threshold: the square root of the median distance (N,) of known
    images.

    The threshold of a release is then the geometric mean of the probe's threshold and of the same
    multiple of the median. Distances of known images differ more between two networks than those of
    unseen ones, so a multiple of the median alone accepted 40% of unseen digits where the probe had
    measured 0% (docs/decisions/0008-unknown-images.md). The median is at least a rounding error, so
    that its root can divide.
    """
    return math.sqrt(max(float(np.median(distances)), DISTANCE_TOLERANCE))


def between(distances: Floats, threshold: float) -> float:
    """``threshold``, moved away from the nearest of ``distances`` (N,), N >= 1, if rounding would
    otherwise decide whether that image is unknown."""
    ascending = np.sort(distances)
    nearest = int(np.abs(ascending - threshold).argmin())
    if abs(ascending[nearest] - threshold) >= MARGIN:
        return threshold
    if ascending[nearest] <= threshold:
        return _beyond_first(ascending[nearest:])
    return -_beyond_first(-ascending[nearest::-1])


def is_nearest(rows: NDArray[np.int64], distances: Floats, exact: ExactNeighbors) -> NDArray[np.bool_]:
    """For each of N queries, whether an index found the nearest vector or another at the same
    distance, because a gallery may contain an image twice."""
    return (rows == exact.rows) | (np.abs(distances**2 - exact.squared) <= ROUNDING)


def threshold_at(unknown_distances: Floats, false_accept_rate: float) -> float:
    """A threshold that accepts at most ``false_accept_rate`` of ``unknown_distances`` (N,), N >= 1.

    It accepts as many as possible, fewer if distances are equal, and none if N is less than 1 /
    ``false_accept_rate``. It is halfway between the last accepted and the first rejected distance,
    but within `MARGIN` of the latter.
    """
    allowed = int(np.floor(false_accept_rate * len(unknown_distances)))
    descending = np.sort(unknown_distances)[allowed::-1]
    return -_beyond_first(-descending)


def threshold_rejecting(known_distances: Floats, false_reject_rate: float) -> float:
    """A threshold on ``known_distances`` (N,), N >= 1, beyond which ``false_reject_rate`` of *new*
    images lie.

    It is the distance of rank (N + 1) (1 - ``false_reject_rate``), interpolated (Hyndman and Fan
    1996, type 6). A new image that is exchangeable with the known ones exceeds the one of rank r
    with probability 1 - r / (N + 1). If N is less than 1 / ``false_reject_rate`` - 1, no rank is
    high enough, and the largest distance is used. The next higher rank, as in split conformal
    prediction, would be the largest of up to 38 distances at 5%: in draws of digits, it rejected 2%
    of known images and accepted 40% of unseen ones, the interpolated rank 4% and 28%.
    """
    return between(known_distances, float(np.quantile(known_distances, 1 - false_reject_rate, method="weibull")))


def _beyond_first(ascending: Floats) -> float:
    """A number beyond the first of ``ascending`` (N,), N >= 1, and all distances that are `EQUAL`
    to it, but below the next distance."""
    gaps = np.diff(ascending.astype(np.float64), append=np.inf)
    last = int(np.argmax(gaps > EQUAL))
    return float(ascending[last] + min(gaps[last] / 2, MARGIN))


def _root(squared: Floats) -> Floats:
    return np.sqrt(np.maximum(squared, 0)).astype(np.float32)


def calibration_gaps(dataset: Dataset, known_labels: Sequence[str], seen_queries: int) -> str:
    """The end of a sentence that lists classes of ``dataset`` without a query image, and the number
    of queries whose group is also in train or gallery (``seen_queries``)."""
    counts = dataset.manifest.label_counts("query")
    unqueried = sum(not counts.get(label) for label in known_labels)
    gaps = f"; calibrated without query images of {quantity(unqueried, 'class', 'classes')}" if unqueried else ""
    if seen_queries == 0:
        return gaps
    if seen_queries == dataset.count("query"):
        return (
            f"{gaps}; every query image is of a group that is in train or gallery as well, so images of new groups "
            "will be called unknown more often"
        )
    seen = quantity(seen_queries, "query image")
    return f"{gaps}; calibrated without {seen} of groups that are in train or gallery as well"
