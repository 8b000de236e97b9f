"""What the predictor and the transformer have in common: a KServe model that stands for one release."""

import argparse
import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from grpc_interceptor.exceptions import ResourceExhausted, Unavailable
from kserve import Model
from prometheus_client import Counter, Gauge

from evernear.data.image_file import EncodedImage
from evernear.data.preprocess import Pixels
from evernear.errors import DataError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import SMALL_PIXELS, DecodePool, OverloadedError, inspect_image, read_image
from evernear.serving.kserve.messages import Images, Tensors, input_types, output_types, read_question, write_answer
from evernear.serving.messages import Prediction, Refusal

MAX_LARGEST_IMAGES = 4
"""The pixels of one request: those of so many images of the largest size."""
_IMAGES = Counter("evernear_images", "Images answered, by outcome.", ["model_name", "outcome"])
Source = TypeVar("Source")
Limit = TypeVar("Limit")
Result = TypeVar("Result")
_RELEASE = Gauge("evernear_release_info", "1 for the release that is loaded.", ["model_name", "version"])


class ReleaseModel(Model):
    """The steps that KServe calls and times for each request: read and prepare, answer, write.

    Errors are `grpc_interceptor` exceptions, which become a status of either protocol.
    """

    def __init__(self, manifest: ReleaseManifest, args: argparse.Namespace) -> None:
        name: str = args.model_name
        super().__init__(name)
        self.manifest = manifest
        self.shape = manifest.preprocessing
        self._max_images: int = args.max_images
        # Not more than the release allows, nor more than this server has memory for.
        self._max_pixels = min(manifest.max_pixels, args.max_pixels)
        self._decoding = DecodePool(args.large_decodes)
        # One at a time: a batch has the cores to itself, and the event loop stays free for probes.
        self._worker = ThreadPoolExecutor(1)
        self.ready = True
        _RELEASE.labels(name, manifest.version).set(1)

    @abstractmethod
    async def prepare(self, images: Images) -> Any:
        """Bring the images of one request to the form that `answer` takes."""

    @abstractmethod
    async def answer(self, prepared: Any, headers: dict[str, str] | None) -> list[Prediction | Refusal]:
        """Recognise them. ``headers`` are those of the request."""

    async def can_answer(self) -> bool:
        """Whether a request would be answered now: what a readiness probe asks."""
        return self.ready

    async def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function``, run in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    async def decode(self, images: list[bytes | Refusal]) -> list[Pixels | Refusal]:
        """The images as pixels (H, W, C) of uint8.

        Raises:
            ResourceExhausted: they have too many pixels together.
            Unavailable: too many large images of other requests wait.
        """
        files = await self._decoding.run(self._inspect, images)
        limit = MAX_LARGEST_IMAGES * self._max_pixels
        if sum(map(_pixels, files)) > limit:
            raise ResourceExhausted(f"The images of the request have more than {limit} pixels together; send fewer.")
        decoded: list[Pixels | Refusal] = []
        try:
            for group in _groups(files):
                decoded += await self._decoding.run_sized(sum(map(_pixels, group)), self._read, group)
        except OverloadedError as error:
            raise Unavailable(str(error)) from None
        return decoded

    def _inspect(self, images: list[bytes | Refusal]) -> list[EncodedImage | Refusal]:
        return [_or_refusal(inspect_image, image, self._max_pixels) for image in images]

    def _read(self, files: list[EncodedImage | Refusal]) -> list[Pixels | Refusal]:
        return [_or_refusal(read_image, file, self.shape) for file in files]

    async def preprocess(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        """KServe's first step."""
        question = read_question(payload, self.shape, self._max_images)
        return question, await self.prepare(question.images)

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """KServe's second step."""
        question, prepared = payload
        return question, await self.answer(prepared, headers)

    async def postprocess(
        self, result: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """KServe's third step."""
        question, answers = result
        for answer in answers:
            outcome = "refused" if isinstance(answer, Refusal) else "unknown" if answer.unknown else "known"
            _IMAGES.labels(self.name, outcome).inc()
        return write_answer(question, answers, self.name)

    def validate(self, payload: Any) -> Any:
        """`preprocess` has validated it."""
        return payload

    def get_input_types(self) -> Tensors:
        """For the protocol's model metadata."""
        return input_types(self.shape)

    def get_output_types(self) -> Tensors:
        """For the protocol's model metadata."""
        return output_types()


def _or_refusal(read: Callable[[Source, Limit], Result], source: Source | Refusal, limit: Limit) -> Result | Refusal:
    if isinstance(source, Refusal):
        return source
    try:
        return read(source, limit)
    except DataError as error:
        return Refusal(message=str(error))


def _pixels(file: EncodedImage | Refusal) -> int:
    return 0 if isinstance(file, Refusal) else file.pixels


def _groups(files: list[EncodedImage | Refusal]) -> Iterator[list[EncodedImage | Refusal]]:
    """The files in their order: small ones together, up to the pixels of a small image; large ones alone."""
    group: list[EncodedImage | Refusal] = []
    pixels = 0
    for file in files:
        if group and pixels + _pixels(file) > SMALL_PIXELS:
            yield group
            group, pixels = [], 0
        group.append(file)
        pixels += _pixels(file)
    if group:
        yield group
