"""The system as it is served: network, index, labels and threshold in one."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evernear.embedding.embed import embed_images
from evernear.embedding.export import describe_network, load_network
from evernear.index.search import Gallery


@dataclass(frozen=True)
class Recogniser:
    """What a release answers with. ``name`` is the release's version, or empty for one that has none yet."""

    network: torch.jit.ScriptModule
    gallery: Gallery
    shape: tuple[int, int, int]
    """Height, width and channels of the images it takes."""
    network_sha256: str
    parity_max_abs_difference: float
    name: str = ""

    @staticmethod
    def open(network_dir: Path, index_dir: Path, name: str = "") -> "Recogniser":
        """From what the export and the index step left; both may be the same directory.

        Raises:
            IntegrityError: a part is missing or changed, or another network made the index's vectors.
        """
        described = describe_network(network_dir)
        preprocessing = described.preprocessing
        return Recogniser(
            network=load_network(network_dir),
            gallery=Gallery.open(index_dir, described.sha256),
            shape=preprocessing.shape,
            network_sha256=described.sha256,
            parity_max_abs_difference=described.parity_max_abs_difference,
            name=name,
        )

    def embed(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images (N, H, W, C) as unit vectors (N, D)."""
        return embed_images(self.network, images)
