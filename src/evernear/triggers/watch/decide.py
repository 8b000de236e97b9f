"""Choose between retrain, reindex and no action, from an observation and the thresholds in the
settings."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from evernear.common.output import quantity
from evernear.settings import Settings
from evernear.triggers.watch.drift import MIN_QUERIES, POWER, SAMPLE, Measure, Shift
from evernear.triggers.watch.observe import Drift, Observation, SourceChanges
from evernear.triggers.watch.schedule_state import Action

DRIFT = "drift"
LABEL_RIGHT = "label right"
_SHIFTED: dict[Measure, str] = {
    "unknown_rise": "{live.unknown_rate:.1%} of the live queries are unknown, compared with"
    " {reference.unknown_rate:.1%} of the champion's reference",
    "embedding_shift": "Embeddings of live queries have shifted: energy coefficient {shift.effect:.3f}, bound"
    " {shift.bound:.3f}",
}
_DETECTABLE: dict[Measure, str] = {
    "unknown_rise": "a rise of the unknown rate by {points:.1f} points",
    "embedding_shift": "an energy coefficient of {effect:.3f}",
}
_MIX_CLASSES, _MIX_DIFFERENCE = 3, 0.1
"""Number of classes that a remark about the mix names, and the smallest difference in a share."""
_DRIFT_RATIO = 1.5
"""Factor by which the effect of drift must grow for the drift to count as worse. Daily effects vary
by chance."""
_NOTHING_NEW = "But the source has nothing new to train on: label images like the live queries first."
NEW_TRAIN_SHARE = 0.05
"""Share of the network's training images from which new ones are worth a training run. A smaller
share changes the network less than another seed does."""
NEW_GALLERY_IMAGES = 20
"""New gallery images that are worth a reindex, which takes minutes and no training."""
_LOSS_STEP = 0.05
"""Increase in a loss of right labels that counts as worse: 5 percentage points."""


@dataclass(frozen=True)
class Cause:
    """A cause for a run, with figures that measure the size of the cause."""

    name: str
    """Identifies the cause in requests."""
    reasons: tuple[str, ...]
    steps: Mapping[str, float] = field(default_factory=dict[str, float])
    """Figures that measure the size of the cause, each with the smallest increase for which the
    cause counts as worse."""
    ratio: float = 1.0
    """For the cause to count as worse, a figure must also have grown by at least this factor."""

    def is_worse(self, figures: Mapping[str, float], earlier: Mapping[str, float]) -> bool:
        """Whether any of the cause's ``figures`` has grown enough since ``earlier``."""
        return any(
            figures.get(name, 0.0) >= max(earlier.get(name, 0.0) + step, self.ratio * earlier.get(name, 0.0))
            for name, step in self.steps.items()
        )


@dataclass(frozen=True)
class WatchDecision:
    """An action, its causes, and remarks for the user."""

    action: Action
    causes: tuple[Cause, ...] = ()
    remarks: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict[str, float])
    for_a_person: bool = False
    """Whether a person must decide regardless of the policy. This is the case if no new training
    images exist or the source could not be listed."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of all causes and remarks."""
        return (*(reason for cause in self.causes for reason in cause.reasons), *self.remarks)


def decide_action(observation: Observation, settings: Settings) -> WatchDecision:
    """Choose ``retrain`` if there are many new training images, drift, or fewer live queries with
    the right label, and ``reindex`` if there are new classes or gallery images.

    ``retrain`` takes precedence because a training run also builds an index.
    """
    figures = _figures(observation, settings)
    remarks = (*_remarks(observation), *_gone_classes(observation, settings))
    if causes := _causes_to_train(observation, settings):
        # New images are counted since the last training and not since the last reindex, because the
        # network was not trained on the images that a reindex adds.
        is_worth_it = observation.changes is not None and observation.changes.train_images > 0
        return WatchDecision("retrain", causes, remarks, figures, for_a_person=not is_worth_it)
    if causes := _causes_to_index(observation, settings):
        return WatchDecision("reindex", causes, remarks, figures)
    return WatchDecision("nothing", (), (*_reasons_for_nothing(observation), *remarks), figures)


def _valid_classes(changes: SourceChanges, settings: Settings) -> dict[str, int]:
    """New classes that have enough images to pass the pipeline's validation."""
    min_images = settings.validation.min_class_images
    return {label: count for label, count in sorted(changes.new_classes.items()) if count >= min_images}


