"""The prediction core: image files in, answers out, whatever server stands around it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evernear.data.preprocess import decode, to_array
from evernear.embedding.embed import embed_images
from evernear.embedding.export import NETWORK_FILE, load_network
from evernear.errors import DataError
from evernear.index.search import Gallery
from evernear.release.manifest import ReleaseManifest
from evernear.release.parts import ReleaseParts
from evernear.serving.messages import Neighbor, Prediction, Refusal

WARM_UP_BATCHES = (1, 1, 32, 32)


class Core:
    """One release, loaded: a network call and a search for each batch."""

    def __init__(self, network: torch.nn.Module, gallery: Gallery, manifest: ReleaseManifest) -> None:
        self._network = network
        self._gallery = gallery
        self._manifest = manifest

    @staticmethod
    def open(parts: ReleaseParts) -> "Core":
        """Load a release whose parts were checked, and warm it up.

        Raises:
            IntegrityError: the index was made by another network.
        """
        gallery = Gallery.open(parts.directory, parts.manifest.network_sha256)
        core = Core(load_network(parts.directory / NETWORK_FILE), gallery, parts.manifest)
        shape = parts.manifest.preprocessing
        for size in WARM_UP_BATCHES:
            core.recognise(np.zeros((size, shape.height_px, shape.width_px, shape.channels), np.uint8))
        return core

    def predict(self, images: Sequence[bytes | Refusal]) -> list[Prediction | Refusal]:
        """Answer a batch of PNG or JPEG files; a bad one gets a `Refusal`, the others their `Prediction`.

        A request that was refused before it came here may stand in for its image, and is passed through.
        """
        answers: list[Prediction | Refusal | None] = []
        arrays: list[NDArray[np.uint8]] = []
        for image in images:
            read = image if isinstance(image, Refusal) else self._read(image)
            if isinstance(read, Refusal):
                answers.append(read)
            else:
                answers.append(None)
                arrays.append(read)
        predictions = iter(self.recognise(np.stack(arrays)) if arrays else ())
        return [next(predictions) if answer is None else answer for answer in answers]

    def recognise(self, images: NDArray[np.uint8]) -> list[Prediction]:
        """Answer images (N, H, W, C) of uint8 that were brought to the release's shape before."""
        return [
            Prediction(
                pred=found.pred,
                dist=found.dist,
                unknown=found.unknown,
                neighbors=tuple(Neighbor(label=near.label, dist=near.dist) for near in found.neighbors),
                version=self._manifest.version,
            )
            for found in self._gallery.recognise(embed_images(self._network, images))
        ]

    def _read(self, image: bytes) -> NDArray[np.uint8] | Refusal:
        shape = self._manifest.preprocessing
        try:
            decoded = decode(image, self._manifest.max_pixels)
        except DataError as error:
            return Refusal(message=str(error))
        return to_array(decoded, shape.height_px, shape.width_px, shape.channels)
