"""The gate's rules for single classes.

The docstring of `evernear.evaluation.gate` explains them.
"""

from evernear.common.output import named
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_anchor import CLASSES_SHARE
from evernear.evaluation.measure import Measurement
from evernear.evaluation.verdict import Rule, ceiling_setting, floor_setting
from evernear.settings import ClassSettings, GateSettings


def class_recall_floor_rule(candidate: Measurement, settings: GateSettings) -> Rule:
    """The rule fails if the recall of a class is significantly below the floor."""
    recalls, floor = candidate.class_recall, settings.class_recall_floor
    if not recalls:
        return Rule(name="class_recall_floor", passed=False, bound=floor, reason="Recall by class is missing.")
    fallen = [f"{label} ({recall.value:.1%})" for label, recall in recalls.items() if not recall.high >= floor]
    worst = min(recalls, key=lambda label: recalls[label].value)
    unmeasured = [label for label in candidate.known_labels if label not in recalls]
    reason = (
        f"Recall is significantly below the floor of {floor:.0%} for {named(fallen)}."
        if fallen
        else f"No class has a recall significantly below {floor:.0%}; the worst is {worst} with {recalls[worst]}."
    )
    if unmeasured:
        reason += f" Without test images and therefore not measured: {named(unmeasured)}."
    return Rule(
        name="class_recall_floor",
        passed=not fallen,
        candidate=recalls[worst].value,
        bound=floor,
        reason=reason,
        setting=floor_setting("gate.class_recall_floor", min(recall.high for recall in recalls.values()))
        if fallen
        else "",
    )


def classes_kept_rule(candidate: Measurement, champion: Measurement, classes: ClassSettings) -> Rule:
    """The rule fails if the candidate lacks a class of the champion."""
    known, known_before = set(candidate.known_labels), set(champion.known_labels)
    missing = [label for label in champion.known_labels if label not in known]
    new = [_class_figures(label, candidate) for label in candidate.known_labels if label not in known_before]
    reason = "The candidate knows every class of the champion."
    if missing:
        reason = f"The candidate lacks classes of the champion: {named(missing)}."
    if new:
        reason += f" New: {named(new)}."
    if classes.retired:
        reason += f" Retired on purpose: {named([*classes.retired])}."
    if classes.renamed:
        reason += f" Renamed: {named([f'{old} to {new}' for old, new in classes.renamed.items()])}."
    return Rule(
        name="classes_kept",
        passed=not missing and bool(candidate.known_labels),
        candidate=len(candidate.known_labels),
        champion=len(champion.known_labels),
        reason=reason,
    )


def class_recall_drop_rule(evaluation: Evaluation, champion: Measurement, settings: GateSettings) -> Rule:
    """The rule fails if the recall of a class fell significantly and by more than
    ``gate.class_recall_drop``.
    """
    name, bound = "class_recall_drop", settings.class_recall_drop
    if evaluation.comparison is None or not evaluation.comparison.classes:
        return Rule(name=name, passed=False, bound=bound, reason="The comparison by class is missing.")
    compared = evaluation.comparison.classes
    classes = {label: compared[label] for label in champion.known_labels if label in compared}
    if not classes:
        return Rule(name=name, passed=False, bound=bound, reason="No class that the champion knows has a test image.")
    level = settings.significance * CLASSES_SHARE / len(classes)
    drops = {label: (pairs.regressions - pairs.improvements) / pairs.queries for label, pairs in classes.items()}
    fallen = [
        f"{label} by {drops[label]:.1%}"
        for label, pairs in classes.items()
        if drops[label] > bound and pairs.p_worse <= level
    ]
    largest = max(drops, key=lambda label: drops[label])
    reason = (
        f"Recall fell significantly and by more than {bound:.1%} for {named(fallen)}."
        if fallen
        else f"No class has a significant recall drop of more than {bound:.1%}; the worst change is "
        f"{0.0 - drops[largest]:+.1%} for {largest}."
    )
    setting = ceiling_setting("gate.class_recall_drop", drops[largest]) if fallen else ""
    return Rule(name=name, passed=not fallen, candidate=drops[largest], bound=bound, reason=reason, setting=setting)


def _class_figures(label: str, measurement: Measurement) -> str:
    figures = [("recall", measurement.class_recall), ("called unknown", measurement.class_rejects)]
    text = ", ".join(f"{name} {shares[label].value:.1%}" for name, shares in figures if label in shares)
    return f"{label} ({text})" if text else label
