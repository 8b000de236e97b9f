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
) -> bool:
    """Promote or hold, with reasons. The pipeline branches on the returned bool."""
    from evernear import steps

    return steps.gate(run, settings, evaluation.path, verdict.path)
