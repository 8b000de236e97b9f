"""The predictor of an InferenceService: one release, by KServe's v1 and v2 protocols, REST and gRPC.

::

    python -m evernear.serving.kserve.predictor --model_dir DIRECTORY --http_port 8080 --grpc_port 8081
"""

import argparse

import numpy as np

from evernear.data.preprocess import Pixels
from evernear.release.manifest import ReleaseManifest
from evernear.serving.core import Core
from evernear.serving.kserve.messages import Images
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.server import arguments, run, serve
from evernear.serving.kserve.sources import opened_release
from evernear.serving.messages import Prediction, Refusal


class Predictor(ReleaseModel):
    """The prediction core as a KServe model; ``core`` is loaded and warmed up."""

    def __init__(self, core: Core, manifest: ReleaseManifest, args: argparse.Namespace) -> None:
        super().__init__(manifest, args)
        self._core = core

    async def prepare(self, images: Images) -> list[Pixels | Refusal] | Pixels:
        """Image files as pixels; pixels that a transformer prepared as they are."""
        return await self.decode(images) if isinstance(images, list) else images

    async def answer(
        self, prepared: list[Pixels | Refusal] | Pixels, headers: dict[str, str] | None
    ) -> list[Prediction | Refusal]:
        """Recognize those that could be read."""
        return await self.in_worker(self._recognise, prepared)

    def _recognise(self, prepared: list[Pixels | Refusal] | Pixels) -> list[Prediction | Refusal]:
        pixels = [image for image in prepared if not isinstance(image, Refusal)]
        predictions = iter(self._core.recognise(np.stack(pixels)) if pixels else [])
        return [image if isinstance(image, Refusal) else next(predictions) for image in prepared]


def main(args: argparse.Namespace) -> None:
    """Load the release, then listen."""
    with opened_release(args) as parts:
        core = Core.open(parts)
    serve(Predictor(core, parts.manifest, args), args)


if __name__ == "__main__":
    run(main, arguments("KServe predictor: one release, by the v1 and v2 protocols."))
