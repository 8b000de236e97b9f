"""The first step: images of a source -> the next snapshot of the dataset, and the settings of the run."""

from typing import Any

from kfp import dsl

from components import component


@component
def ingest(run: str, store: str, source: str, preset: str, target: str, serving_image: str, settings: dict[str, Any],
           dataset: dsl.Output[dsl.Dataset], train_accelerators: str = "0") -> dict[str, Any]:  # fmt: skip
    """Add the source's new images to the dataset, and resolve the settings of the run."""
    from evernear import steps

    parameters = {"source": source, "preset": preset, "target": target, "serving_image": serving_image}
    parameters["train_accelerators"] = train_accelerators
    dataset.metadata["digest"], resolved = steps.ingest(run, store, parameters, settings, dataset.path)
    return resolved
