"""The backend that prepares images and has predictors recognize them. It needs neither torch nor
FAISS."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from evernear.data.preprocess import Pixels
from evernear.errors import (
    EvernearError,
    IntegrityError,
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
    StoreError,
)
from evernear.release.manifest import ReleaseManifest
from evernear.serving.client import Target
from evernear.serving.decoding import encode_png
from evernear.serving.http.decoder import Decoder, Files
from evernear.serving.http.pods import Pod, TorchServe
from evernear.serving.http.telemetry import Telemetry
from evernear.serving.release_source import ReleaseSource
from evernear.serving.responses import Prediction, Rejection
from evernear.serving.tracing import span
from evernear.settings import Settings
from evernear.settings.serving import LARGE_DECODES, PREP_TIMEOUT_S

ATTEMPTS = 4  # to reach the predictor for a request, while a pod is replaced; gRPC allows 5
MATCHING_ATTEMPTS = 3  # releases may change while one request is answered
CACHE_SIZE = 8  # a rollout and its rollback need two
Result = TypeVar("Result")
Value = TypeVar("Value")


class Releases:
    """Where a server learns how images are prepared: the release of ``source``, or if ``follow`` is
    set, all releases of its store. All methods raise `EvernearError`."""

    def __init__(self, source: ReleaseSource, *, follow: bool) -> None:
        self._source = source
        self._only = None if follow else source.manifest()
        self._read = _cached(lambda version: replace(source, version=version).manifest())
        self.test_image = _cached(lambda version: _stored_image(replace(source, version=version)))
        """The first call for a version reads the whole archive."""

    async def first(self) -> ReleaseManifest:
        """The release before the first prediction."""
        return self._only or await asyncio.to_thread(self._source.manifest)

    async def manifest(self, version: str) -> ReleaseManifest:
        if self._only is not None and version != self._only.version:
            raise ServingError(
                f"The predictor answers with release {version}, but images are prepared for "
                f"{self._only.version}; wait for the rollout to end, or deploy the same release to both."
            )
        try:
            return self._only or await self._read(version)
        except (StoreError, IntegrityError) as error:
            raise ServingError(
                f"The predictor answers with release {version}, whose preprocessing is not available from "
                f"{self._source.store_uri}, so its prediction may be wrong: {error}"
            ) from None


class Remote:
    """Prepares images, and has the first reachable one of ``pods`` recognize them.

    Each prediction names the release that made it, and is valid only if the image was prepared as
    this release specifies. If the preprocessing differs, for example after a rollout, the image is
    prepared and sent again. The backend therefore never returns a prediction for an image with the
    wrong preprocessing, and a rollout that does not change it causes no extra work.
    """

    accepts_pixels = False

    def __init__(
        self, pods: Sequence[Pod], releases: Releases, telemetry: Telemetry, limits: tuple[int, int], timeout_s: float
    ) -> None:
        """``limits`` are those of the `Decoder`. ``timeout_s`` is the time for a request, including
        queueing and retries. Create a `Remote` in the event loop that uses it."""
        self._pods = pods
        self._releases = releases
        self._telemetry = telemetry
        self._timeout_s = timeout_s
        self._decoder = Decoder(pods[0].prepare, *limits)
        self._latest: ReleaseManifest | None = None  # the release of the latest prediction

    async def expected_release(self) -> ReleaseManifest:
        """The release that made the latest prediction or, before any, that of `Releases.first`."""
        if self._latest is None:
            self._latest = await self._releases.first()
            self._telemetry.release.info({"version": self._latest.version})
        return self._latest

    async def live_release(self) -> ReleaseManifest:
        """Test this server and the predictor with a blank image. Raises the errors of
        `recognize`."""
        shape = (await self._in_time(self.expected_release())).preprocessing
        await self.recognize([encode_png(np.zeros((shape.height_px, shape.width_px, shape.channels), np.uint8))])
        return await self.expected_release()

    async def test_image(self) -> bytes:
        """A stored image of the live release. Raises the errors of `recognize`."""
        release = await self.live_release()
        return await self._in_time(self._releases.test_image(release.version))

    async def recognize(self, images: Files | Pixels) -> list[Prediction | Rejection]:
        """Recognize image files.

        Raises:
            ServerTimeoutError: the prediction takes longer than ``timeout_s``.
            OverloadedError: too many large images are waiting.
            ServingError: the predictor is unreachable or fails, or the preprocessing of its release
                is unavailable.
            StoreError: the registry is unreachable.
        """
        if not isinstance(images, list):
            raise TypeError("This backend accepts no pixels.")
        return await self._in_time(self._recognize(images))

    async def aclose(self) -> None:
        self._decoder.close()
        for pod in self._pods:
            await pod.close()

    async def _in_time(self, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            raise ServerTimeoutError(f"No prediction within {self._timeout_s:g} s.") from None

    async def _recognize(self, files: Files) -> list[Prediction | Rejection]:
        expected, telemetry = await self.expected_release(), self._telemetry
        for _ in range(MATCHING_ATTEMPTS):
            with telemetry.prepare_s.time(), span(telemetry.tracer, "prepare"):
                prepared = await self._decoder.run(files, expected)
            accepted = [image for image in prepared if not isinstance(image, Rejection)]
            try:
                predictions = await self._call(accepted) if accepted else []
            except PredictionRejectedError as error:
                expected = await self._release(error.version)
                continue
            actual = [await self._release(version) for version in {prediction.version for prediction in predictions}]
            differing = [release for release in actual if release.preprocessing != expected.preprocessing]
            if not differing:
                remaining = iter(predictions)
                return [image if isinstance(image, Rejection) else next(remaining) for image in prepared]
            expected = differing[0]
        raise ServingError("The predictor's release changes faster than an image can be prepared; try again.")

    async def _release(self, version: str) -> ReleaseManifest:
        """The release of a prediction."""
        if self._latest is None or version != self._latest.version:
            self._latest = await self._releases.manifest(version)
            self._telemetry.release.info({"version": version})
        return self._latest

    async def _call(self, prepared: list[Any]) -> list[Prediction]:
        telemetry = self._telemetry
        with (
            telemetry.in_flight.track_inprogress(),
            telemetry.predict_s.time(),
            span(telemetry.tracer, "call predictor"),
        ):
            try:
                predictions = await self._first_reachable(prepared)
            except PredictionRejectedError as error:
                if error.version:
                    raise
                raise ServingError(f"The predictor rejects the requests of this server: {error}") from None
            except (ValueError, LookupError, TypeError, AttributeError, struct.error):
                raise ServingError("The predictor is not an evernear release of a compatible version.") from None
            except EvernearError as error:
                telemetry.failures.labels(type(error).__name__).inc()
                raise
        if len(predictions) != len(prepared):
            raise ServingError(f"The predictor returned {len(predictions)} predictions for {len(prepared)} images.")
        return predictions

    async def _first_reachable(self, prepared: list[Any]) -> list[Prediction]:
        *preferred, last = self._pods
        for pod in preferred:
            with suppress(ServerUnreachableError):
                return await pod.recognize(prepared)
        return await last.recognize(prepared)


def _stored_image(source: ReleaseSource) -> bytes:
    with source.unpacked() as release:
        queries = release.smoke_queries()
        if not queries:
            raise ServingError(f"Release {release.manifest.version} has no stored query.")
        return queries[0][0]


def _cached(read: Callable[[str], Value]) -> Callable[[str], Awaitable[Value]]:
    """Run ``read`` in a thread, once per version, even if requests need it concurrently."""
    lock, cached = asyncio.Lock(), lru_cache(CACHE_SIZE)(read)

    async def get(version: str) -> Value:
        async with lock:
            return await asyncio.to_thread(cached, version)

    return get


def torchserve_backend(settings: Settings, telemetry: Telemetry, *, embeddings: bool = False) -> Remote:
    """TorchServe as the predictor, with the releases of the store. Create it in the event loop that
    uses it. If ``embeddings`` is set, predictions contain the image's embedding."""
    return Remote(
        [TorchServe(target, embeddings=embeddings) for target in targets_of(settings)],
        Releases(ReleaseSource(settings.store_uri), follow=True),
        telemetry,
        (settings.serving.max_pixels, LARGE_DECODES),
        PREP_TIMEOUT_S,
    )


def targets_of(settings: Settings) -> list[Target]:
    """The predictors to call, in order, each if those before it are unreachable."""
    prep = settings.prep
    hosts = [host for host in (prep.predictor_host, prep.predictor_fallback_host) if host]
    targets = [Target.remote(settings, host, "grpc", tls=prep.predictor_tls) for host in hosts]
    return [
        replace(target, timeout_s=PREP_TIMEOUT_S, attempts=ATTEMPTS)
        for target in targets or [Target.local(settings, "grpc")]
    ]
