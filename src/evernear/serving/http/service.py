"""What the HTTP and gRPC interfaces of a server share: its model, and how errors are reported."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, TypeVar

from starlette.exceptions import HTTPException

from evernear.data.preprocess import Pixels
from evernear.errors import DataError, ServerTimeoutError, ServerUnreachableError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import OverloadedError
from evernear.serving.http.decoder import Files
from evernear.serving.http.telemetry import Telemetry
from evernear.serving.request_parsing import RequestError
from evernear.serving.responses import Prediction, Rejection
from evernear.settings.serving import MODEL_NAME

MAX_IMAGES = 1024
"""Maximum number of images in one request, because a tiny file can decode to a large array."""
PARSED_HERE_BYTES = 64 * 1024
"""Largest body that the event loop parses itself. Passing a body to a thread takes longer."""
_STATUS = {RequestError: 422, DataError: 400, ServerTimeoutError: 504}
"""For all others, 503."""
Parsed = TypeVar("Parsed")


class Backend(Protocol):
    """Recognizes images. All methods raise `EvernearError`, or `HTTPException` for a status that no
    `EvernearError` stands for."""

    accepts_pixels: bool
    """Whether `recognize` accepts images that another server has prepared."""

    async def expected_release(self) -> ReleaseManifest:
        """The release that the next prediction is expected from."""
        ...

    async def live_release(self) -> ReleaseManifest:
        """The release that can recognize an image now."""
        ...

    async def test_image(self) -> bytes:
        """An image that is stored in the live release."""
        ...

    async def recognize(self, images: Files | Pixels) -> list[Prediction | Rejection]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """``max_images`` applies to one request."""

    backend: Backend
    telemetry: Telemetry
    model: str = MODEL_NAME
    max_images: int = MAX_IMAGES

    async def recognize(self, images: Files | Pixels) -> list[Prediction | Rejection]:
        results = await self.backend.recognize(images)
        self.telemetry.count_images(results)
        return results

    async def release(self, model: str, version: str = "") -> ReleaseManifest:
        """The expected release.

        Raises:
            HTTPException: with status 404, it is not the release that a client named.
        """
        release = await self.backend.expected_release()
        if model != self.model or version not in ("", release.version):
            message = f"The server has version {release.version} of the model {self.model}, and no other one."
            raise HTTPException(HTTPStatus.NOT_FOUND, message)
        return release


async def parsed(function: Callable[[bytes], Parsed], body: bytes) -> Parsed:
    """Parse a body, in a thread if it is large."""
    return function(body) if len(body) <= PARSED_HERE_BYTES else await asyncio.to_thread(function, body)


def status_of(error: Exception) -> tuple[int, str, dict[str, str]]:
    """The HTTP status, the message and the headers for an `EvernearError` or `HTTPException`."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, dict(error.headers or {})
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 503)
    headers = {"Retry-After": "1"} if isinstance(error, OverloadedError | ServerUnreachableError) else {}
    return status, str(error), headers
