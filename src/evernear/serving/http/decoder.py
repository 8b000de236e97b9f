"""Decode the images of requests. Large images do not delay small ones."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from threading import BoundedSemaphore
from typing import Generic, TypeVar

from starlette.exceptions import HTTPException

from evernear.data.encoded_image import EncodedImage
from evernear.data.preprocess import Preprocessing
from evernear.release.manifest import ReleaseManifest
from evernear.serving.decoding import (
    SMALL_PIXELS,
    SMALL_THREADS,
    TINY_BYTES,
    TINY_PIXELS,
    OverloadedError,
    inspect_image,
    or_rejection,
    pixel_count,
)
from evernear.serving.responses import Rejection

MAX_LARGEST_IMAGES = 4
"""Maximum number of pixels in one request, as a multiple of the limit for one image."""
MAX_WAITING_LARGE = 16
"""Maximum number of large images that wait for a decoding thread."""
Prepared = TypeVar("Prepared")
Prepare = Callable[[EncodedImage, Preprocessing], Prepared]
Files = list[bytes | Rejection]
Inspected = list[EncodedImage | Rejection]


class Decoder(Generic[Prepared]):
    """Prepares image files with ``prepare``, in ``large_decodes`` threads for large images, and
    `SMALL_THREADS` for small ones. Decoding takes at most `pool_size_bytes` of memory."""

    def __init__(self, prepare: Prepare[Prepared], max_pixels: int, large_decodes: int) -> None:
        self._prepare = prepare
        self._max_pixels = max_pixels
        self._small = ThreadPoolExecutor(SMALL_THREADS, "small-image")
        self._large = ThreadPoolExecutor(large_decodes, "large-image")
        self._places = BoundedSemaphore(large_decodes + MAX_WAITING_LARGE)

    async def run(self, files: Files, release: ReleaseManifest) -> list[Prepared | Rejection]:
        """Prepare the images of one request, as ``release`` prescribes. A tiny one is prepared on
        the event loop, because passing it to a thread takes longer.

        Raises:
            HTTPException: with status 413, the images together have too many pixels.
            OverloadedError: too many large images are waiting.
        """
        if len(files) == 1 and len(files[0] if isinstance(files[0], bytes) else b"") <= TINY_BYTES:
            large, prepared = self._prepare_if_small(files, release, TINY_PIXELS)
        else:
            inspecting = self._small.submit(self._prepare_if_small, files, release, SMALL_PIXELS)
            large, prepared = await asyncio.wrap_future(inspecting)
        return prepared + [await self._prepare_alone(file, release.preprocessing) for file in large]

    def close(self) -> None:
        """Cancel the calls that have not started."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _prepare_if_small(
        self, files: Files, release: ReleaseManifest, small_pixels: int
    ) -> tuple[Inspected, list[Prepared | Rejection]]:
        """Prepare images with at most ``small_pixels`` pixels in total. Otherwise return the
        inspected files."""
        max_pixels = min(release.max_pixels, self._max_pixels)  # the release may allow fewer
        inspected = [or_rejection(inspect_image, file, max_pixels) for file in files]
        pixels, limit = sum(map(pixel_count, inspected)), MAX_LARGEST_IMAGES * max_pixels
        if pixels > limit:
            message = f"The images of the request have more than {limit} pixels together; send fewer."
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        if pixels > small_pixels:
            return inspected, []
        return [], [or_rejection(self._prepare, file, release.preprocessing) for file in inspected]

    async def _prepare_alone(self, file: EncodedImage | Rejection, shape: Preprocessing) -> Prepared | Rejection:
        if pixel_count(file) <= SMALL_PIXELS:
            return await asyncio.wrap_future(self._small.submit(or_rejection, self._prepare, file, shape))
        if not self._places.acquire(blocking=False):
            raise OverloadedError("Too many large images are waiting to be decoded; try again in a second.")
        future = self._large.submit(or_rejection, self._prepare, file, shape)
        # A running thread cannot be cancelled. Even if the caller is, the place therefore stays
        # occupied until decoding ends.
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)
