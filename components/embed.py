"""Gallery and query images -> embeddings."""

from kfp import dsl

from components import component


@component
def embed(dataset: dsl.Input[dsl.Dataset], network: dsl.Input[dsl.Model], embeddings: dsl.Output[dsl.Artifact]):
    """Embed the gallery and the query split in batches, to shards."""
    from evernear import steps

    steps.embed(dataset.path, network.path, embeddings.path)
