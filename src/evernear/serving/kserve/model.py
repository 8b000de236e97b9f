"""The base class of the predictor and the transformer: a KServe model for one release."""

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from grpc_interceptor.exceptions import ResourceExhausted, Unavailable
from kserve import Model
from kserve.metrics import POST_HIST_TIME, PRE_HIST_TIME, PREDICT_HIST_TIME, get_labels
from kserve.model import InferenceVerb
from prometheus_client import Counter, Gauge

from evernear.data.encoded_image import EncodedImage
from evernear.data.preprocess import Pixels
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import (
    SMALL_PIXELS,
    SMALL_THREADS,
    TINY_BYTES,
    TINY_PIXELS,
    DecodePool,
    OverloadedError,
    decode_image,
    inspect_image,
    or_rejection,
    pixel_count,
)
from evernear.serving.kserve.batching import Batcher
from evernear.serving.kserve.protocols import Images, Tensors, build_response, input_types, output_types, parse_request
from evernear.serving.responses import Prediction, Rejection
from evernear.serving.tracing import TRACE_FIELD, request_span, span, tracer

MAX_LARGEST_IMAGES = 4
"""Maximum number of pixels in one request, as a multiple of the limit for one image."""
SMALL_BATCH_BYTES = 256 * 1024
"""Maximum total size of the image files that one thread decodes together."""
_IMAGES = Counter("evernear_images", "Images answered, by outcome.", ["model_name", "outcome"])
_RELEASE = Gauge("evernear_release_info", "1 for the loaded release.", ["model_name", "version"])
Decoded = tuple[list[EncodedImage | Rejection], list[Pixels | Rejection]]
"""Inspected files that remain to be decoded, and decoded images."""
Source = TypeVar("Source")
Parameter = TypeVar("Parameter")
Result = TypeVar("Result")


