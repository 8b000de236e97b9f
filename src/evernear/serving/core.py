"""The prediction core: image files in, answers out, whatever server stands around it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evernear.data.image_file import EncodedImage
from evernear.data.preprocess import Pixels
from evernear.embedding.embed import embed_images
from evernear.embedding.export import NETWORK_FILE, load_network
from evernear.errors import DataError
from evernear.index.search import Gallery
from evernear.release.archive_reader import ReleaseParts
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import inspect_image, read_image
from evernear.serving.messages import Neighbor, Prediction, Refusal

WARM_UP_BATCHES = (1, 1, 32, 32)
_OUT_OF_TIME = Refusal(
    code=503, type="Overloaded", message="Large images took all the time for decoding; send the image again."
)


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

    def answer(self, images: Sequence[bytes | Refusal], decode_timeout_s: float = math.inf) -> Answered:
        """`predict`, with the time it took.

        Small images are decoded first. After ``decode_timeout_s`` no further one is: those left get a `Refusal`
        with code 503.
        """
        begin_s = time.perf_counter()
        read = self._read(images, begin_s + decode_timeout_s)
        decoded_s = embedded_s = found_s = time.perf_counter()
        predictions: list[Prediction] = []
        arrays = [each for each in read if not isinstance(each, Refusal)]
        stacked = np.stack(arrays) if arrays else None
        embeddings = None
        if stacked is not None:
            embeddings = embed_images(self._network, stacked)
            embedded_s = time.perf_counter()
            predictions = self._look_up(embeddings)
            found_s = time.perf_counter()
        following = iter(predictions)
        return Answered(
            answers=[each if isinstance(each, Refusal) else next(following) for each in read],
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

    def _read(self, images: Sequence[bytes | Refusal], deadline_s: float) -> list[Pixels | Refusal]:
        files = [image if isinstance(image, Refusal) else self._inspect(image) for image in images]
        read: list[Pixels | Refusal] = [_OUT_OF_TIME] * len(files)
        for number in sorted(range(len(files)), key=lambda number: _pixels(files[number])):
            file = files[number]
            if isinstance(file, Refusal):
                read[number] = file
            elif time.perf_counter() < deadline_s:
                read[number] = self._decode(file)
        return read

    def _inspect(self, image: bytes) -> EncodedImage | Refusal:
        try:
            return inspect_image(image, self._manifest.max_pixels)
        except DataError as error:
            return Refusal(message=str(error))

    def _decode(self, file: EncodedImage) -> Pixels | Refusal:
        try:
            return read_image(file, self._manifest.preprocessing)
        except DataError as error:
            return Refusal(message=str(error))


def _pixels(file: EncodedImage | Refusal) -> int:
    return 0 if isinstance(file, Refusal) else file.pixels
