"""Retrain, reindex or nothing: by stated thresholds, from what a look saw, and from nothing else."""

from dataclasses import dataclass, field

from evernear.data.drift import Shift
from evernear.settings import Settings
from evernear.triggers.watch.look import Drift, News, Sight
from evernear.triggers.watch.switch import Action


@dataclass(frozen=True)
class Decision:
    """What should be done, and why."""

    action: Action
    reasons: tuple[str, ...]
    figures: dict[str, float] = field(default_factory=dict[str, float])
    for_a_person: bool = False
    """Whether no policy may start it: training again on the same images would change nothing, or it is not known
    what there is to train on.
    """

    def has_grown_since(self, earlier: dict[str, float], settings: Settings) -> bool:
        """Whether it is as much again as what an earlier proposal told, or something that that one did not tell."""
        watch = settings.watch
        steps = {
            "new_train_images": watch.new_train_images,
            "new_gallery_images": watch.new_gallery_images,
            "new_classes": 1,
            "drift_found": 1,
        }
        return any(self.figures.get(name, 0.0) >= earlier.get(name, 0.0) + step for name, step in steps.items())


def decide(sight: Sight, settings: Settings) -> Decision:
    """Many new images for training, or drift: retrain. New classes or new gallery images: reindex.

    A training indexes as well, so it is proposed where both are called for.
    """
    figures = _figures(sight, settings)
    if retrain := _reasons_to_train(sight, settings):
        # Not new files, which are new to the gallery: the network has not seen what only a new index took in.
        is_worth_it = sight.news is not None and sight.news.train_images > 0
        return Decision("retrain", tuple(retrain), figures, for_a_person=not is_worth_it)
    if reindex := _reasons_to_index(sight, settings):
        return Decision("reindex", tuple(reindex), figures)
    return Decision("nothing", tuple(_quiet(sight)), figures)


def known_classes(news: News, settings: Settings) -> dict[str, int]:
    """New classes with images enough for the pipeline, whose validation refuses smaller ones."""
    least = settings.validation.min_class_images
    return {label: count for label, count in sorted(news.new_classes.items()) if count >= least}


def _reasons_to_train(sight: Sight, settings: Settings) -> list[str]:
    reasons: list[str] = []
    watch, news = settings.watch, sight.news
    if news and sight.champion is None and news.listed_files:
        reasons.append(f"There is no release yet, and the source holds {news.listed_files:,} images.")
    elif news and news.train_images >= max(watch.new_train_images, watch.new_train_share * news.trained_on):
        share = f", {news.train_images / news.trained_on:.0%} of" if news.trained_on else " besides"
        reasons.append(
            f"About {news.train_images:,.0f} new images for training{share} the {news.trained_on:,} that the network"
            " was trained on."
        )
    found = [shift for shift in sight.drift.shifts if shift.found] if sight.drift else []
    if sight.drift:
        reasons += [_drifted(shift, sight.drift) for shift in found]
    if found and news and not news.train_images:
        reasons.append(
            "But the source holds nothing new to train on: label images like those of the live queries first."
        )
    return reasons


def _reasons_to_index(sight: Sight, settings: Settings) -> list[str]:
    news = sight.news
    if news is None:
        return []
    reasons: list[str] = []
    if classes := known_classes(news, settings):
        named = ", ".join(f"{label} ({count:,} images)" for label, count in list(classes.items())[:5])
        more = f" and {len(classes) - 5:,} more" if len(classes) > 5 else ""
        reasons.append(f"{'A new class' if len(classes) == 1 else 'New classes'} in the source: {named}{more}.")
    if news.gallery_images >= settings.watch.new_gallery_images:
        reasons.append(f"About {news.gallery_images:,.0f} new images for the gallery.")
    return reasons


def _drifted(shift: Shift, drift: Drift) -> str:
    certainty = f"p {shift.p:.1g}, at most {shift.level:.1g} asked; {drift.queries:,} queries"
    match shift.measure:
        case "unknown_rise":
            return (
                f"{drift.unknown_rate:.1%} of the live queries are unknown, and {drift.reference_unknown_rate:.1%} were"
                f" when the champion was made ({certainty})."
            )
        case "distance_shift":
            return (
                f"Distances to the gallery have shifted: Kolmogorov-Smirnov {shift.effect:.2f}, {shift.bound:.2f}"
                f" allowed ({certainty})."
            )
        case "embedding_shift":
            return (
                f"Embeddings of live queries have shifted: energy coefficient {shift.effect:.3f}, {shift.bound:.3f}"
                f" allowed ({certainty})."
            )


def _quiet(sight: Sight) -> list[str]:
    said: list[str] = []
    if news := sight.news:
        new = "one new file" if news.new_files == 1 else f"{news.new_files:,} new files"
        said.append(
            f"The source holds {new}, too few to act on." if news.new_files else "The source holds nothing new."
        )
    if drift := sight.drift:
        said.append(
            f"No drift in {drift.queries:,} live queries."
            if drift.shifts
            else f"Only {drift.sampled:,} live queries were sampled, too few to judge drift by."
        )
    elif sight.champion:
        said.append("Drift is not judged.")
    return said


def _figures(sight: Sight, settings: Settings) -> dict[str, float]:
    figures: dict[str, float] = {}
    if news := sight.news:
        figures |= {
            "new_train_images": round(news.train_images, 1),
            "trained_on": news.trained_on,
            "new_gallery_images": round(news.gallery_images, 1),
            "new_classes": len(known_classes(news, settings)),
            "new_files": news.new_files,
            "gone_files": news.gone_files,
            "listed_files": news.listed_files,
        }
    if drift := sight.drift:
        figures |= {
            "queries": drift.queries,
            "sampled_queries": drift.sampled,
            "unknown_rate": drift.unknown_rate,
            "reference_unknown_rate": drift.reference_unknown_rate,
            "drift_found": sum(shift.found for shift in drift.shifts),
        }
        for shift in drift.shifts:
            figures |= {shift.measure: shift.effect, f"{shift.measure}_p": shift.p}
    return figures
