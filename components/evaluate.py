"""Candidate and champion -> metrics on the same frozen test split."""

from typing import Any

from kfp import dsl

from components import component


@component
def evaluate(run: str, settings: dict[str, Any], dataset: dsl.Input[dsl.Dataset], network: dsl.Input[dsl.Model],
             index: dsl.Input[dsl.Model], open_set: dsl.Input[dsl.Artifact], evaluation: dsl.Output[dsl.Artifact],
             metrics: dsl.Output[dsl.Metrics], confusion: dsl.Output[dsl.ClassificationMetrics],
             roc: dsl.Output[dsl.ClassificationMetrics]):  # fmt: skip
    """Measure accuracy, recall, open-set rejection and index recall, with confidence intervals."""
    from evernear import steps

    parts = (dataset.path, network.path, index.path, open_set.path)
    measured = steps.evaluate(run, settings, *parts, evaluation.path)
    for name, value in measured.metrics().items():
        metrics.log_metric(name, value)
    confusion.log_confusion_matrix(*measured.candidate.confusion_matrix())
    if curve := measured.open_set.roc:
        roc.log_roc_curve(list(curve.false_accepts), list(curve.true_accepts), list(curve.thresholds))
