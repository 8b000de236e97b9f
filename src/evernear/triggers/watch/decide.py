"""Choose between retrain, reindex and no action, from an observation and the thresholds in the
settings."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from evernear.common.output import quantity
from evernear.settings import Settings
from evernear.triggers.watch.drift_sentences import drift_reasons, mix_remarks, no_drift_reasons
from evernear.triggers.watch.observe import Observation, SourceChanges
from evernear.triggers.watch.schedule_state import Action

DRIFT = "drift"
ACCURACY = "accuracy"
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
"""Increase in a loss of accuracy that counts as worse: 5 percentage points."""


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
    """Choose ``retrain`` if there are many new training images, drift, or a loss of live
    accuracy.

    Choose ``reindex`` if there are new classes or gallery images. ``retrain`` takes precedence
    because a training run also builds an index.
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
    if changes and observation.champion is None and changes.listed_files:
        images = quantity(changes.listed_files, "image")
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
    if observation.drift and (reasons := drift_reasons(observation.drift)):
        bounds = {shift.measure: shift.bound for shift in observation.drift.shifts if shift.detected}
        causes.append(Cause(DRIFT, (*reasons, *remedy), bounds, _DRIFT_RATIO))
        remedy = []
    if observation.live and observation.live.lost_at:
        causes.append(Cause(ACCURACY, (str(observation.live), *remedy), {"live_loss": _LOSS_STEP}))
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
    gone = dict(sorted(observation.changes.gone_classes.items()))
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
        new = quantity(changes.new_files, "new file")
        reasons.append(f"The source has {new}, below the thresholds." if changes.new_files else "Nothing is new.")
    if drift := observation.drift:
        reasons += no_drift_reasons(drift)
    elif observation.champion:
        reasons.append("Drift was not tested.")
    return reasons


def _remarks(observation: Observation) -> list[str]:
    remarks = mix_remarks(observation.drift) if observation.drift else []
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
            "new_files": changes.new_files,
            "gone_files": changes.gone_files,
            "gone_classes": len(changes.gone_classes),
            "listed_files": changes.listed_files,
        }
    if drift := observation.drift:
        figures |= {
            "queries": drift.queries,
            "sampled_queries": drift.sampled,
            "independent_queries": drift.independent,
            "query_gap_s": drift.gap_s,
            "reference_images": drift.reference,
            "unknown_rate": drift.unknown_rate,
            "reference_unknown_rate": drift.reference_unknown_rate,
            "drift_found": sum(shift.detected for shift in drift.shifts),
        }
        for shift in drift.shifts:
            figures |= {
                shift.measure: shift.effect,
                f"{shift.measure}_p": shift.p,
                f"{shift.measure}_detectable": shift.detectable,
            }
        if drift.mix:
            figures["class_mix_difference"] = sum(abs(share.live - share.reference) for share in drift.mix) / 2
    if live := observation.live:
        figures |= {
            "live_labels": live.accuracy.total,
            "live_accuracy": live.accuracy.value,
            "live_accuracy_low": live.accuracy.low,
            "live_accuracy_high": live.accuracy.high,
            "live_loss": live.loss,
        }
    return figures
