"""Network, index, labels and threshold, combined as they are served."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evernear.data.preprocess import Preprocessing
from evernear.embedding.embed import embed_images
from evernear.embedding.export import describe_network, load_network
from evernear.index.search import Gallery


@dataclass(frozen=True)
class Recognizer:
    """A release or a candidate. ``name`` is the version of the release, empty for a candidate."""

    network: torch.jit.ScriptModule
    gallery: Gallery
    preprocessing: Preprocessing
    network_sha256: str
    parity_max_abs_difference: float
    name: str = ""

    @staticmethod
    def open(network_dir: Path, index_dir: Path, name: str = "") -> "Recognizer":
        """Open the outputs of the export and index steps. Both may be the same directory.

        Raises:
            IntegrityError: a file is missing or changed, or the index belongs to another network.
        """
        described = describe_network(network_dir)
        return Recognizer(
            network=load_network(network_dir),
            gallery=Gallery.open(index_dir, described.sha256),
            preprocessing=described.preprocessing,
            network_sha256=described.sha256,
            parity_max_abs_difference=described.parity_max_abs_difference,
            name=name,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the input images."""
        return self.preprocessing.shape

    def embed(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embed images (N, H, W, C) as unit vectors (N, D)."""
        return embed_images(self.network, images)
