"""Prepare images as the live release specifies, and have the predictor recognize them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from evernear.common.store import open_store
from evernear.data.encoded_image import EncodedImage
from evernear.errors import (
    EvernearError,
    IntegrityError,
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
    StoreError,
)
from evernear.release.archive_reader import SmokeQuery
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving.client import AsyncClient, Target
from evernear.serving.decoding import DecodePool, encode_png, inspect_image, prepare
from evernear.serving.release_source import ReleaseSource
from evernear.serving.request_parsing import image_from_json
from evernear.serving.responses import Metadata, Prediction
from evernear.serving.tracing import span, tracer
from evernear.settings import Settings
from evernear.settings.serving import LARGE_DECODES, MODEL_NAME, PREP_TIMEOUT_S

ATTEMPTS = 4  # to reach the predictor for a request, while a pod is replaced; gRPC allows 5
IN_FLIGHT = 64  # concurrent requests to the predictor, two full batches; others wait
MATCHING_ATTEMPTS = 3  # releases may change while one request is answered
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Result = TypeVar("Result")


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "evernear_prep_requests", "Requests by path and status.", ("path", "status"), registry=registry
        )
        self.prepare_s = Histogram(
            "evernear_prep_prepare_seconds", "Decode, resize, encode.", registry=registry, buckets=SECONDS
        )
        self.predictor_s = Histogram(
            "evernear_prep_predictor_seconds",
            "Calls of the predictor, including retries.",
            registry=registry,
            buckets=SECONDS,
        )
        self.failures = Counter(
            "evernear_prep_predictor_failures", "Failed calls of the predictor.", ("reason",), registry=registry
        )
        self.in_flight = Gauge("evernear_prep_in_flight", "Requests at the predictor.", registry=registry)
        self.release = Info("evernear_prep_release", "The live release.", registry=registry)


class PrepService:
    """Recognizes images with the predictor of ``settings``.

    The service is bound to the event loop in which it is created. Each prediction names the release
    that made it, and is valid only if the image was prepared as this release specifies. If the
    preprocessing differs, for example after a rollout, the image is prepared and sent again. The
    service therefore never returns a prediction for an image with the wrong preprocessing, and a
    rollout that does not change it causes no extra work.
    """

    def __init__(self, settings: Settings, *, embeddings: bool = False) -> None:
        """If ``embeddings`` is set, predictions contain the image's embedding."""
        self._embeddings = embeddings
        self._store_uri = settings.store_uri
        self._predictors = [AsyncClient(target) for target in targets_of(settings)]
        self._releases = Releases(settings.store_uri)
        self._latest: ReleaseManifest | None = None  # the release of the latest prediction
        self._max_pixels = settings.serving.max_pixels
        self._decoding = DecodePool(LARGE_DECODES)
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self.metrics = Metrics()
        self.tracer = tracer("evernear-prep")

    async def predict(self, body: bytes) -> Prediction:
        """Recognize the image in the body of a request.

        Raises:
            RequestError, DataError: the request or its image is invalid.
            ServerTimeoutError: the prediction takes longer than `PREP_TIMEOUT_S`.
            OverloadedError: too many large images are waiting.
            ServingError: the predictor is unreachable or fails, or the preprocessing of its release
                is unavailable.
            StoreError: the registry is unreachable.
        """
        return await self._in_time(self._predict(lambda body, limit: inspect_image(image_from_json(body), limit), body))

    async def predict_image(self, image: bytes) -> Prediction:
        """Raises the errors of `predict`, except `RequestError`."""
        return await self._in_time(self._predict(inspect_image, image))

    async def test(self) -> Prediction:
        """Recognize a stored image of the live release. Raises the errors of `predict`."""

        async def predict_stored() -> Prediction:
            image, _ = await self._releases.test_query((await self._live_release()).version)
            return await self._predict(inspect_image, image)

        return await self._in_time(predict_stored())

    async def live_release(self) -> ReleaseManifest:
        """Test this server and the predictor with a blank image. Raises the errors of `predict`."""
        return await self._in_time(self._live_release())

    async def metadata(self) -> Metadata:
        """Describe the live release. Raises the errors of `predict`."""
        return Metadata.of(await self.live_release(), MODEL_NAME)

    async def close(self) -> None:
        self._decoding.close()
        for predictor in self._predictors:
            await predictor.close()

    async def _in_time(self, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(PREP_TIMEOUT_S):
                return await work
        except TimeoutError:
            raise ServerTimeoutError(f"No prediction within {PREP_TIMEOUT_S:g} s.") from None

    async def _live_release(self) -> ReleaseManifest:
        prediction = await self._predict(inspect_image, blank(await self._expected_release()))
        return await self._releases.manifest(prediction.version)

    async def _predict(self, inspect: Callable[[bytes, int], EncodedImage], data: bytes) -> Prediction:
        expected = await self._expected_release()
        # The release and this server's memory limit the number of pixels.
        limit = min(expected.max_pixels, self._max_pixels)
        file = await self._decoding.run(len(data), 0, inspect, data, limit)
        for _ in range(MATCHING_ATTEMPTS):
            with self.metrics.prepare_s.time(), span(self.tracer, "prepare"):
                prepared = await self._decoding.run(len(file.data), file.pixels, prepare, file, expected.preprocessing)
            prediction = await self._call_predictor(prepared)
            actual = await self._actual_release(prediction.version)
            if actual.preprocessing == expected.preprocessing:
                return prediction
            expected = actual
        raise ServingError("The predictor's release changes faster than an image can be prepared; try again.")

    async def _expected_release(self) -> ReleaseManifest:
        """The release that made the latest prediction, or the champion before the first."""
        if self._latest is None:
            self._latest = await self._releases.champion()
        return self._latest

    async def _actual_release(self, version: str) -> ReleaseManifest:
        if self._latest is None or version != self._latest.version:
            try:
                self._latest = await self._releases.manifest(version)
            except (StoreError, IntegrityError) as error:
                raise ServingError(
                    f"The predictor answers with release {version}, whose preprocessing is not available from "
                    f"{self._store_uri}, so its prediction may be wrong: {error}"
                ) from None
        self.metrics.release.info({"version": version})
        return self._latest

    async def _call_predictor(self, prepared: bytes) -> Prediction:
        async with self._slots:
            with (
                self.metrics.in_flight.track_inprogress(),
                self.metrics.predictor_s.time(),
                span(self.tracer, "call predictor"),
            ):
                try:
                    return await self._first_reachable(prepared)
                except PredictionRejectedError as error:
                    raise ServingError(f"The predictor rejects the requests of this server: {error}") from None
                except EvernearError as error:
                    self.metrics.failures.labels(type(error).__name__).inc()
                    raise

    async def _first_reachable(self, prepared: bytes) -> Prediction:
        *preferred, last = self._predictors
        for predictor in preferred:
            with suppress(ServerUnreachableError):
                return await predictor.predict(prepared, embedding=self._embeddings)
        return await last.predict(prepared, embedding=self._embeddings)


def blank(manifest: ReleaseManifest) -> bytes:
    """A black PNG image in the size that the release expects."""
    shape = manifest.preprocessing
    return encode_png(np.zeros((shape.height_px, shape.width_px, shape.channels), np.uint8))


def targets_of(settings: Settings) -> list[Target]:
    """The predictors to call, in order, each if those before it are unreachable."""
    prep = settings.prep
    hosts = [host for host in (prep.predictor_host, prep.predictor_fallback_host) if host]
    targets = [Target.remote(settings, host, "grpc", tls=prep.predictor_tls) for host in hosts]
    return [
        replace(target, timeout_s=PREP_TIMEOUT_S, attempts=ATTEMPTS)
        for target in targets or [Target.local(settings, "grpc")]
    ]


CACHE_SIZE = 8  # a rollout and its rollback need two
Value = TypeVar("Value")


class Releases:
    """All methods can raise `StoreError` and `IntegrityError`."""

    def __init__(self, store_uri: str) -> None:
        self._store_uri = store_uri
        self._registry = Registry(open_store(store_uri))
        self.manifest = _cached(lambda version: self._registry.get(version).manifest)
        self.test_query = _cached(self._read_test_query)
        """An image that is stored in a release, and its expected prediction. The first call for a
        version downloads the whole archive."""

    async def champion(self) -> ReleaseManifest:
        """The manifest of the champion.

        Raises:
            ServingError: no release has been promoted yet.
        """
        champion = await asyncio.to_thread(self._registry.champion)
        if champion is None:
            raise ServingError("No release has been promoted yet; `evernear registry list` shows the releases.")
        return await self.manifest(champion.version)

    def _read_test_query(self, version: str) -> tuple[bytes, SmokeQuery]:
        with ReleaseSource(self._store_uri, version).unpacked() as release:
            queries = release.smoke_queries()
        if not queries:
            raise ServingError(f"Release {version} has no stored query.")
        return queries[0]


def _cached(read: Callable[[str], Value]) -> Callable[[str], Awaitable[Value]]:
    """Run ``read`` in a thread, once per version, even if requests need it concurrently."""
    lock, cached = asyncio.Lock(), lru_cache(CACHE_SIZE)(read)

    async def get(version: str) -> Value:
        async with lock:
            return await asyncio.to_thread(cached, version)

    return get
