"""The predictor of an InferenceService: one release over KServe's v1 and v2 protocols, REST and gRPC.

::

    python -m evernear.serving.kserve.predictor --model_dir DIRECTORY --http_port 8080 --grpc_port 8081
"""

import argparse
import logging

import numpy as np
from grpc_interceptor.exceptions import Unavailable

from evernear.data.preprocess import Pixels
from evernear.errors import StoreError
from evernear.serving.core import Predictor
from evernear.serving.kserve.command import arguments, release_source, run
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.protocols import Images
from evernear.serving.kserve.server import serve
from evernear.serving.responses import Prediction, Rejection

_log = logging.getLogger(__name__)


class PredictorModel(ReleaseModel):
    """A loaded `Predictor` as a KServe model."""

    service = "evernear-predictor"
    spans = ("predict", "decode", "recognize")

    def __init__(self, predictor: Predictor, args: argparse.Namespace) -> None:
        super().__init__(predictor.manifest, args)
        self._predictor = predictor

    async def prepare(self, images: Images) -> list[Pixels | Rejection] | Pixels:
        """Decode image files; pixels that a transformer prepared stay as they are."""
        return await self.decode(images) if isinstance(images, list) else images

    async def recognize(
        self, prepared: list[Pixels | Rejection] | Pixels, headers: dict[str, str] | None
    ) -> list[Prediction | Rejection]:
        """Recognize the images that could be decoded."""
        return await self.in_worker(self._recognize, prepared)

    def _recognize(self, prepared: list[Pixels | Rejection] | Pixels) -> list[Prediction | Rejection]:
        pixels = [image for image in prepared if not isinstance(image, Rejection)]
        try:
            predictions = iter(self._predictor.predict_pixels(np.stack(pixels)) if pixels else [])
        except StoreError as error:  # the vectors are on a server
            _log.error("%s", error)
            raise Unavailable("The gallery cannot be searched at the moment; send the image again.") from None
        return [image if isinstance(image, Rejection) else next(predictions) for image in prepared]


def main(args: argparse.Namespace) -> None:
    """Load the release, then listen."""
    with release_source(args).unpacked() as release:
        predictor = Predictor.open(release)
    serve(PredictorModel(predictor, args), args)


if __name__ == "__main__":
    run(main, arguments("KServe predictor: one release over the v1 and v2 protocols."))
