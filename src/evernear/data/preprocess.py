"""Decode and resize images. Ingest and serving use this code, so that both prepare images in the
same way."""

import hashlib
import struct
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from enum import IntFlag
from functools import partial
from io import BytesIO
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from evernear.common.frozen import Frozen
from evernear.data.encoded_image import PIXEL_SIZE_BYTES, EncodedImage, broken
from evernear.data.image_file import inspect
from evernear.data.reduction import (
    BitDepth,
    DeepImage,
    as_mode,
    bands,
    deep_color_type,
    flatten,
    is_deep_gray,
)

Pixels = NDArray[np.uint8]
Resize = Literal["auto", "crop", "letterbox", "stretch"]
"""``crop`` uses the center of an image, ``letterbox`` adds gray bars, and ``stretch`` distorts it.
``auto`` crops, or adds bars if a crop would lose more than `MAX_CROPPED`."""
MAX_CROPPED = 0.5
BAR_VALUE = 128

REDUCING_GAP = 2
"""A reduced JPEG image keeps at least this many times the length of the target's longer side. Of
256 values, pixels then differ by at most 1 on average, and by up to 17 at sharp edges of text."""
_BAND_PIXELS = 2**20
_MIN_SPAN = 16
"""Minimum range of gray values, out of 256. An image with a smaller range is faint."""
_COLOR_CELLS = 16
_MIN_COLOR = 8
"""Minimum mean difference between an image's channels, in a thumbnail of that many cells a side.
Gray photographs in JPEG files and slightly tinted scans have less."""

# Exceptions that decoders raise for broken files, according to the source code of Pillow and
# pillow-heif.
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
    RuntimeError,  # libheif
)

_PLAIN_PNG = {b"\x08\x00\x00\x00\x00": "L", b"\x08\x02\x00\x00\x00": "RGB"}
"""Pillow's mode for a PNG header's bit depth, color type and methods."""
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
    """How a network resizes a center crop of each image for its backbone."""

    crop_height_px: int
    crop_width_px: int
    height_px: int
    width_px: int
    interpolation: Literal["bilinear", "bicubic"]