def _causes_to_train(observation: Observation, settings: Settings) -> tuple[Cause, ...]:
    causes: list[Cause] = []
    watch, changes = settings.watch, observation.changes
    steps = {"new_train_images": watch.new_train_images}
    if changes and observation.champion is None and changes.gallery.listed:
        images = quantity(changes.gallery.listed, "image")
        reasons = [f"No release has been promoted yet, and {observation.source} has {images}."]
        if "source" not in settings.data.model_fields_set:
            reasons.append(f"{observation.source} is the default; set data.source to watch another source.")
        causes.append(Cause("first_release", tuple(reasons), steps))
    elif changes and changes.train_images >= max(watch.new_train_images, NEW_TRAIN_SHARE * changes.trained_on):
        share = f", {changes.train_images / changes.trained_on:.0%} of" if changes.trained_on else " in addition to"
        reason = (
            f"About {quantity(round(changes.train_images), 'new training image')}{share} the {changes.trained_on:,}"
            " that the network was trained on."
        )
        causes.append(Cause("training_images", (reason,), steps))
    remedy = [_NOTHING_NEW] if changes and not changes.train_images else []
    if (drift := observation.drift) and drift.detected:
        reasons = [_shift_sentence(shift, drift) for shift in drift.detected]
        bounds = {shift.measure: shift.bound for shift in drift.detected}
        causes.append(Cause(DRIFT, (*reasons, *remedy), bounds, _DRIFT_RATIO))
        remedy = []
    if observation.live and observation.live.lost_at:
        causes.append(Cause(LABEL_RIGHT, (str(observation.live), *remedy), {"live_loss": _LOSS_STEP}))
    return tuple(causes)


def _causes_to_index(observation: Observation, settings: Settings) -> tuple[Cause, ...]:
    changes = observation.changes
    if changes is None:
        return ()
    causes: list[Cause] = []
    if classes := _valid_classes(changes, settings):
        reason = f"{'A new class' if len(classes) == 1 else 'New classes'} in the source: {_counted(classes)}."
        causes.append(Cause("new_classes", (reason,), {"new_classes": 1}))
    if changes.gallery_images >= NEW_GALLERY_IMAGES:
        reason = f"About {quantity(round(changes.gallery_images), 'new gallery image')}."
        causes.append(Cause("gallery_images", (reason,), {"new_gallery_images": NEW_GALLERY_IMAGES}))
    return tuple(causes)


def _gone_classes(observation: Observation, settings: Settings) -> list[str]:
    """A sentence about classes that the source no longer contains."""
    if observation.changes is None:
        return []
    gone = dict(sorted(observation.changes.gallery.gone_classes.items()))
    if not gone:
        return []
    sentence = f"{'A class is' if len(gone) == 1 else 'Classes are'} gone from the source: {_counted(gone)}."
    if settings.validation.severities()["vanished_class"] != "error":
        return [sentence]
    first, pronoun = shlex.quote(next(iter(gone))), "it is" if len(gone) == 1 else "they are"
    return [
        f"{sentence} Validation stops a run until {pronoun} back; if that is on purpose, start the run yourself with"
        f" --retire {first} or --rename {first}=NEW."
    ]


def _counted(classes: Mapping[str, int]) -> str:
    """List the first classes in ``classes`` as text, each with its number of images."""
    named = ", ".join(f"{label} ({quantity(count, 'image')})" for label, count in list(classes.items())[:5])
    return f"{named} and {len(classes) - 5:,} more" if len(classes) > 5 else named


def _reasons_for_nothing(observation: Observation) -> list[str]:
    reasons: list[str] = []
    if changes := observation.changes:
        new = quantity(changes.gallery.new, "new file")
        reasons.append(f"The source has {new}, below the thresholds." if changes.gallery.new else "Nothing is new.")
    if drift := observation.drift:
        reasons += _no_drift_reasons(drift)
    elif observation.champion:
        reasons.append("Drift was not tested.")
    return reasons


