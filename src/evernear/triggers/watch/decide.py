"""Decide between retrain, reindex and nothing: a function of an observation and of the thresholds in the settings."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from evernear.common.output import quantity
from evernear.data.drift import Shift
from evernear.settings import Settings
from evernear.triggers.watch.observe import Drift, Observation, SourceChanges
from evernear.triggers.watch.schedule_state import Action


@dataclass(frozen=True)
class WatchDecision:
    """An action and its reasons."""

    action: Action
    reasons: tuple[str, ...]
    figures: dict[str, float] = field(default_factory=dict[str, float])
    for_a_person: bool = False
    """Whether a person has to decide regardless of the policy: there is nothing new to train on, or the source could
    not be listed.
    """

    def has_grown_since(self, earlier: dict[str, float], settings: Settings) -> bool:
        """Whether a figure has grown by its threshold since ``earlier``."""
        watch = settings.watch
        steps = {
            "new_train_images": watch.new_train_images,
            "new_gallery_images": watch.new_gallery_images,
            "new_classes": 1,
            "drift_found": 1,
        }
        return any(self.figures.get(name, 0.0) >= earlier.get(name, 0.0) + step for name, step in steps.items())


def decide_action(observation: Observation, settings: Settings) -> WatchDecision:
    """Choose retrain for many new training images or drift, and reindex for new classes or gallery images.

    Retrain takes precedence because it also builds an index.
    """
    figures = _figures(observation, settings)
    gone = _gone_classes(observation, settings)
    if retrain := _reasons_to_train(observation, settings):
        # Counted since the training, not since the last reindex, whose new images the network has not seen.
        is_worth_it = observation.changes is not None and observation.changes.train_images > 0
        return WatchDecision("retrain", (*retrain, *gone), figures, for_a_person=not is_worth_it)
    if reindex := _reasons_to_index(observation, settings):
        return WatchDecision("reindex", (*reindex, *gone), figures)
    return WatchDecision("nothing", (*_reasons_for_nothing(observation), *gone), figures)


def _valid_classes(changes: SourceChanges, settings: Settings) -> dict[str, int]:
    """New classes with enough images to pass the validation of the pipeline."""
    min_images = settings.validation.min_class_images
    return {label: count for label, count in sorted(changes.new_classes.items()) if count >= min_images}


def _reasons_to_train(observation: Observation, settings: Settings) -> list[str]:
    reasons: list[str] = []
    watch, changes = settings.watch, observation.changes
    if changes and observation.champion is None and changes.listed_files:
        reasons.append(
            f"No release has been promoted yet, and {observation.source} has {quantity(changes.listed_files, 'image')}."
        )
        if "source" not in settings.data.model_fields_set:
            reasons.append(f"{observation.source} is the default; set data.source to watch another source.")
    elif changes and changes.train_images >= max(watch.new_train_images, watch.new_train_share * changes.trained_on):
        share = f", {changes.train_images / changes.trained_on:.0%} of" if changes.trained_on else " in addition to"
        reasons.append(
            f"About {quantity(round(changes.train_images), 'new training image')}{share} the {changes.trained_on:,}"
            " that the network was trained on."
        )
    drifted = [shift for shift in observation.drift.shifts if shift.detected] if observation.drift else []
    if observation.drift:
        reasons += [_drift_sentence(shift, observation.drift) for shift in drifted]
    if drifted and changes and not changes.train_images:
        reasons.append("But the source has nothing new to train on: label images like the live queries first.")
    return reasons


def _reasons_to_index(observation: Observation, settings: Settings) -> list[str]:
    changes = observation.changes
    if changes is None:
        return []
    reasons: list[str] = []
    if classes := _valid_classes(changes, settings):
        reasons.append(f"{'A new class' if len(classes) == 1 else 'New classes'} in the source: {_counted(classes)}.")
    if changes.gallery_images >= settings.watch.new_gallery_images:
        reasons.append(f"About {quantity(round(changes.gallery_images), 'new gallery image')}.")
    return reasons


def _gone_classes(observation: Observation, settings: Settings) -> list[str]:
    """A sentence about classes that the source no longer has."""
    if observation.changes is None:
        return []
    former = settings.classes.former_names
    gone = {name: count for name, count in sorted(observation.changes.gone_classes.items()) if name not in former}
    if not gone:
        return []
    sentence = f"{'A class is' if len(gone) == 1 else 'Classes are'} gone from the source: {_counted(gone)}."
    if settings.validation.vanished_class != "error":
        return [sentence]
    first, pronoun = shlex.quote(next(iter(gone))), "it is" if len(gone) == 1 else "they are"
    return [
        f"{sentence} Validation stops a run until {pronoun} back; if that is on purpose, start the run yourself with"
        f" --retire {first} or --rename {first}=NEW."
    ]


def _counted(classes: Mapping[str, int]) -> str:
    """The first classes of ``classes`` and their numbers of images."""
    named = ", ".join(f"{label} ({quantity(count, 'image')})" for label, count in list(classes.items())[:5])
    return f"{named} and {len(classes) - 5:,} more" if len(classes) > 5 else named


def _drift_sentence(shift: Shift, drift: Drift) -> str:
    certainty = f"p = {shift.p:.1g}, significant below {shift.level:.1g}; {quantity(drift.queries, 'query', 'queries')}"
    match shift.measure:
        case "unknown_rise":
            return (
                f"{drift.unknown_rate:.1%} of the live queries are unknown, compared with"
                f" {drift.reference_unknown_rate:.1%} of the champion's reference ({certainty})."
            )
        case "distance_shift":
            return (
                f"Distances to the gallery have shifted: Kolmogorov-Smirnov statistic {shift.effect:.2f}, bound"
                f" {shift.bound:.2f} ({certainty})."
            )
        case "embedding_shift":
            return (
                f"Embeddings of live queries have shifted: energy coefficient {shift.effect:.3f}, bound"
                f" {shift.bound:.3f} ({certainty})."
            )


def _reasons_for_nothing(observation: Observation) -> list[str]:
    reasons: list[str] = []
    if changes := observation.changes:
        new = quantity(changes.new_files, "new file")
        reasons.append(f"The source has {new}, below the thresholds." if changes.new_files else "Nothing is new.")
    if drift := observation.drift:
        reasons.append(
            f"No drift in {quantity(drift.queries, 'live query', 'live queries')}."
            if drift.shifts
            else f"Only {quantity(drift.sampled, 'live query', 'live queries')} sampled, too few to test for drift."
        )
    elif observation.champion:
        reasons.append("Drift was not tested.")
    return reasons


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
            "unknown_rate": drift.unknown_rate,
            "reference_unknown_rate": drift.reference_unknown_rate,
            "drift_found": sum(shift.detected for shift in drift.shifts),
        }
        for shift in drift.shifts:
            figures |= {shift.measure: shift.effect, f"{shift.measure}_p": shift.p}
    return figures