class Preprocessing(Frozen):
    """The preprocessing in a release. `to_array` applies size, ``resize`` and channels. The network
    itself applies ``mean`` and ``std`` per channel, on a scale from 0 to 1, and
    ``network_input``."""

    height_px: int
    width_px: int
    channels: Literal[1, 3]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["bilinear"] = "bilinear"
    network_input: NetworkInput | None = None
    resize: Resize = "stretch"
    bit_depth: BitDepth = 16
    """Number of bits that the values in 16-bit files use."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height_px, self.width_px, self.channels


class Flaw(IntFlag):
    NONE = 0
    CONSTANT = 1
    FAINT = 2
    """After the reduction to 8 bits, fewer than `_MIN_SPAN` values are left of more contrast."""
    CLIPPED = 4
    GRAYED = 8
    """A color image is stored in gray."""


class Picture(NamedTuple):
    """A decoded 8-bit image, ``L`` or ``RGB``. ``identity`` identifies the content of the file, and
    ``span`` is its contrast if the 8-bit image has less."""

    image: Image.Image
    identity: bytes = b""
    span: int | None = None
    clipped: bool = False

    def digest(self) -> bytes:
        """Files whose images become equal only after the reduction differ."""
        return self.identity or image_digest(self.image)

    def flaws(self, channels: int = 3) -> Flaw:
        """The flaws of the image when it is stored with ``channels``."""
        span = int(np.ptp(np.asarray(self.image.getextrema()), axis=-1).max())
        before = span if self.span is None else self.span
        flaws = Flaw.CLIPPED if self.clipped else Flaw.NONE
        if channels == 1 and _is_colored(self.image):
            flaws |= Flaw.GRAYED
        if before == 0:
            return flaws | Flaw.CONSTANT
        return flaws | Flaw.FAINT if span < min(before, _MIN_SPAN) else flaws


def decode(data: bytes, max_pixels: int, name: str = "The image", bit_depth: BitDepth = 16) -> Image.Image:
    """Decode a PNG, JPEG, WebP or HEIC file to an 8-bit image with mode ``L`` (gray) or ``RGB``.

    Raises:
        DataError: as in `inspect` and `decode_inspected`.
    """
    file = inspect(data, max_pixels, name)
    return decode_inspected(file, bit_depth, 2 if file.halved else 1).image


def jpeg_divisor(file: EncodedImage, height_px: int, width_px: int) -> int:
    """The divisor of the sides, 1 to 8, with which a file is decoded for an array of this size.
    libjpeg computes fewer pixels of a JPEG block, which takes less time than resizing them all."""
    shorter, needed = min(file.height_px, file.width_px), REDUCING_GAP * max(height_px, width_px)
    least = 2 if file.halved else 1
    return next((by for by in (8, 4, 2) if file.format == "JPEG" and shorter >= by * needed), least)


def decode_inspected(file: EncodedImage, bit_depth: BitDepth, divisor: int = 1) -> Picture:
    """Decode a file to 8 bits, within `decode_size_bytes`. EXIF orientation is applied, palettes
    and CMYK become RGB, and transparent images are placed over a background
    (`evernear.data.reduction.flatten`). ``divisor`` is 1 or that of `jpeg_divisor`.

    Raises:
        DataError: the file is broken.
    """
    with _pillow_errors(file.name):
        if (color_type := deep_color_type(file)) is not None:
            reduced = DeepImage(color_type, partial(_load, file)).reduce(bit_depth)
            mode = "L" if is_deep_gray(file) else "RGB"
            flat = flatten(reduced.image, mode)[0] if reduced.image.mode.endswith("A") else reduced.image
            return Picture(flat, reduced.digest, reduced.span, reduced.clipped)
        image = _load(file, divisor=divisor)
        mode = _mode(image)
        _scale_transparency(image, file)
        if not _has_transparency(image):
            return Picture(as_mode(image, mode))
        flat, hidden = flatten(image, mode)
        return Picture(flat, hashlib.sha256(image_digest(flat) + hidden).digest(), 255) if hidden else Picture(flat)


def is_gray(file: EncodedImage) -> bool:
    """Whether `decode_inspected` returns a gray image. Only the header is read."""
    with _pillow_errors(file.name):
        return _mode(_open(file)) == "L" or is_deep_gray(file)


def bit_depth_of(file: EncodedImage) -> BitDepth | None:
    """The smallest bit depth for all values in a 16-bit file, or None for other files."""
    with _pillow_errors(file.name):
        color_type = deep_color_type(file)
        return None if color_type is None else DeepImage(color_type, partial(_load, file)).used_bit_depth()


def decode_size_bytes(max_pixels: int) -> int:
    """Peak memory of `decode_inspected` and `to_array`, excluding the file."""
    return max_pixels * PIXEL_SIZE_BYTES


def choose_resize(size: tuple[int, int], height_px: int, width_px: int, resize: Resize) -> Resize | None:
    """None if an image of ``size`` (width, height) has the target aspect ratio already."""
    width, height = _largest(size, height_px, width_px)
    if abs(width - size[0]) < 1 and abs(height - size[1]) < 1:
        return None
    if resize == "auto":
        return "crop" if width * height >= (1 - MAX_CROPPED) * size[0] * size[1] else "letterbox"
    return resize


def to_array(image: Image.Image, height_px: int, width_px: int, channels: int, resize: Resize = "stretch") -> Pixels:
    """Convert an image to uint8 (H, W, C), resized (bilinear, antialiased) if necessary."""
    image = as_mode(image, "L" if channels == 1 else "RGB")
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
    """Width and height of the largest box of the target's aspect ratio within ``size``."""
    scale = max(width_px / size[0], height_px / size[1])
    return width_px / scale, height_px / scale


