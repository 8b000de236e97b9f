"""Decoding for servers: what a client sends becomes an array or a `DataError`, and small images never wait for
large ones.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from evernear.data.image_file import EncodedImage, inspect
from evernear.data.preprocess import Pixels, Preprocessing, decode_inspected, decode_size_bytes, to_array
from evernear.errors import DataError, ServingError

SMALL_PIXELS = 1_000_000
"""An image of more pixels is a large one."""
SMALL_THREADS = 2
MAX_WAITING_LARGE = 16
"""Large images that may wait for a thread."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class OverloadedError(ServingError):
    """Too many large images wait already; try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def inspect_image(data: bytes, max_pixels: int) -> EncodedImage:
    """`inspect` for what a client sent.

    Raises:
        DataError: the file cannot be used.
    """
    with _only_data_errors(len(data)):
        return inspect(data, max_pixels)


def read_image(file: EncodedImage, shape: Preprocessing) -> Pixels:
    """An inspected file as uint8 (H, W, C), as a release's preprocessing has it.

    Raises:
        DataError: the file is broken.
    """
    with _only_data_errors(len(file.data)):
        return to_array(decode_inspected(file), shape.height_px, shape.width_px, shape.channels)


@contextmanager
def _only_data_errors(size_bytes: int) -> Generator[None]:
    """Whatever a decoder makes of a hostile file, its neighbors get their answers."""
    try:
        yield
    except DataError:
        raise
    except Exception:
        _log.exception("An image of %d bytes raised what its decoder never should.", size_bytes)
        raise DataError("The image cannot be decoded.") from None


class DecodePool:
    """Threads for the event loop's work on images: ``large`` for large images, others for everything else.

    So a large image delays other large ones alone, and the memory that decoding takes is at most
    `pool_size_bytes`.
    """

    def __init__(self, large: int) -> None:
        self._small = ThreadPoolExecutor(SMALL_THREADS, "small-image")
        self._large = ThreadPoolExecutor(large, "large-image")
        self._places = threading.BoundedSemaphore(large + MAX_WAITING_LARGE)

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Await ``function`` in a thread that no large image occupies."""
        return await asyncio.wrap_future(self._small.submit(function, *args, **kwargs))

    async def run_sized(
        self, pixels: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Await ``function``, which decodes ``pixels``, in a thread of that size.

        Raises:
            OverloadedError: too many large images wait.
        """
        if pixels <= SMALL_PIXELS:
            return await self.run(function, *args, **kwargs)
        if not self._places.acquire(blocking=False):
            raise OverloadedError("Too many large images are waiting to be decoded; try again in a second.")
        future = self._large.submit(function, *args, **kwargs)
        # Not when the caller stops waiting: a decode that has begun goes on.
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what has not begun."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)


def pool_size_bytes(large: int, max_pixels: int) -> int:
    """The most memory that a `DecodePool` decodes in."""
    return large * decode_size_bytes(max_pixels) + SMALL_THREADS * decode_size_bytes(SMALL_PIXELS)
