"""An image file whose decoding cost is bounded, and code that is used for all formats. Source: Exif
2.32, section 4.6."""

import math
import struct
from dataclasses import dataclass
from typing import Literal

from evernear.errors import DataError

SEGMENTS = 256
MEAN_SEGMENT_SIZE_BYTES = 512
"""A file may have ``SEGMENTS`` PNG chunks or JPEG segments, plus one for every
``MEAN_SEGMENT_SIZE_BYTES`` bytes, because each chunk or segment takes half a microsecond. libpng
writes chunks of 8 KiB."""
WEBP_PIXEL_COST = 20 / 12
"""Relative cost of a WebP pixel, which takes 20 bytes in Pillow. In other formats, it takes at most
`evernear.data.preprocess.DECODE_BYTES_PER_PIXEL`."""
CODE_GROUP_COST = 1_720
"""Cost of a group of prefix codes in a lossless WebP file, expressed in pixels. The five tables of
a group have at most 5,004 entries of 4 bytes (libwebp, ``kTableSize`` and ``FIXED_TABLE_SIZE``).
Their header has 560 bytes."""
EXIF_PREFIX = b"Exif\0\0"
_ORIENTATION_TAG = 0x0112
_EXIF_SHORT, _EXIF_LONG = 3, 4


@dataclass(frozen=True)
class EncodedImage:
    """A PNG, JPEG or WebP file whose decoding cost is bounded. ``data`` is the file without its
    metadata, ``orientation`` is 1 to 8 (EXIF), and ``code_groups`` bounds the prefix code groups in
    a lossless WebP file."""

    name: str
    format: Literal["PNG", "JPEG", "WEBP"]
    width_px: int
    height_px: int
    orientation: int
    data: bytes
    code_groups: int = 0

    @property
    def pixels(self) -> int:
        """The decoding cost in pixels, which is width times height, or more for a WebP file."""
        area = self.width_px * self.height_px
        if self.format != "WEBP":
            return area
        return math.ceil(area * WEBP_PIXEL_COST) + self.code_groups * CODE_GROUP_COST


def broken(name: str, reason: str) -> DataError:
    return DataError(f"{name} is a broken image ({reason}).")


def max_segments(size_bytes: int) -> int:
    return SEGMENTS + size_bytes // MEAN_SEGMENT_SIZE_BYTES


def too_many_segments(name: str, kind: str, size_bytes: int) -> DataError:
    return DataError(f"{name} consists of more than {max_segments(size_bytes)} {kind}; save it again.")


def read_orientation(tiff: bytes) -> int:
    """1 to 8. Invalid EXIF data are ignored, as in image viewers. Pillow would load every tag, and
    each tag can claim all of the data as its value."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", tiff, entry)
            if tag == _ORIENTATION_TAG and kind in (_EXIF_SHORT, _EXIF_LONG):
                (value,) = struct.unpack_from(f"{order}{'H' if kind == _EXIF_SHORT else 'I'}", tiff, entry + 8)
                return value if value in range(1, 9) else 1
    except struct.error:
        pass
    return 1
