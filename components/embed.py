"""Gallery and query images -> embeddings."""

from typing import Any

from kfp import dsl

from components import component


@component
def embed(
    run: str,
    settings: dict[str, Any],
    dataset: dsl.Input[dsl.Dataset],
    network: dsl.Input[dsl.Model],
    embeddings: dsl.Output[dsl.Artifact],
):
    """Embed the gallery and query splits; reuse the embeddings this network made before."""
    from evernear import steps

    embeddings.metadata.update(steps.embed(run, settings, dataset.path, network.path, embeddings.path))
