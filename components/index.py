"""Embeddings -> a FAISS index with its open-set threshold."""

from typing import Any

from kfp import dsl

from components import component


@component
def index(
    run: str,
    settings: dict[str, Any],
    dataset: dsl.Input[dsl.Dataset],
    embeddings: dsl.Input[dsl.Artifact],
    open_set: dsl.Input[dsl.Artifact],
    index: dsl.Output[dsl.Model],
):
    """Index the gallery with the open-set threshold of the probe."""
    from evernear import steps

    steps.index(run, settings, dataset.path, embeddings.path, open_set.path, index.path)