class ReleaseModel(Model):
    """A model with the steps that KServe calls and measures for each request: `preprocess`,
    `predict` and `postprocess`.

    Errors are raised as `grpc_interceptor` exceptions, which REST and gRPC convert to status codes.
    """

    service: str
    """The name of the server in traces."""
    spans: tuple[str, str, str]
    """The names of the spans for the whole request, for `prepare` and for `recognize`."""

    def __init__(self, manifest: ReleaseManifest, args: argparse.Namespace) -> None:
        name: str = args.model_name
        super().__init__(name)
        self.manifest = manifest
        self.shape = manifest.preprocessing
        self._max_images: int = args.max_images
        # The release and this server's memory limit the number of pixels.
        self._max_pixels = min(manifest.max_pixels, args.max_pixels)
        self._decoding = DecodePool(args.large_decodes)
        # The limit on in-flight request bodies also limits this queue.
        self._small = Batcher(
            self._decode_those_small,
            batch_size=SMALL_BATCH_BYTES,
            max_waiting=args.max_bodies_size_bytes,
            threads=SMALL_THREADS,
        )
        self._tracer = tracer(self.service)
        labels = get_labels(name)
        self._stages_s = [times.labels(**labels) for times in (PRE_HIST_TIME, PREDICT_HIST_TIME, POST_HIST_TIME)]
        self.ready = True
        _RELEASE.labels(name, manifest.version).set(1)

    @abstractmethod
    async def prepare(self, images: Images) -> Any:
        """Convert the images of one request to the input of `recognize`."""

    @abstractmethod
    async def recognize(self, prepared: Any, headers: dict[str, str] | None) -> list[Prediction | Rejection]:
        """Recognize prepared images. ``headers`` are the request headers."""

    async def can_predict(self) -> bool:
        """For readiness probes."""
        return self.ready

    async def decode(self, images: list[bytes | Rejection]) -> list[Pixels | Rejection]:
        """Decode images to uint8 arrays of shape (H, W, C).

        Raises:
            ResourceExhausted: the images together have too many pixels.
            Unavailable: too many images from other requests are waiting.
        """
        size_bytes = sum(len(image) for image in images if isinstance(image, bytes))
        try:
            if len(images) == 1 and size_bytes <= TINY_BYTES:
                files, decoded = self._decode_if_small(images, TINY_PIXELS)
            else:
                files, decoded = await self._small.run(images, size_bytes)
            for group in _groups(files):
                pixels = sum(map(pixel_count, group))
                decoded += await self._decoding.run(size_bytes, pixels, _each, decode_image, group, self.shape)
        except OverloadedError as error:
            raise Unavailable(str(error)) from None
        return decoded

    def _decode_those_small(self, requests: list[list[bytes | Rejection]]) -> list[Decoded | Exception]:
        """An exception affects only the request that raised it."""

        def decode(images: list[bytes | Rejection]) -> Decoded | Exception:
            try:
                return self._decode_if_small(images)
            except Exception as error:
                return error

        return [decode(images) for images in requests]

    def _decode_if_small(self, images: list[bytes | Rejection], small_pixels: int = SMALL_PIXELS) -> Decoded:
        """Decode images with at most ``small_pixels`` pixels in total in this thread, because
        passing a request to another takes longer. Otherwise return the inspected files."""
        files = _each(inspect_image, images, self._max_pixels)
        pixels, limit = sum(map(pixel_count, files)), MAX_LARGEST_IMAGES * self._max_pixels
        if pixels > limit:
            raise ResourceExhausted(f"The images of the request have more than {limit} pixels together; send fewer.")
        return ([], _each(decode_image, files, self.shape)) if pixels <= small_pixels else (files, [])

    async def __call__(
        self, body: Any, headers: dict[str, str] | None = None, verb: InferenceVerb = InferenceVerb.PREDICT
    ) -> Any:
        """Answer a request within a child span of the client's span."""
        parent, attributes = (headers or {}).get(TRACE_FIELD, ""), {"evernear.release": self.manifest.version}
        with request_span(self._tracer, parent, self.spans[0], **attributes):
            if verb != InferenceVerb.PREDICT or self.enable_latency_logging:
                return await super().__call__(body, headers, verb)
            # KServe's implementation also inspects the model's methods for each request.
            preprocess_s, predict_s, postprocess_s = self._stages_s
            with preprocess_s.time():
                prepared = await self.preprocess(body, headers)
            with predict_s.time():
                results = await self.predict(prepared, headers)
            with postprocess_s.time():
                return await self.postprocess(results, headers), {}

    async def preprocess(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        request = parse_request(payload, self.shape, self._max_images)
        with span(self._tracer, self.spans[1]):
            return request, await self.prepare(request.images)

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        request, prepared = payload
        with span(self._tracer, self.spans[2]):
            return request, await self.recognize(prepared, headers)

    async def postprocess(
        self, result: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """Count the images and build the response."""
        request, results = result
        for answer in results:
            outcome = "refused" if isinstance(answer, Rejection) else "unknown" if answer.unknown else "known"
            _IMAGES.labels(self.name, outcome).inc()
        return build_response(request, results, self.name)

    def validate(self, payload: Any) -> Any:
        """Do nothing, because `preprocess` validates."""
        return payload

    def get_input_types(self) -> Tensors:
        return input_types(self.shape)

    def get_output_types(self) -> Tensors:
        return output_types()


def _each(
    function: Callable[[Source, Parameter], Result], sources: list[Source | Rejection], parameter: Parameter
) -> list[Result | Rejection]:
    return [or_rejection(function, source, parameter) for source in sources]


def _groups(files: list[EncodedImage | Rejection]) -> Iterator[list[EncodedImage | Rejection]]:
    """Group files in order: small ones of up to `SMALL_PIXELS` pixels in total, or a large one."""
    group: list[EncodedImage | Rejection] = []
    pixels = 0
    for file in files:
        if group and pixels + pixel_count(file) > SMALL_PIXELS:
            yield group
            group, pixels = [], 0
        group.append(file)
        pixels += pixel_count(file)
    if group:
        yield group
