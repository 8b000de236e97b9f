"""The open-set probe: how well images of unseen classes are rejected."""

from typing import Any

from kfp import dsl

from components import component


@component
def probe(run: str, settings: dict[str, Any], dataset: dsl.Input[dsl.Dataset], open_set: dsl.Output[dsl.Artifact]):
    """Train the same recipe without some classes and measure how well they are rejected."""
    from evernear import steps

    steps.probe(run, settings, dataset.path, open_set.path)
