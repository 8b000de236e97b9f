"""Prepare an image as the release that answers it prescribes, and have it answered: whatever HTTP stands around."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from circuitbreaker import CircuitBreaker

from evernear.data.image_file import EncodedImage
from evernear.errors import (
    EvernearError,
    IntegrityError,
    PredictionRejectedError,
    ServerTimeoutError,
    ServingError,
    StoreError,
)
from evernear.release.manifest import ReleaseManifest
from evernear.serving.client import AsyncClient, Target
from evernear.serving.decoding import DecodePool, inspect_image
from evernear.serving.messages import Metadata, Prediction
from evernear.serving.metadata import metadata_of
from evernear.serving.prep.metrics import Metrics
from evernear.serving.prep.releases import Releases, blank, prepare
from evernear.serving.prep.requests import inspect_request
from evernear.settings import Settings

MATCHING_ATTEMPTS = 3  # releases that may follow one another while one request is answered

Answer = TypeVar("Answer")


class Mismatch(ServingError):
    """The predictor answered for an image that was not prepared as its release prescribes."""


class LeftAlone(ServingError):
    """The circuit breaker is open: the predictor failed again and again and gets a rest of ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Service:
    """Answers images with the predictor of ``settings``; made inside the event loop that it works in.

    A prediction carries the version of the release that made it. It counts only if the image was prepared as
    that release prescribes; if not, as right after a rollout, the image is prepared anew and asked again. So a
    mismatch never becomes an answer, and a rollout that keeps the preprocessing costs nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self._prep = settings.prep
        self._model = settings.serving.model_name
        self._store_uri = settings.store_uri
        self._predictor = AsyncClient(target_of(settings))
        self._releases = Releases(settings.store_uri)
        self._last: ReleaseManifest | None = None  # the release that answered last
        self._max_pixels = settings.serving.max_pixels
        self._decoding = DecodePool(settings.prep.large_decodes)
        self._slots = asyncio.Semaphore(settings.prep.in_flight)
        self._breaker = CircuitBreaker(settings.prep.failures, settings.prep.recovery_s, _is_failure)
        self.metrics = Metrics()
        self.metrics.breaker_open.set_function(lambda: float(self._breaker.opened))

    async def predict(self, body: bytes) -> Prediction:
        """Recognize the image in a request's body.

        Raises:
            RequestError, DataError: the request or its image cannot be used.
            ServerTimeoutError: it takes longer than ``prep.timeout_s``.
            OverloadedError: too many large images wait.
            ServingError: the predictor cannot be reached, fails, is left alone for a while, or answers with a
                release whose preprocessing is not known here.
            StoreError: the registry cannot be reached.
        """
        return await self._in_time(self._predict(inspect_request, body))

    async def test(self) -> Prediction:
        """Have a stored image of the release that serves answered. Raises as `predict`."""

        async def ask() -> Prediction:
            image, _ = await self._releases.test_query((await self._serving()).version)
            return await self._predict(inspect_image, image)

        return await self._in_time(ask())

    async def serving(self) -> ReleaseManifest:
        """The release that answers: a blank image is, which only what works from end to end can do.

        Raises as `predict`.
        """
        return await self._in_time(self._serving())

    async def metadata(self) -> Metadata:
        """What the release that answers takes and gives. Raises as `predict`."""
        return metadata_of(await self.serving(), self._model)

    async def close(self) -> None:
        """End the connection to the predictor, and the threads."""
        self._decoding.close()
        await self._predictor.close()

    async def _in_time(self, work: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._prep.timeout_s):
                return await work
        except TimeoutError:
            raise ServerTimeoutError(f"No prediction within {self._prep.timeout_s:g} s.") from None

    async def _serving(self) -> ReleaseManifest:
        answer = await self._predict(inspect_image, blank(await self._prescribing()))
        return await self._releases.manifest(answer.version)

    async def _predict(self, inspect: Callable[[bytes, int], EncodedImage], data: bytes) -> Prediction:
        prescribing = await self._prescribing()
        # Not more than the release allows, nor more than this server has memory for.
        file = await self._decoding.run(inspect, data, min(prescribing.max_pixels, self._max_pixels))
        for _ in range(MATCHING_ATTEMPTS):
            with self.metrics.prepare_s.time():
                prepared = await self._decoding.run_sized(file.pixels, prepare, file, prescribing)
            answer = await self._ask(prepared)
            answering = await self._answering(answer.version)
            if answering.preprocessing == prescribing.preprocessing:
                return answer
            prescribing = answering
        raise Mismatch("The predictor changes its release faster than an image can be prepared; try again.")

    async def _prescribing(self) -> ReleaseManifest:
        """The release that answered last; at first the one that ought to."""
        if self._last is None:
            self._last = await self._releases.champion()
        return self._last

    async def _answering(self, version: str) -> ReleaseManifest:
        if self._last is None or version != self._last.version:
            try:
                self._last = await self._releases.manifest(version)
            except (StoreError, IntegrityError) as error:
                raise Mismatch(
                    f"The predictor answers with release {version}, whose preprocessing cannot be had from "
                    f"{self._store_uri}, so its answer may be wrong: {error}"
                ) from None
        self.metrics.release.info({"version": version})
        return self._last

    async def _ask(self, prepared: bytes) -> Prediction:
        if self._breaker.opened:
            rest_s = max(1, math.ceil(self._breaker.open_remaining))
            raise LeftAlone(f"The predictor failed again and again and is left alone for {rest_s} s.", rest_s)
        async with self._slots:
            with self.metrics.in_flight.track_inprogress(), self.metrics.predictor_s.time():
                try:
                    return await self._breaker.call_async(self._predictor.predict, prepared)
                except PredictionRejectedError as error:
                    raise ServingError(f"The predictor takes nothing from this server: {error}") from None
                except EvernearError as error:
                    self.metrics.failures.labels(type(error).__name__).inc()
                    raise


def target_of(settings: Settings) -> Target:
    """The predictor of a preprocessing server.

    Raises:
        ServerUnreachableError: it is to be that of the working directory, and none was started there.
    """
    prep = settings.prep
    target = (
        Target.remote(settings, prep.predictor_host, "grpc", tls=prep.predictor_tls)
        if prep.predictor_host
        else Target.local(settings, "grpc")
    )
    return replace(target, timeout_s=prep.timeout_s, attempts=prep.attempts)


def _is_failure(kind: type[BaseException], _: BaseException) -> bool:
    """Whether the circuit breaker counts it: a refusal is an answer, a cancelled call ran out of time."""
    return not issubclass(kind, PredictionRejectedError) and issubclass(kind, (ServingError, asyncio.CancelledError))
