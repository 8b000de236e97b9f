"""Candidate and champion -> metrics on the same frozen test split."""

from typing import Any

from kfp import dsl

from components import component


@component
def evaluate(run: str, settings: dict[str, Any], dataset: dsl.Input[dsl.Dataset], network: dsl.Input[dsl.Model],
             index: dsl.Input[dsl.Model], open_set: dsl.Input[dsl.Artifact], evaluation: dsl.Output[dsl.Artifact],
             metrics: dsl.Output[dsl.Metrics], confusion: dsl.Output[dsl.ClassificationMetrics],
             roc: dsl.Output[dsl.ClassificationMetrics]):  # fmt: skip
    """Count the test images named right, named wrong and called unknown, and measure candidate and champion."""
    from evernear import steps

    parts = (dataset.path, network.path, index.path, open_set.path)
    measured = steps.evaluate(run, settings, *parts, evaluation.path)
    for name, value in measured.metrics().items():
        metrics.log_metric(name, value)
    names, rows = measured.candidate.confusion_matrix()
    confusion.log_confusion_matrix(names, [*rows, [0] * len(names)])  # KFP accepts square matrices only
    if curve := measured.open_set.roc:
        roc.log_roc_curve(list(curve.false_accepts), list(curve.true_accepts), list(curve.thresholds))
