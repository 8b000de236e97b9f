"""The train split -> an embedding network and its training curves."""

from typing import Any

from kfp import dsl

from components import component


@component
def train(
    run: str,
    settings: dict[str, Any],
    dataset: dsl.Input[dsl.Dataset],
    trained: dsl.Output[dsl.Model],
    curves: dsl.Output[dsl.HTML],
):
    """Train the embedding network with an ArcFace head; resume from the last checkpoint of the same run."""
    from evernear import steps

    curves.uri += ".html"
    steps.train(run, settings, dataset.path, trained.path, curves.path)
