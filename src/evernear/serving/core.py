import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evernear.common.processes import chosen_threads
from evernear.data.preprocess import Pixels
from evernear.embedding.data_loader import embed_images
from evernear.embedding.export import load_network
from evernear.embedding.network import Network
from evernear.errors import StoreError
from evernear.index.search import Gallery
from evernear.release.archive_reader import ReleaseParts
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import TINY_PIXELS, decode_image, inspect_image, or_rejection, pixel_count
from evernear.serving.responses import Neighbor, Prediction, Rejection

WARM_UP_BATCHES = (1, 1, 32, 32)
_OUT_OF_TIME = Rejection(
    code=503, type="Overloaded", message="Decoding large images took too long; send the image again."
)
_NO_GALLERY = Rejection(
    code=503, type="GalleryUnavailable", message="The gallery cannot be searched at the moment; send the image again."
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchResult:
    """The responses to a batch, in request order, and the duration of each stage.

    ``images`` (N, H, W, C) and ``embeddings`` (N, D) have one row for each decoded image.
    """

    responses: list[Prediction | Rejection]
    images: NDArray[np.uint8] | None
    embeddings: NDArray[np.float32] | None
    decode_s: float
    network_s: float
    search_s: float


class Predictor:
    """A loaded release. Each batch runs the network once and searches the gallery once."""

    def __init__(self, network: Network, gallery: Gallery, manifest: ReleaseManifest) -> None:
        self._network = network
        self._gallery = gallery
        self.manifest = manifest
        self._threads = ThreadPoolExecutor(chosen_threads(), "decode")

    @staticmethod
    def open(release: ReleaseParts) -> "Predictor":
        """Load a verified release, and warm up the network. Its files are not needed afterwards."""
        gallery = Gallery.open(release.directory, release.manifest.network_sha256)
        predictor = Predictor(load_network(release.directory), gallery, release.manifest)
        shape = release.manifest.preprocessing
        for size in WARM_UP_BATCHES:
            predictor.predict_pixels(np.zeros((size, shape.height_px, shape.width_px, shape.channels), np.uint8))
        return predictor

    def predict(self, images: Sequence[bytes | Rejection]) -> list[Prediction | Rejection]:
        """Recognize PNG, JPEG, WebP or HEIC files. An invalid file gets a `Rejection`. One passed
        in place of a file is returned at the same position."""
        return self.predict_batch(images).responses

    def predict_batch(
        self,
        images: Sequence[bytes | Pixels | Rejection],
        decode_timeout_s: float = math.inf,
        batch_size: int | None = None,
    ) -> BatchResult:
        """Like `predict`, with the duration of each stage. An image may also be the pixels that
        the release's preprocessing makes of a file. The network gets at most ``batch_size`` images
        at a time.

        Small images are decoded first. An image whose decoding has not started within
        ``decode_timeout_s`` gets a `Rejection` with code 503.
        """
        start_s = time.perf_counter()
        pixels_or_rejections = self._decode_all(images, start_s + decode_timeout_s)
        decoded_s = embedded_s = searched_s = time.perf_counter()
        arrays = [item for item in pixels_or_rejections if not isinstance(item, Rejection)]
        stacked = np.stack(arrays) if arrays else None
        embeddings = None
        predictions: Sequence[Prediction | Rejection] = []
        if stacked is not None:
            size = batch_size or len(stacked)
            parts = [embed_images(self._network, stacked[at : at + size]) for at in range(0, len(stacked), size)]
            embeddings = np.concatenate(parts)
            embedded_s = time.perf_counter()
            predictions = self._try_search(embeddings)
            searched_s = time.perf_counter()
        remaining = iter(predictions)
        return BatchResult(
            responses=[item if isinstance(item, Rejection) else next(remaining) for item in pixels_or_rejections],
            images=stacked,
            embeddings=embeddings,
            decode_s=decoded_s - start_s,
            network_s=embedded_s - decoded_s,
            search_s=searched_s - embedded_s,
        )

    def predict_pixels(self, images: NDArray[np.uint8]) -> list[Prediction]:
        """Recognize a uint8 array of shape (N, H, W, C) with the size and channels that the
        release's preprocessing specifies."""
        return self._search(embed_images(self._network, images))

    def _try_search(self, embeddings: NDArray[np.float32]) -> Sequence[Prediction | Rejection]:
        try:
            return self._search(embeddings)
        except StoreError as error:  # the vectors are on a server
            _log.error("%s", error)
            return [_NO_GALLERY] * len(embeddings)

    def _search(self, embeddings: NDArray[np.float32]) -> list[Prediction]:
        return [
            Prediction(
                pred=result.pred,
                dist=result.dist,
                unknown=result.unknown,
                neighbors=tuple(Neighbor(label=near.label, dist=near.dist, row=near.row) for near in result.neighbors),
                version=self.manifest.version,
            )
            for result in self._gallery.recognize(embeddings)
        ]

    def _decode_all(self, images: Sequence[bytes | Pixels | Rejection], deadline_s: float) -> list[Pixels | Rejection]:
        limit = self.manifest.max_pixels
        files = [
            image if isinstance(image, np.ndarray) else or_rejection(inspect_image, image, limit) for image in images
        ]

        def decode(number: int) -> Pixels | Rejection:
            file = files[number]
            if isinstance(file, np.ndarray):
                return file
            if isinstance(file, Rejection) or time.perf_counter() < deadline_s:
                return or_rejection(decode_image, file, self.manifest.preprocessing)
            return _OUT_OF_TIME

        decoded: list[Pixels | Rejection] = [_OUT_OF_TIME] * len(files)
        for numbers in _decoded_together(list(map(pixel_count, files)), self.manifest.max_pixels):
            is_tiny = pixel_count(files[numbers[-1]]) <= TINY_PIXELS  # would take longer to pass to a thread
            for number, pixels in zip(numbers, (map if is_tiny else self._threads.map)(decode, numbers), strict=True):
                decoded[number] = pixels
        return decoded


def _decoded_together(pixels: Sequence[int], max_pixels: int) -> Iterator[list[int]]:
    """Yield the positions of images, smallest first, in groups that together take no more memory to
    decode than the largest image may."""
    group: list[int] = []
    total = 0
    for number in sorted(range(len(pixels)), key=pixels.__getitem__):
        if group and total + pixels[number] > max_pixels:
            yield group
            group, total = [], 0
        group.append(number)
        total += pixels[number]
    if group:
        yield group