def _remarks(observation: Observation) -> list[str]:
    """Remarks about the class mix and the live accuracy, if neither leads to a run. Where drift was
    detected, it may make one class look like another."""
    remarks: list[str] = []
    if (drift := observation.drift) and drift.shifts and not drift.detected:
        differ = [share for share in drift.class_mix() if abs(share.live - share.reference) >= _MIX_DIFFERENCE]
        named = [f"{share.live:.0%} {share.label} (reference {share.reference:.0%})" for share in differ[:_MIX_CLASSES]]
        remarks += [f"The mix of classes differs, which is not drift: {', '.join(named)}."] if named else []
    if observation.live and observation.live.lost_at is None:
        remarks.append(str(observation.live))
    return remarks


def _figures(observation: Observation, settings: Settings) -> dict[str, float]:
    figures: dict[str, float] = {}
    if changes := observation.changes:
        figures |= {
            "new_train_images": round(changes.train_images, 1),
            "trained_on": changes.trained_on,
            "new_gallery_images": round(changes.gallery_images, 1),
            "new_classes": len(_valid_classes(changes, settings)),
            "new_files": changes.gallery.new,
            "gone_files": changes.gallery.removed,
            "gone_classes": len(changes.gallery.gone_classes),
            "listed_files": changes.gallery.listed,
        }
    if drift := observation.drift:
        figures |= {
            "queries": drift.live.total,
            "sampled_queries": len(drift.live),
            "independent_queries": drift.independent,
            "query_gap_s": drift.gap_s,
            "reference_images": len(drift.reference),
            "unknown_rate": drift.live.unknown_rate,
            "reference_unknown_rate": drift.reference.unknown_rate,
            "drift_found": len(drift.detected),
        }
        for shift in drift.shifts:
            figures |= {
                shift.measure: shift.effect,
                f"{shift.measure}_p": shift.p,
                f"{shift.measure}_detectable": shift.detectable,
            }
        if mix := drift.class_mix():
            figures["class_mix_difference"] = sum(abs(share.live - share.reference) for share in mix) / 2
    if live := observation.live:
        figures |= {
            "live_labels": live.label_right.total,
            "live_accuracy": live.label_right.value,
            "live_accuracy_low": live.label_right.low,
            "live_accuracy_high": live.label_right.high,
            "live_loss": live.loss,
        }
    return figures


def _no_drift_reasons(drift: Drift) -> list[str]:
    """The reason why no drift was detected, and the smallest shift that would have been
    detected."""
    if drift.shifts:
        asked = quantity(drift.live.total, "live query", "live queries")
        return [f"No drift in {asked}{_age(drift)}{_independent(drift)}.", _detectable(drift)]
    if len(drift.reference) < MIN_QUERIES:
        return [
            f"Drift was not tested: the release was measured on {quantity(len(drift.reference), 'image')} of its query"
            f" and test splits, and the tests need {MIN_QUERIES}."
        ]
    sampled = f"{quantity(len(drift.live), 'live query', 'live queries')}{_age(drift)} sampled"
    if drift.gap_s and drift.independent < MIN_QUERIES:
        return [f"Drift was not tested: {sampled}{_independent(drift)}, and the tests need {MIN_QUERIES}."]
    return [f"Only {sampled}, too few to test for drift."]


def _age(drift: Drift) -> str:
    hours = drift.window_s / 3600
    return f" of the last {f'{hours:.0f} h' if hours < 48 else f'{hours / 24:.1f} days'}"


def _independent(drift: Drift) -> str:
    """A remark about dependent queries, or an empty string."""
    if not drift.gap_s:
        return ""
    return f", of which {drift.independent:,} at least {drift.gap_s:g} s apart count, because close ones are alike"


def _detectable(drift: Drift) -> str:
    smallest = " and ".join(
        _DETECTABLE[shift.measure].format(effect=shift.detectable, points=100 * shift.detectable)
        for shift in drift.shifts
    )
    return (
        f"With {min(SAMPLE, drift.independent):,} queries and {quantity(len(drift.reference), 'reference image')}, the"
        f" smallest shifts that are found in {POWER:.0%} of cases are {smallest}."
    )


def _shift_sentence(shift: Shift, drift: Drift) -> str:
    finding = _SHIFTED[shift.measure].format(shift=shift, live=drift.live, reference=drift.reference)
    asked = f"{quantity(drift.live.total, 'query', 'queries')}{_age(drift)}{_independent(drift)}"
    return f"{finding} (p = {shift.p:.1g}, significant below {shift.level:.1g}; {asked})."
