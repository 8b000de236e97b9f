"""Images of a source -> the next snapshot of the dataset."""

from kfp import dsl

from components import component


@component
def ingest(store: str, settings: dict, dataset: dsl.Output[dsl.Dataset]):
    """Add the source's new images to the dataset and snapshot it."""
    from evernear import steps

    dataset.metadata["digest"] = steps.ingest(store, settings, dataset.path)
