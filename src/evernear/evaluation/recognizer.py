"""A network, an index, labels and a threshold, combined as in serving."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.store import Store
from evernear.data.manifest import Split
from evernear.data.preprocess import Preprocessing
from evernear.data.shards import Block, Dataset
from evernear.embedding.data_loader import embed_images
from evernear.embedding.embed import ExportedEmbedder
from evernear.embedding.export import describe_network, load_network
from evernear.embedding.network import Network
from evernear.index.search import Gallery


@dataclass(frozen=True)
class Recognizer:
    """A release or a candidate. ``name`` is the version of the release, or an empty string for a
    candidate."""

    network_dir: Path
    gallery: Gallery
    preprocessing: Preprocessing
    network_sha256: str
    parity_max_abs_difference: float
    embedder: ExportedEmbedder
    name: str = ""

    @staticmethod
    def open(network_dir: Path, index_dir: Path, name: str = "", store: Store | None = None) -> "Recognizer":
        """Open the outputs of the export step and the index step, which may be in the same
        directory.

        If ``store`` is set, the embeddings of datasets are cached in it.

        Raises:
            IntegrityError: a file is missing or was changed, or the index belongs to a
                different network.
        """
        described = describe_network(network_dir)
        return Recognizer(
            network_dir=network_dir,
            gallery=Gallery.open(index_dir, described.sha256),
            preprocessing=described.preprocessing,
            network_sha256=described.sha256,
            parity_max_abs_difference=described.parity_max_abs_difference,
            embedder=ExportedEmbedder(network_dir, store),
            name=name,
        )

    @cached_property
    def network(self) -> Network:
        return load_network(self.network_dir)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and number of channels of the input images."""
        return self.preprocessing.shape

    def embed(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embed images (N, H, W, C) as unit vectors (N, D)."""
        return embed_images(self.network, images)

    def embed_split(
        self, dataset: Dataset, split: Split, batch_size: int
    ) -> Iterator[tuple[Block, NDArray[np.float32]]]:
        """Yield the blocks of ``split`` in order, each with its embeddings (N, D)."""
        shards = dataset.shards(split)
        return self.embedder.embed((dataset.shard_blocks(shard, batch_size), shard.count) for shard in shards)
