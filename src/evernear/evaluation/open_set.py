"""The result of the open-set probe (`evernear.evaluation.probe`)."""

from collections.abc import Mapping

from evernear.common.frozen import Frozen
from evernear.common.output import named, quantity
from evernear.evaluation.statistics import Auroc, Interval, Proportion, Roc, near_any
from evernear.index.description import MAX_DISTANCE

ADDED_IMAGES = 20
"""Images of a class that the probe adds to the gallery, as a reindex would."""

FALSE_ACCEPT_RATE, ADDED_RECOGNIZED = "open_set_false_accept_rate", "added_recognized"
EXPECTED_FALSE_ACCEPTS = "expected_false_accepts"
"""Metrics of a release, each with an interval."""


def stated_false_accepts(metrics: Mapping[str, float]) -> Interval | None:
    """Share of images of unseen classes that a release accepts. None if it was not measured."""
    return _stated(metrics, FALSE_ACCEPT_RATE)


def stated_added_recognized(metrics: Mapping[str, float]) -> Interval | None:
    """`OpenSet.added_recognized` of a release, which holds for its reindexes."""
    return _stated(metrics, ADDED_RECOGNIZED)


def expected_by_more_classes(metrics: Mapping[str, float], classes: float) -> Interval | None:
    """`OpenSet.expected_false_accepts` of a release, after a reindex with ``classes`` times as many
    classes, each of which accepts images."""
    stated = _stated(metrics, EXPECTED_FALSE_ACCEPTS)
    return near_any(stated, classes) if stated else None


def _stated(metrics: Mapping[str, float], name: str) -> Interval | None:
    value, low, high = (metrics.get(f"{name}{suffix}") for suffix in ("", "_low", "_high"))
    return None if value is None or low is None or high is None else Interval(value=value, low=low, high=high)


