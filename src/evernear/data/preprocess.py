"""Decode and resize images: the same code for ingest and serving."""

import hashlib
import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.data.image_file import EncodedImage, broken, inspect
from evernear.frozen import Frozen

Pixels = NDArray[np.uint8]
Resize = Literal["auto", "crop", "letterbox", "stretch"]
"""How an image of another aspect ratio is resized: its center only, with gray bars, or distorted. ``auto`` is ``crop``,
or ``letterbox`` if that would lose more than `MAX_CROPPED` of the image."""
MAX_CROPPED = 0.5
BAR_VALUE = 128
"""The gray of a letterbox's bars."""

DECODE_BYTES_PER_PIXEL = 12
"""Peak memory of decoding: a progressive CMYK JPEG needs 8 bytes of coefficients and 4 bytes of pixels at once
(measured by ``benchmarks/decode_limits.py``)."""
_BAND_PIXELS = 2**20

# Exceptions that Pillow's decoders raise for broken files, from its source code.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
)

# The transposition for each EXIF orientation.
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class NetworkInput(Frozen):
    """How a network itself fits images to its backbone: it resizes their center, the crop, to another size."""

    crop_height_px: int
    crop_width_px: int
    height_px: int
    width_px: int
    interpolation: Literal["bilinear", "bicubic"]


class Preprocessing(Frozen):
    """The preprocessing of images for a network; part of every release.

    `to_array` applies size, ``resize`` and channels and returns uint8. The exported network itself applies ``mean`` and
    ``std`` per channel, on a scale of 0..1, and ``network_input``.
    """

    height_px: int
    width_px: int
    channels: Literal[1, 3]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["bilinear"] = "bilinear"
    network_input: NetworkInput | None = None
    resize: Resize = "stretch"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the network's input."""
        return self.height_px, self.width_px, self.channels


def decode(data: bytes, max_pixels: int, name: str = "The image") -> Image.Image:
    """Decode a PNG, JPEG or WebP file to an 8-bit image of mode ``L`` (gray) or ``RGB``.

    Raises:
        DataError: as `inspect` and `decode_inspected`.
    """
    return decode_inspected(inspect(data, max_pixels, name))


def decode_inspected(file: EncodedImage) -> Image.Image:
    """Decode an inspected file to an 8-bit image of mode ``L`` (gray) or ``RGB``.

    EXIF orientation is applied; transparency is composited over white, as in a viewer; 16-bit gray keeps its upper 8
    bits; palette and CMYK become RGB. Memory stays below `decode_size_bytes`.

    Raises:
        DataError: the file is broken.
    """
    with _open(file) as image:
        image.load()
        if (transposition := _TRANSPOSITIONS.get(file.orientation)) is not None:
            image = image.transpose(transposition)
        return _eight_bit(image)


def is_gray(file: EncodedImage) -> bool:
    """Whether `decode_inspected` makes a gray image of an inspected file. Reads the header only.

    Raises:
        DataError: the header is broken.
    """
    with _open(file) as image:
        return _is_gray(image)


def decode_size_bytes(max_pixels: int) -> int:
    """Peak memory of `decode_inspected` and `to_array` for an image of ``max_pixels``, excluding its file."""
    return max_pixels * DECODE_BYTES_PER_PIXEL


def choose_resize(size: tuple[int, int], height_px: int, width_px: int, resize: Resize) -> Resize | None:
    """How an image of ``size`` (width, height) is resized; None if it has the aspect ratio, to a pixel."""
    width, height = _largest(size, height_px, width_px)
    if abs(width - size[0]) < 1 and abs(height - size[1]) < 1:
        return None
    if resize == "auto":
        return "crop" if width * height >= (1 - MAX_CROPPED) * size[0] * size[1] else "letterbox"
    return resize


