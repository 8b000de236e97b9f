"""The prediction core: image files in, answers out, whatever server stands around it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answered:
    """The answers to a batch, in its order, and the seconds that went into each stage of the work.

    ``images`` (N, H, W, C) and ``embeddings`` (N, D) are those of the N images that were predicted.
    """

    answers: list[Prediction | Refusal]
    images: NDArray[np.uint8] | None
    embeddings: NDArray[np.float32] | None
    decode_s: float
    network_s: float
    search_s: float


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
        return self.answer(images).answers

    def answer(self, images: Sequence[bytes | Refusal]) -> Answered:
        """`predict`, with the time it took."""
        begin_s = time.perf_counter()
        answers: list[Prediction | Refusal | None] = []
        arrays: list[NDArray[np.uint8]] = []
        for image in images:
            read = image if isinstance(image, Refusal) else self._read(image)
            if isinstance(read, Refusal):
                answers.append(read)
            else:
                answers.append(None)
                arrays.append(read)
        decoded_s = embedded_s = found_s = time.perf_counter()
        predictions: list[Prediction] = []
        stacked = np.stack(arrays) if arrays else None
        embeddings = None
        if stacked is not None:
            embeddings = embed_images(self._network, stacked)
            embedded_s = time.perf_counter()
            predictions = self._look_up(embeddings)
            found_s = time.perf_counter()
        following = iter(predictions)
        return Answered(
            answers=[next(following) if answer is None else answer for answer in answers],
            images=stacked,
            embeddings=embeddings,
            decode_s=decoded_s - begin_s,
            network_s=embedded_s - decoded_s,
            search_s=found_s - embedded_s,
        )

    def recognise(self, images: NDArray[np.uint8]) -> list[Prediction]:
        """Answer images (N, H, W, C) of uint8 that were brought to the release's shape before."""
        return self._look_up(embed_images(self._network, images))

    def _look_up(self, embeddings: NDArray[np.float32]) -> list[Prediction]:
        return [
            Prediction(
                pred=found.pred,
                dist=found.dist,
                unknown=found.unknown,
                neighbors=tuple(Neighbor(label=near.label, dist=near.dist) for near in found.neighbors),
                version=self._manifest.version,
            )
            for found in self._gallery.recognise(embeddings)
        ]

    def _read(self, image: bytes) -> NDArray[np.uint8] | Refusal:
        shape = self._manifest.preprocessing
        try:
            decoded = decode(image, self._manifest.max_pixels)
            return to_array(decoded, shape.height_px, shape.width_px, shape.channels)
        except DataError as error:
            return Refusal(message=str(error))
        except Exception:  # whatever a decoder makes of a hostile file, its neighbours get their answers
            _log.exception("An image of %d bytes raised what its decoder never should.", len(image))
            return Refusal(message="The image cannot be decoded.")
