"""The predictor of an InferenceService: one release, by KServe's v1 and v2 protocols, REST and gRPC.

::

    python -m evernear.serving.kserve.predictor --model_dir DIRECTORY --http_port 8080 --grpc_port 8081
"""

import argparse

from evernear.release.manifest import ReleaseManifest
from evernear.serving.core import Core
from evernear.serving.kserve.messages import Images
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.server import arguments, run, serve
from evernear.serving.kserve.sources import opened_release
from evernear.serving.messages import Prediction, Refusal


class Predictor(ReleaseModel):
    """The prediction core as a KServe model; ``core`` is loaded and warmed up."""

    def __init__(self, name: str, core: Core, manifest: ReleaseManifest, max_images: int) -> None:
        super().__init__(name, manifest, max_images)
        self._core = core

    async def prepare(self, images: Images) -> Images:
        """The core takes them as they are."""
        return images

    async def answer(self, prepared: Images, headers: dict[str, str] | None) -> list[Prediction | Refusal]:
        """Recognise image files, or pixels that a transformer prepared."""
        return await self.in_worker(self._recognise, prepared)

    def _recognise(self, images: Images) -> list[Prediction | Refusal]:
        if isinstance(images, list):
            return self._core.predict(images)
        return [*self._core.recognise(images)] if len(images) else []


def main(args: argparse.Namespace) -> None:
    """Load the release, then listen."""
    with opened_release(args) as parts:
        core = Core.open(parts)
    serve(Predictor(args.model_name, core, parts.manifest, args.max_images), args)


if __name__ == "__main__":
    run(main, arguments("KServe predictor: one release, by the v1 and v2 protocols."))