def to_array(image: Image.Image, height_px: int, width_px: int, channels: int, resize: Resize = "stretch") -> Pixels:
    """Convert an image of `decode` to uint8 (H, W, C); one of another size is resized (bilinear, antialiased)."""
    image = _as_mode(image, "L" if channels == 1 else "RGB")
    target = (width_px, height_px)
    if image.size != target:
        chosen = choose_resize(image.size, height_px, width_px, resize)
        if chosen == "letterbox":
            image = _letterbox(image, target)
        else:
            box = _crop(image.size, target) if chosen == "crop" else None
            image = image.resize(target, Image.Resampling.BILINEAR, box)
    return np.asarray(image, np.uint8).reshape(height_px, width_px, channels)


def _largest(size: tuple[int, int], height_px: int, width_px: int) -> tuple[float, float]:
    """Width and height of the largest box within ``size`` (width, height) of the aspect ratio of the others."""
    scale = max(width_px / size[0], height_px / size[1])
    return width_px / scale, height_px / scale


def _crop(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest centered box (left, top, right, bottom) of an image with the aspect ratio of ``target``."""
    width, height = _largest(size, target[1], target[0])
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return max(left, 0.0), max(top, 0.0), min(left + width, size[0]), min(top + height, size[1])


def _letterbox(image: Image.Image, target: tuple[int, int]) -> Image.Image:
    scale = min(target[0] / image.width, target[1] / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    boxed = Image.new(image.mode, target, BAR_VALUE if image.mode == "L" else (BAR_VALUE,) * 3)
    offset = (target[0] - size[0]) // 2, (target[1] - size[1]) // 2
    boxed.paste(image.resize(size, Image.Resampling.BILINEAR), offset)
    return boxed


def pixels_digest(mode: str, width_px: int, height_px: int, pixels: bytes) -> bytes:
    """The identity of an image: sha256 of mode, size and raw 8-bit pixels as decoded, before any resize."""
    return _digest(mode, width_px, height_px, [pixels])


def image_digest(image: Image.Image) -> bytes:
    """`pixels_digest` of an image of `decode`."""
    return _digest(image.mode, image.width, image.height, (image.crop(band).tobytes() for band in _bands(image)))


def _digest(mode: str, width_px: int, height_px: int, pixels: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256(b"%s %d %d\n" % (mode.encode(), width_px, height_px))
    for part in pixels:
        digest.update(part)
    return digest.digest()


@contextmanager
def _open(file: EncodedImage) -> Generator[Image.Image]:
    """Open an inspected file, and turn Pillow's errors into `DataError`."""
    try:
        yield Image.open(BytesIO(file.data), formats=(file.format,))
    except _BROKEN as error:
        raise broken(file.name, str(error).rstrip(".") or type(error).__name__) from None


def _is_gray(image: Image.Image) -> bool:
    return image.mode in ("L", "LA", "1") or image.mode.startswith("I")


def _eight_bit(image: Image.Image) -> Image.Image:
    mode = "L" if _is_gray(image) else "RGB"
    if image.mode.startswith("I"):
        return _by_bands(image, mode, _upper_byte)
    if image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info:
        return _by_bands(image, mode, _composite_over_white)
    return _as_mode(image, mode)


def _by_bands(image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Apply ``convert`` to one band of rows at a time, so that its intermediate images stay small."""
    converted = Image.new(mode, image.size)
    for band in _bands(image):
        converted.paste(_as_mode(convert(image.crop(band)), mode), band)
    return converted


def _bands(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Boxes (left, top, right, bottom) that cover an image from top to bottom."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield 0, top, image.width, min(top + rows, image.height)


def _upper_byte(band: Image.Image) -> Image.Image:
    return Image.fromarray((np.asarray(band).astype(np.uint32) >> 8).astype(np.uint8))


def _composite_over_white(band: Image.Image) -> Image.Image:
    band = band.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", band.size, "white"), band)


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    """Like `Image.convert`, but without a copy if the image already has the mode."""
    return image if image.mode == mode else image.convert(mode)
