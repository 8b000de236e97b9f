"""Choose the threshold for unknown images from the draws of the open-set probe, and measure its
effect."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import (
    CONFIDENCE,
    Auroc,
    Clusters,
    Interval,
    Placements,
    Proportion,
    auroc_interval,
    effective_images,
    effective_totals,
    expected_share,
    false_accepts_at,
    place,
    proportion,
    roc,
    spread_of_mean,
    sum_of_spreads,
)
from evernear.index.calibrate import threshold_at, threshold_of, unit_of
from evernear.index.description import MAX_DISTANCE
from evernear.settings import IndexSettings

Distances = NDArray[np.float32]
MOST_ACCEPTED = 0.9
"""Share of images of unseen classes above which a threshold is no use."""


class Sample(NamedTuple):
    """Images from one split in one draw, either all of known classes or all of held-out classes."""

    distances: Distances
    """Distance of each image (N,) to the nearest gallery vector."""
    clusterings: tuple[Clusters, ...]
    """The class of each image and, with ``data.group``, its group."""

    @property
    def independent(self) -> float:
        """The number of independent images, estimated by `effective_totals` if they have groups."""
        if len(self.clusterings) == 1:
            return float(len(self.distances))
        return float(effective_totals(np.zeros_like(self.clusterings[-1]), self.clusterings[-1], 1)[0])

    def select(self, mask: NDArray[np.bool_]) -> Self:
        return self._replace(
            distances=self.distances[mask], clusterings=tuple(clusters[mask] for clusters in self.clusterings)
        )


class Added(NamedTuple):
    """Images of the held-out classes that ask after the classes joined the gallery."""

    sample: Sample
    right: NDArray[np.bool_]
    """Whether the label is right (N,)."""


class Draw(NamedTuple):
    """Distances that are measured with one network, which was not trained on the held-out
    classes."""

    known: Sample
    unknown: Sample
    known_for_calibration: Distances
    unknown_for_calibration: Distances
    """Query and gallery images of the held-out classes."""
    added: Added | None = None
    """None if no image of the held-out classes is left to ask with."""

    @property
    def classes(self) -> float:
        """The number of all classes, relative to that of the known ones."""
        known, unknown = (len(np.unique(sample.clusterings[0])) for sample in (self.known, self.unknown))
        return (known + unknown) / known


class Threshold(NamedTuple):
    """A threshold for unknown images, from the query images of all draws. Unless the distances have
    one scale, ``limit``, ``accepting`` and the distances are relative to the unit of their draw."""

    limit: float
    accepting: float
    """The threshold that accepts the stated share of unseen images, whatever it rejects."""
    known: Distances
    unknown: Distances
    units: tuple[float, ...]
    of_draws: tuple[float, ...]
    """The absolute threshold for the network of each draw."""


def assess(draws: Sequence[Draw], settings: IndexSettings, *, one_scale: bool = False) -> OpenSet:
    """Choose the threshold, and measure its effect on the test images of ``draws``.

    If images of unseen classes are not significantly farther away than known ones, or the threshold
    would accept more than `MOST_ACCEPTED` of them, no image is called unknown. ``one_scale``: see
    `choose_threshold`. In the result, ``held_out`` is empty.
    """
    known, unknown = (concatenate(samples) for samples in zip(*(draw[:2] for draw in draws), strict=True))
    auroc, is_farther = _auroc(draws, known, unknown)
    threshold = choose_threshold(draws, settings, one_scale=one_scale)
    accepts_most = is_farther and _accepts_most(draws, threshold)
    separates = is_farther and not accepts_most
    of_draws = threshold.of_draws if separates else (MAX_DISTANCE,) * len(draws)
    limits = list(zip(draws, of_draws, strict=True))
    accepted = np.concatenate([draw.unknown.distances <= limit for draw, limit in limits])
    rejected = np.concatenate([draw.known.distances > limit for draw, limit in limits])
    false_accepts = _share(accepted, unknown.clusterings)
    absolute = threshold.limit if one_scale else None
    return OpenSet(
        held_out=(),
        draws=len(draws),
        auroc=auroc,
        false_accepts_at_95=_false_accepts_at_95(known, unknown),
        roc=roc(known.distances, unknown.distances),
        accepts_most=accepts_most,
        threshold=absolute if separates else MAX_DISTANCE,
        relative_threshold=None if one_scale or not separates else threshold.limit,
        reject_rate=float((threshold.known > threshold.limit).mean()) if separates else None,
        required_reject_rate=float((threshold.known > threshold.accepting).mean()),
        stated_false_accept_rate=settings.false_accept_rate,
        stated_false_reject_rate=settings.false_reject_rate,
        calibrated_known=len(threshold.known),
        calibrated_unknown=len(threshold.unknown),
        false_accepts=_with_spread(false_accepts, draws, threshold, settings) if separates else false_accepts,
        expected_false_accepts=expected_share(false_accepts, float(np.mean([draw.classes for draw in draws]))),
        false_rejects=_share(rejected, known.clusterings),
        added_recognized=_added_recognized(limits),
    )


def choose_threshold(draws: Sequence[Draw], settings: IndexSettings, *, one_scale: bool) -> Threshold:
    """The largest threshold that accepts at most ``settings.false_accept_rate`` of the images of
    unseen classes. If it would reject more than ``settings.false_reject_rate`` of the known images,
    it is raised, because known images take precedence.

    The distances of two trained networks differ, so they are relative to `unit_of` a draw's known
    query images. Those of a frozen backbone have ``one_scale``, also with a head on it, and the
    threshold holds for the release as it is.
    """
    units = [1.0 if one_scale else unit_of(draw.known_for_calibration) for draw in draws]
    known, unknown = (
        np.concatenate([distances / unit for distances, unit in zip(column, units, strict=True)])
        for column in zip(*((draw.known_for_calibration, draw.unknown_for_calibration) for draw in draws), strict=True)
    )
    accepting = threshold_at(unknown, settings.false_accept_rate)
    # `threshold_rejecting` would take the largest distance of few images, which is often an outlier
    sparing_known = float(np.quantile(known, 1 - settings.false_reject_rate, method="lower"))
    limit = max(accepting, sparing_known)
    of_draws = [
        limit if one_scale else threshold_of(draw.known_for_calibration, limit, settings.false_reject_rate)
        for draw in draws
    ]
    return Threshold(limit, accepting, known, unknown, tuple(units), tuple(of_draws))


def _accepts_most(draws: Sequence[Draw], threshold: Threshold) -> bool:
    limits = zip(draws, threshold.of_draws, strict=True)
    accepted = np.concatenate([draw.unknown_for_calibration <= limit for draw, limit in limits])
    return bool(accepted.mean() > MOST_ACCEPTED)


def _auroc(draws: Sequence[Draw], known: Sample, unknown: Sample) -> tuple[Auroc, bool]:
    """The AUROC, and whether images of the held-out classes are significantly farther away. This is
    asked of these classes, while the interval also includes the spread between classes."""
    by_draw = [place(draw.known.distances, draw.unknown.distances) for draw in draws]
    placements = Placements(*(np.concatenate(column) for column in zip(*by_draw, strict=True)))
    known_of_draw = float(np.mean([draw.known.independent for draw in draws]))  # the draws use the same test images
    value, *of_images = auroc_interval(placements, known_of_draw, unknown.independent, CONFIDENCE)
    of_classes = _interval_of_classes(value, placements, known, unknown)
    auroc = Auroc(
        value=value,
        low=min(of_images[0], of_classes[0]),
        high=max(of_images[1], of_classes[1]),
        known=len(known.distances),
        unknown=len(unknown.distances),
    )
    return auroc, of_images[0] > 0.5


def quantile_limits(distances: Distances, images: float, share: float) -> tuple[float, float]:
    """The distances of known images (N,) between which the quantile ``share`` of all such images
    lies, by the binomial distribution of its rank (David and Nagaraja 2003, section 7.1).
    ``images`` is the number of different ones."""
    from scipy.stats import binom

    ranks = binom.interval(CONFIDENCE, round(images), share)
    low, high = np.quantile(distances, [rank / round(images) for rank in ranks], method="lower")
    return float(low), float(high)


def _with_spread(share: Proportion, draws: Sequence[Draw], threshold: Threshold, settings: IndexSettings) -> Proportion:
    """The ``share`` of accepted images with an interval that includes the spread of the threshold,
    which depends on the known images that set it."""
    unknown = zip(draws, threshold.units, strict=True)
    relative = np.concatenate([draw.unknown.distances / unit for draw, unit in unknown])
    images = len(threshold.known) / len(draws)  # the draws use the same query images
    ends = quantile_limits(threshold.known, images, 1 - settings.false_reject_rate)
    low, high = (float((relative <= max(threshold.accepting, end)).mean()) for end in ends)
    value = share.value
    below = math.hypot(value - share.low, value - min(low, value))
    above = math.hypot(share.high - value, max(high, value) - value)
    return share.model_copy(update={"low": max(0.0, value - below), "high": min(1.0, value + above)})


def _added_recognized(limits: Sequence[tuple[Draw, float]]) -> Interval | None:
    """The share of images of added classes that are named right within the threshold of their
    draw."""
    asked = [(draw.added, limit) for draw, limit in limits if draw.added]
    if not asked:
        return None
    recognized = np.concatenate([added.right & (added.sample.distances <= limit) for added, limit in asked])
    return expected_share(_share(recognized, concatenate([added.sample for added, _ in asked]).clusterings))


def _interval_of_classes(value: float, placements: Placements, known: Sample, unknown: Sample) -> tuple[float, float]:
    """Interval limits for the area ``value``. The known and the held-out classes are regarded as
    samples of all classes."""
    from scipy.special import expit, logit

    if not 0 < value < 1:
        return value, value
    half = sum_of_spreads(
        [
            spread_of_mean(placements.known_below, known.clusterings),
            spread_of_mean(placements.beyond_known, unknown.clusterings),
        ]
    ).half_width(CONFIDENCE)
    return float(expit(logit(value) - half)), float(expit(logit(value) + half))


def _false_accepts_at_95(known: Sample, unknown: Sample) -> Interval:
    measured = false_accepts_at(known.distances, unknown.distances, 0.95, CONFIDENCE)
    accepted = unknown.distances <= np.quantile(known.distances, 0.95, method="inverted_cdf")
    of_classes = _share(accepted, unknown.clusterings)
    return measured.model_copy(
        update={"low": min(measured.low, of_classes.low), "high": max(measured.high, of_classes.high)}
    )


def _share(outcomes: NDArray[np.bool_], clusterings: Sequence[Clusters]) -> Proportion:
    """The share of ``outcomes`` (N,) that are true, with an interval that includes the spread
    between classes."""
    effective = effective_images(outcomes, clusterings, CONFIDENCE)
    return proportion(int(outcomes.sum()), len(outcomes), CONFIDENCE, effective)


def concatenate(samples: Sequence[Sample]) -> Sample:
    distances, clusterings = zip(*samples, strict=True)
    return Sample(np.concatenate(distances), tuple(np.concatenate(each) for each in zip(*clusterings, strict=True)))
