"""Image decoding in servers. A malicious file raises no error other than `DataError`."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BytesIO
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.data.encoded_image import EncodedImage
from evernear.data.image_file import inspect
from evernear.data.preprocess import (
    Flaw,
    Pixels,
    Preprocessing,
    decode_inspected,
    decode_size_bytes,
    jpeg_divisor,
    to_array,
)
from evernear.errors import DataError, ServingError
from evernear.serving.responses import Rejection

SMALL_PIXELS = 1_000_000
"""Number of pixels above which an image counts as large."""
TINY_BYTES, TINY_PIXELS = 16 * 1024, 2**16
"""Largest file, and its pixels, that an event loop decodes itself, in less than a millisecond.
Passing an image to a thread and back takes longer."""
SMALL_THREADS = 2

Source = TypeVar("Source")
Parameter = TypeVar("Parameter")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)
_LOSSES = {
    Flaw.FAINT: "An image lost its contrast when it was reduced to 8 bits; the release reads 16-bit images as %d bits.",
    Flaw.CLIPPED: "An image has 16-bit values beyond the %d bits that the release reads; they were clipped.",
}


class OverloadedError(ServingError):
    """Too many images are waiting. Retry after a second."""


def inspect_image(data: bytes, max_pixels: int) -> EncodedImage:
    with _only_data_errors(len(data)):
        return inspect(data, max_pixels, setting="serving.max_pixels")


def decode_image(file: EncodedImage, shape: Preprocessing) -> Pixels:
    """Decode to a uint8 array of shape (H, W, C), as the release's preprocessing specifies."""
    with _only_data_errors(len(file.data)):
        picture = decode_inspected(file, shape.bit_depth, jpeg_divisor(file, *shape.shape[:2]))
        if picture.span is not None:
            for flaw in picture.flaws() & (Flaw.FAINT | Flaw.CLIPPED):
                _log.warning(_LOSSES[flaw], shape.bit_depth or 16)
        return to_array(picture.image, *shape.shape, shape.resize)


@contextmanager
def _only_data_errors(size_bytes: int) -> Generator[None]:
    """Turn every exception into a `DataError`, so that the rest of the batch is answered."""
    try:
        yield
    except DataError:
        raise
    except Exception:
        _log.exception("Decoding an image of %d bytes raised an unexpected exception.", size_bytes)
        raise DataError("The image cannot be decoded.") from None


def or_rejection(
    function: Callable[[Source, Parameter], Result], source: Source | Rejection, parameter: Parameter
) -> Result | Rejection:
    """Apply ``function`` to ``source``. A `Rejection` stays, and a `DataError` becomes one."""
    if isinstance(source, Rejection):
        return source
    try:
        return function(source, parameter)
    except DataError as error:
        return Rejection(message=str(error))


def pixel_count(file: EncodedImage | Pixels | Rejection) -> int:
    return file.pixels if isinstance(file, EncodedImage) else 0


def prepare(file: EncodedImage, shape: Preprocessing) -> bytes:
    """Prepare an inspected file as a release specifies, and encode it as PNG.

    Servers accept PNG files from any client. PNG is lossless, and a server does not change an image
    that already has the release's size and channels.
    """
    return encode_png(decode_image(file, shape))


def encode_png(pixels: Pixels) -> bytes:
    """Encode a uint8 array of shape (H, W, C) as PNG (lossless), fast rather than small."""
    buffer = BytesIO()
    as_picture(pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def as_picture(pixels: Pixels) -> Image.Image:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def gray_vector(picture: Image.Image, side_px: int) -> NDArray[np.float32]:
    """The gray values of ``picture`` at ``side_px`` x ``side_px`` pixels, minus their mean, as a
    unit vector, so that the product of two is their correlation. Zero for uniform brightness."""
    gray = picture.convert("L").resize((side_px, side_px), Image.Resampling.BOX)
    values = np.asarray(gray, np.float32).ravel()
    centered = values - values.mean()
    return centered / max(float(np.linalg.norm(centered)), 1e-6)


def pool_size_bytes(large: int, max_pixels: int) -> int:
    """The most memory, in bytes, that `evernear.serving.http.decoder` uses for decoding."""
    return large * decode_size_bytes(max_pixels) + SMALL_THREADS * decode_size_bytes(SMALL_PIXELS)
