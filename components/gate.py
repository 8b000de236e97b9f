"""An evaluation -> the verdict: may the candidate replace the champion?"""

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
    """Hold or promote, with reasons. KFP branches on the one bool that this returns."""
    from evernear import steps

    card.uri += ".html"
    return steps.gate(run, settings, evaluation.path, verdict.path, card.path)
