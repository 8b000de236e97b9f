"""The predictor of an InferenceService serves one release over KServe's v1 protocol (REST) and v2
protocol (REST and gRPC).

::

    python -m evernear.serving.kserve.predictor --model_dir DIRECTORY --http_port 8080 --grpc_port 8081
"""  # noqa: W505

import argparse
import logging

import numpy as np
from grpc_interceptor.exceptions import Unavailable
from prometheus_client import Histogram

from evernear.data.preprocess import Pixels
from evernear.errors import StoreError
from evernear.serving.core import Predictor
from evernear.serving.decoding import OverloadedError
from evernear.serving.kserve.batching import Batcher
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.protocols import Images
from evernear.serving.kserve.server import arguments, release_source, run_command, serve_kserve
from evernear.serving.metrics import BATCH_SIZE_BOUNDS
from evernear.serving.responses import Prediction, Rejection

Prepared = list[Pixels | Rejection] | Pixels
_BATCH_IMAGES = Histogram(
    "evernear_batch_images", "Images recognized together.", ["model_name"], buckets=BATCH_SIZE_BOUNDS
)
_log = logging.getLogger(__name__)


class PredictorModel(ReleaseModel):
    """A loaded `Predictor` as a KServe model."""

    service = "evernear-predictor"
    spans = ("predict", "decode", "recognize")

    def __init__(self, predictor: Predictor, args: argparse.Namespace) -> None:
        super().__init__(predictor.manifest, args)
        self._predictor = predictor
        # One batch at a time runs on all cores. The event loop stays free for probes.
        self._recognizer = Batcher(self._recognize, batch_size=args.batch_size, max_waiting=args.queue_size)
        self._batch_images = _BATCH_IMAGES.labels(self.name)

    async def prepare(self, images: Images) -> Prepared:
        """Decode image files. Pixels that a transformer has prepared are returned unchanged."""
        return await self.decode(images) if isinstance(images, list) else images

    async def recognize(self, prepared: Prepared, headers: dict[str, str] | None) -> list[Prediction | Rejection]:
        """Recognize the images in a batch with those of concurrent requests."""
        try:
            return await self._recognizer.run(prepared, len(prepared))
        except OverloadedError as error:
            raise Unavailable(str(error)) from None

    def _recognize(self, batch: list[Prepared]) -> list[list[Prediction | Rejection]]:
        pixels = [image for prepared in batch for image in prepared if not isinstance(image, Rejection)]
        self._batch_images.observe(len(pixels))
        try:
            predictions = iter(self._predictor.predict_pixels(np.stack(pixels)) if pixels else [])
        except StoreError as error:  # the vectors are on a server that may fail
            _log.error("%s", error)
            raise Unavailable("The gallery cannot be searched at the moment; send the image again.") from None
        return [
            [image if isinstance(image, Rejection) else next(predictions) for image in prepared] for prepared in batch
        ]


def main(args: argparse.Namespace) -> None:
    with release_source(args).unpacked() as release:
        predictor = Predictor.open(release)
    serve_kserve(PredictorModel(predictor, args), args)


if __name__ == "__main__":
    run_command(main, arguments("KServe predictor: one release over the v1 and v2 protocols."))