def _crop(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest centered box (left, top, right, bottom) of the target's aspect ratio."""
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
    """The sha256 of an image's mode, size and raw 8-bit pixels before it is resized."""
    return _digest(mode, width_px, height_px, [pixels])


def image_digest(image: Image.Image) -> bytes:
    parts = (image.crop(band).tobytes() for band in bands(image, _BAND_PIXELS))
    return _digest(image.mode, image.width, image.height, parts)


def _digest(mode: str, width_px: int, height_px: int, pixels: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256(b"%s %d %d\n" % (mode.encode(), width_px, height_px))
    for part in pixels:
        digest.update(part)
    return digest.digest()


@contextmanager
def _pillow_errors(name: str) -> Generator[None]:
    try:
        yield
    except UnidentifiedImageError:  # whose message contains the address of an object
        raise broken(name, "its header is damaged") from None
    except _BROKEN as error:
        raise broken(name, str(error).rstrip(".") or type(error).__name__) from None


def _open(file: EncodedImage, raw_mode: str = "") -> ImageFile.ImageFile:
    """Open a file. ``raw_mode`` overrides Pillow's interpretation of the pixels."""
    if file.format == "HEIC":
        return _open_heic(file.data)
    image = Image.open(BytesIO(file.data), formats=(file.format,))
    if raw_mode:
        image.tile = [tile._replace(args=raw_mode) for tile in image.tile]
    return image


def _open_heic(data: bytes) -> ImageFile.ImageFile:
    """Open a file without registering its format in Pillow, which would read it everywhere."""
    import pillow_heif  # from the extra heic, see `evernear.data.heic.can_decode`

    pillow_heif.options.DECODE_THREADS = 1  # tiles of several threads would take more memory
    return pillow_heif.HeifImageFile(BytesIO(data))


def _load(file: EncodedImage, raw_mode: str = "", divisor: int = 1) -> Image.Image:
    image = None if raw_mode else _load_plain_png(file)
    if image is None:
        image = _open(file, raw_mode)
        if divisor > 1:
            image.draft(None, (image.width // divisor, image.height // divisor))
        image.load()
    if file.format == "HEIC" and image.mode == "I;16":  # gray of more than 8 bits, which libheif scales to 16
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    transposition = _TRANSPOSITIONS.get(file.orientation)
    return image if transposition is None else image.transpose(transposition)


def _load_plain_png(file: EncodedImage) -> Image.Image | None:
    """Decode a small PNG file that has only a header and pixels, of 8 bits and not interlaced.
    Pillow's reader of the file takes three times as long as its decoder of the pixels. None if a
    file is another one or damaged, so that the reader raises its error."""
    data = file.data
    mode = _PLAIN_PNG.get(data[24:29])
    if mode is None or file.format != "PNG" or data[37:41] != b"IDAT" or len(data) > ImageFile.MAXBLOCK:
        return None
    if zlib.crc32(data[12:29]) != int.from_bytes(data[29:33]):
        return None
    pixels = data[41 : 41 + int.from_bytes(data[33:37])]
    try:
        return Image.frombytes(mode, (file.width_px, file.height_px), pixels, "zip", mode)
    except ValueError:
        return None


def _mode(image: Image.Image) -> Literal["L", "RGB"]:
    return "L" if image.mode in ("L", "LA", "1") or image.mode.startswith("I") else "RGB"


def _is_colored(image: Image.Image) -> bool:
    if image.mode == "L":
        return False
    thumbnail = np.asarray(image.resize((_COLOR_CELLS, _COLOR_CELLS), Image.Resampling.BOX))
    return float(np.ptp(thumbnail, axis=-1).mean()) > _MIN_COLOR


def _has_transparency(image: Image.Image) -> bool:
    if image.mode in ("LA", "RGBA"):
        return image.getextrema()[-1] != (255, 255)
    return image.mode == "PA" or "transparency" in image.info


def _scale_transparency(image: Image.Image, file: EncodedImage) -> None:
    """Scale a 2-bit or 4-bit transparent value as Pillow scales the pixels."""
    if file.format == "PNG" and file.data[25] == 0 and file.data[24] in (2, 4) and "transparency" in image.info:
        image.info["transparency"] *= 255 // (2 ** file.data[24] - 1)
