"""From the bytes of an image file to the array that the network takes: one way, for ingest and serving."""

import hashlib
import struct
import warnings
import zlib
from io import BytesIO
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from pydantic import BaseModel, ConfigDict

from evernear.errors import DataError

Pixels = NDArray[np.uint8]

# Pillow warns from this size on; `decode` refuses such images, so let it raise as Pillow's manual advises.
MAX_PIXELS = 89_478_485
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)

# What Pillow raises for broken files, by reading its decoders.
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

# How an image is turned upright, by its EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Preprocessing(BaseModel):
    """What is done to an image before the network sees it; part of every release.

    `to_array` applies size and channels and gives uint8. ``mean`` and ``std``, one per channel and in units
    of 0..1, are applied inside the exported network.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    height_px: int
    width_px: int
    channels: Literal[1, 3]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["bilinear"] = "bilinear"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what the network takes."""
        return self.height_px, self.width_px, self.channels


def decode(data: bytes, max_pixels: int, name: str = "The image") -> Image.Image:
    """A PNG or JPEG file as an 8-bit image of mode ``L`` (grey) or ``RGB``.

    The format is told by the content, never by a name. EXIF orientation is applied; transparency is laid over
    white, as a viewer shows it; 16-bit grey keeps its upper 8 bits; palette and CMYK become RGB.

    Raises:
        DataError: not PNG or JPEG, broken, animated, or of more than ``max_pixels``; the sentence begins with
            ``name``.
    """
    try:
        image = Image.open(BytesIO(data), formats=("PNG", "JPEG"))
        if image.width * image.height > max_pixels:
            raise DataError(f"{name} is too large: {image.width} x {image.height} pixels, {max_pixels} are allowed.")
        # A phone's multi-picture JPEG shows its first picture; an animated PNG shows no single one.
        if image.format == "PNG" and getattr(image, "is_animated", False):
            raise DataError(f"{name} is animated; a single image is wanted.")
        image.load()
        return _eight_bit(_upright(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{name} is too large: {max_pixels} pixels are allowed.") from None
    except Image.UnidentifiedImageError:
        raise DataError(f"{name} is not a PNG or JPEG image.") from None
    except _BROKEN as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataError(f"{name} is a broken image ({reason}).") from None


def to_array(image: Image.Image, height_px: int, width_px: int, channels: int) -> Pixels:
    """An image of `decode` as uint8 (H, W, C): stretched to the size (bilinear, antialiased), grey or RGB."""
    image = _as_mode(image, "L" if channels == 1 else "RGB")
    if image.size != (width_px, height_px):
        image = image.resize((width_px, height_px), Image.Resampling.BILINEAR)
    return np.asarray(image, np.uint8).reshape(height_px, width_px, channels)


def pixels_digest(mode: str, width_px: int, height_px: int, pixels: bytes) -> bytes:
    """The identity of an image: sha256 of mode, size and raw 8-bit pixels as decoded, before any resize."""
    return hashlib.sha256(b"%s %d %d\n" % (mode.encode(), width_px, height_px) + pixels).digest()


def image_digest(image: Image.Image) -> bytes:
    """`pixels_digest` of an image of `decode`."""
    return pixels_digest(image.mode, image.width, image.height, image.tobytes())


def _upright(image: Image.Image) -> Image.Image:
    """Turned as EXIF says; EXIF data that cannot be read says nothing, as in a viewer."""
    # ImageOps.exif_transpose would also write the EXIF data anew, and fails where a tag is not to the letter.
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _BROKEN:
        return image
    return image if turn is None else image.transpose(turn)


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info:
        grey = image.mode in ("L", "LA", "1")
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(background, image).convert("L" if grey else "RGB")
    return _as_mode(image, "L" if image.mode in ("L", "1") else "RGB")


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    """`Image.convert`, which copies an image that has the mode already, where it is needed."""
    return image if image.mode == mode else image.convert(mode)
