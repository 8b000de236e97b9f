"""A trained network with its gallery, to measure it before it is exported."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from evernear.common.processes import chosen_threads
from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding.artifact import TrainedNetwork
from evernear.embedding.data_loader import ImageVectors
from evernear.embedding.embed import Embed, gallery_of, write_embeddings
from evernear.embedding.embeddings import EmbeddingCache, Embeddings
from evernear.embedding.engine import compile_network
from evernear.embedding.export import whiten_network
from evernear.embedding.network import EmbeddingNetwork
from evernear.index.build import build_index
from evernear.index.search import Gallery
from evernear.settings import IndexSettings


class TrainedRecognizer(NamedTuple):
    """A network's gallery, and a function that embeds queries with the network."""

    gallery: Gallery
    embed: Embed


def open_recognizer(
    described: TrainedNetwork,
    network: EmbeddingNetwork,
    dataset: Dataset,
    settings: IndexSettings,
    store: Store | None = None,
) -> TrainedRecognizer:
    """The ``network`` that ``described`` describes, as it would be deployed without the classes
    that its training excluded. Features of a frozen backbone are cached in ``store``."""
    held_out = frozenset(described.exclude_labels)
    if described.architecture.frozen:
        from evernear.embedding.features import FrozenFeatures, FrozenHead, HeadEmbedder  # timm takes seconds to import

        features = FrozenFeatures(network, described.architecture, store)
        embed = HeadEmbedder(features, FrozenHead(network).eval()).embed
    else:
        dim = described.architecture.embedding_dim
        whitened = whiten_network(network, dim, dataset, held_out)
        compiled = compile_network(whitened, dataset.shape, chosen_threads())
        embed = ImageVectors(EmbeddingCache(None, "", dim), lambda: compiled).of
    return with_gallery(
        embed,
        described.architecture.embedding_dim,
        described.weights_sha256,
        gallery_of(dataset.manifest, described.architecture.frozen, described.pretrained_sha256),
        dataset,
        settings,
        held_out,
    )


def with_gallery(
    embed: Embed,
    dim: int,
    network_sha256: str,
    joining: dict[str, int],
    dataset: Dataset,
    settings: IndexSettings,
    held_out: frozenset[str],
) -> TrainedRecognizer:
    """``joining`` counts the train images of each label in the gallery. Exporting the network would
    take longer than embedding the gallery."""
    with TemporaryDirectory(prefix="evernear-gallery-") as scratch:
        embeddings, index = Path(scratch) / "embed", Path(scratch) / "index"
        write_embeddings(embed, dim, dataset, embeddings, joining, network_sha256)
        build_index(Embeddings.open(embeddings), dataset.labels, settings.temporary, index, held_out)
        return TrainedRecognizer(Gallery.open(index, network_sha256), embed)
