"""An evaluation -> the verdict: whether the candidate may replace the champion."""

from typing import Any

from kfp import dsl

from components import component


@component
def gate(
    run: str,
    settings: dict[str, Any],
    evaluation: dsl.Input[dsl.Artifact],
    verdict: dsl.Output[dsl.Artifact],
    card: dsl.Output[dsl.HTML],
) -> bool:
    """Promote or hold, with reasons. The pipeline branches on the returned bool."""
    from evernear import steps

    card.uri += ".html"
    return steps.gate(run, settings, evaluation.path, verdict.path, card.path)
