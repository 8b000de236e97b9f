"""Images of a source -> the next snapshot of the dataset. The first step: it resolves the settings of the run."""

from typing import Any

from kfp import dsl

from components import component


@component
def ingest(run: str, store: str, source: str, preset: str, target: str, serving_image: str, settings: dict[str, Any],
           dataset: dsl.Output[dsl.Dataset]) -> dict[str, Any]:  # fmt: skip
    """Add the source's new images to the dataset and snapshot it; resolve the settings of the run."""
    from evernear import steps

    parameters = (store, source, preset, target, serving_image, settings)
    dataset.metadata["digest"], resolved = steps.ingest(run, *parameters, dataset.path)
    return resolved
