"""The backend that recognizes images in this process, with one release."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from starlette.exceptions import HTTPException

from evernear.data.preprocess import Pixels
from evernear.errors import StoreError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.core import Predictor
from evernear.serving.decoding import decode_image
from evernear.serving.http.batching import Batcher
from evernear.serving.http.decoder import Decoder, Files
from evernear.serving.http.telemetry import Telemetry
from evernear.serving.responses import Prediction, Rejection
from evernear.serving.tracing import span

Prepared = list[Pixels | Rejection] | Pixels
_log = logging.getLogger(__name__)


class Local:
    """A loaded `Predictor`, which recognizes the images of concurrent requests in batches."""

    accepts_pixels = True

    def __init__(
        self,
        predictor: Predictor,
        test_image: bytes,
        telemetry: Telemetry,
        limits: tuple[int, int],
        batch_size: int,
        queue_size: int,
    ) -> None:
        """``limits`` are those of the `Decoder`."""
        self._predictor = predictor
        self._test_image = test_image
        self._telemetry = telemetry
        self._decoder = Decoder(decode_image, *limits)
        # One batch at a time runs on all cores. The event loop stays free for probes.
        self._thread = ThreadPoolExecutor(1, "batch")
        self._recognizer = Batcher(self._in_thread, batch_size=batch_size, max_waiting=queue_size)
        telemetry.release.info({"version": predictor.manifest.version, "engine": predictor.manifest.engine})

    async def expected_release(self) -> ReleaseManifest:
        return self._predictor.manifest

    live_release = expected_release

    async def test_image(self) -> bytes:
        return self._test_image

    async def recognize(self, images: Files | Pixels) -> list[Prediction | Rejection]:
        """Recognize image files, or pixels that another server has prepared."""
        telemetry = self._telemetry
        with telemetry.prepare_s.time(), span(telemetry.tracer, "decode"):
            prepared = await self._decoder.run(images, self._predictor.manifest) if isinstance(images, list) else images
        with telemetry.predict_s.time(), span(telemetry.tracer, "recognize"):
            return await self._recognizer.run(prepared, len(prepared))

    async def aclose(self) -> None:
        self._decoder.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _in_thread(self, batch: list[Prepared]) -> asyncio.Future[list[list[Prediction | Rejection]]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._recognize, batch)

    def _recognize(self, batch: list[Prepared]) -> list[list[Prediction | Rejection]]:
        pixels = [image for prepared in batch for image in prepared if not isinstance(image, Rejection)]
        self._telemetry.batch_images.observe(len(pixels))
        try:
            predictions = iter(self._predictor.predict_pixels(np.stack(pixels)) if pixels else [])
        except StoreError as error:  # the vectors are on a server that may fail
            _log.error("%s", error)
            raise HTTPException(503, "The gallery cannot be searched at the moment; send the image again.") from None
        return [
            [image if isinstance(image, Rejection) else next(predictions) for image in prepared] for prepared in batch
        ]