class OpenSet(Frozen):
    """If there are too few classes to hold any out, ``held_out`` is empty and all figures are None.
    At most one of ``threshold`` and ``relative_threshold`` is set, and determines the release's
    threshold.
    """

    held_out: tuple[str, ...]
    """The classes that were held out in at least one draw."""
    draws: int = 0
    """Number of probed networks, each trained without other classes."""
    auroc: Auroc | None = None
    false_accepts_at_95: Interval | None = None
    """Share of test images of held-out classes that are accepted at the threshold that accepts 95%
    of the known images (FPR at 95% TPR)."""
    roc: Roc | None = None
    accepts_most: bool = False
    """Whether unknown is off because a threshold that spares the known images would accept most
    images of held-out classes, although these are significantly farther away."""
    threshold: float | None = None
    """The threshold of a frozen backbone, or of the release whose network is reused, or
    `evernear.index.description.MAX_DISTANCE` if the distances do not separate unseen classes."""
    relative_threshold: float | None = None
    """The threshold as a multiple of `evernear.index.calibrate.unit_of` known query images, so that
    it holds for another trained network."""
    reject_rate: float | None = None
    """Share of known query images that this threshold rejects."""
    required_reject_rate: float | None = None
    """Share of known query images that are rejected at the threshold for
    ``stated_false_accept_rate``."""
    stated_false_accept_rate: float | None = None
    stated_false_reject_rate: float | None = None
    calibrated_known: int = 0
    """Number of images of known classes that determined the threshold, in all draws."""
    calibrated_unknown: int = 0
    """Number of images of held-out classes that determined the threshold."""
    false_accepts: Proportion | None = None
    """Proportion of test images of held-out classes that are accepted at the threshold, or all if
    no image is called unknown. The intervals of all figures include the spread between classes, and
    this one that of the threshold, which depends on the known images that set it."""
    expected_false_accepts: Interval | None = None
    """The proportion to expect of a release that knows all classes
    (`evernear.evaluation.statistics.expected_share`)."""
    false_rejects: Proportion | None = None
    """Proportion of test images of the other classes that are rejected at this threshold, or 0 if
    no image is called unknown."""
    added_recognized: Interval | None = None
    """Proportion of images of held-out classes to expect to be named right and accepted after
    `ADDED_IMAGES` other images of each class joined the gallery."""
    added_in_halves: bool = False
    """Whether `added_recognized` was measured with the half of a class's images that shows other
    scenes than the half in the gallery, instead of test and query images."""

    @property
    def is_reused(self) -> bool:
        """Whether the threshold is the champion's, whose network is reused without a probe."""
        return self.threshold is not None and not self.draws

    @property
    def separates(self) -> bool:
        """Whether images of the held-out classes are significantly farther from the gallery than
        known images are. Other classes may be different, as the interval of ``auroc`` shows."""
        return bool(self.draws) and self.threshold != MAX_DISTANCE

    def summary(self) -> str:
        """Empty if there was no probe."""
        if self.auroc is None or self.false_accepts is None or self.expected_false_accepts is None:
            return ""
        if not self.separates:
            return self._switched_off()
        unseen = self._unseen(self.expected_false_accepts)
        text = (
            f"AUROC {self.auroc} for {self._classes()}. {unseen}; of those held out, "
            f"{self.false_accepts.count:,} of {self.false_accepts.total:,} were."
        )
        if self.required_reject_rate and self.required_reject_rate > (self.stated_false_reject_rate or 1):
            text += (
                f" Both rates cannot be held: to accept {self.stated_false_accept_rate:.0%} of unseen images "
                f"(index.false_accept_rate), {self.required_reject_rate:.0%} of known images would be called unknown. "
                f"index.false_reject_rate = {self.stated_false_reject_rate:g} takes precedence; raise it to accept "
                "fewer unseen images."
            )
        return text

    def rests_on(self) -> str:
        """On how many images and classes the threshold and the figures rest, or empty without a
        probe."""
        if self.false_accepts is None or self.false_rejects is None:
            return ""
        classes = quantity(len(self.held_out), "class", "classes")
        networks = (
            f"one network that does not know {classes}"
            if self.draws == 1
            else f"{self.draws} networks, each of which does not know some of {classes}"
        )
        return (
            f"The threshold rests on {quantity(self.calibrated_known, 'image')} of known and "
            f"{self.calibrated_unknown:,} of held-out classes, and the figures on {self.false_rejects.total:,} and "
            f"{self.false_accepts.total:,} others, with {networks}."
        )

    def _switched_off(self) -> str:
        if self.accepts_most:
            return (
                "Unknown is switched off, and every image counts as known: a threshold that rejects at most "
                f"{self.stated_false_reject_rate:.0%} of known images (index.false_reject_rate) would accept most "
                f"images of {self._classes()}. To reject them, raise index.false_reject_rate: for a share of "
                f"{self.stated_false_accept_rate:.0%} accepted, {self.required_reject_rate:.0%} of known images are "
                "called unknown."
            )
        return (
            f"Unknown is switched off, and every image counts as known: with an AUROC of {self.auroc}, images of "
            f"{self._classes()} are not significantly farther away than those of known classes."
        )

    def describe_kept_threshold(self) -> str:
        """What to expect of images of unseen classes after a reindex, or empty if the champion does
        not state it."""
        if not self.is_reused or self.expected_false_accepts is None:
            return ""
        if self.threshold == MAX_DISTANCE:
            return "Unknown stays switched off, and every image counts as known."
        unseen = self._unseen(self.expected_false_accepts)
        return f"{unseen}: the threshold stays, and each class that is added accepts more."

    @staticmethod
    def _unseen(expected: Interval) -> str:
        return (
            f"Of images of unseen classes, expect {expected.value:.0%} ({expected.low:.0%} to {expected.high:.0%}) "
            "to be accepted as known"
        )

    def describe_added(self) -> str:
        """What to expect of a class that is added without training, or empty without a probe."""
        if self.added_recognized is None:
            return ""
        return (
            f"Of later images of a class that is added with {ADDED_IMAGES} images and without training, about "
            f"{self.added_recognized.value:.0%} are recognized ({self.added_recognized.low:.0%} to "
            f"{self.added_recognized.high:.0%}). Training on the class helps: evernear run."
        )

    def _classes(self) -> str:
        """The number of classes and draws on which the figures are based."""
        draws = f" in {self.draws} draws" if self.draws > 1 else ""
        return f"the {quantity(len(self.held_out), 'class', 'classes')} held out{draws} ({named(self.held_out)})"

    def scope(self) -> str:
        """For which images the figures hold, in one or two sentences."""
        text = (
            "The intervals allow for differences between classes, networks and days, as measured on other datasets. "
            "They apply to a new class only if it resembles these."
        )
        if self.added_in_halves:
            text += (
                " Each added class was queried with images of other scenes than those in the gallery, as far as its "
                "images show scenes, in place of photographs of another day. To hold out whole days or places, set "
                "data.group."
            )
        return text
