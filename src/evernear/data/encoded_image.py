"""An inspected image file, its decoding cost, and the errors of the inspection."""

import math
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
`PIXEL_SIZE_BYTES`."""
CODE_GROUP_COST = 1_720
"""Cost of a group of prefix codes in a lossless WebP file, expressed in pixels. The five tables of
a group have at most 5,004 entries of 4 bytes (libwebp, ``kTableSize`` and ``FIXED_TABLE_SIZE``).
Their header has 560 bytes."""
DEEP_HEIC_PIXEL_COST = 16 / 12
"""Relative cost of a HEIC pixel of more than 8 bits per sample and more than half of the samples of
color. libheif and Pillow take 15.5 bytes in 4:4:4 and 13.6 in 4:2:2. Others take at most 9.5."""
PIXEL_SIZE_BYTES = 12
"""Bytes that a pixel takes in a decoder: a progressive CMYK JPEG has 8 bytes of coefficients and 4
of pixels."""
HALVED_PIXEL_COST = 0.48
"""Relative cost of the pixels of a JPEG file that is decoded at half its size. 8192 x 6144, the 50
megapixels of many phones, count as less than 25 million."""
HALVED_PIXEL_SIZE_BYTES = 10
"""Bytes of a pixel that is left: 4 of CMYK, 3 of RGB and 3 of the rotated image."""


@dataclass(frozen=True)
class EncodedImage:
    """A PNG, JPEG, WebP or HEIC file whose decoding cost is bounded. ``data`` is the file without
    its metadata, ``orientation`` is 1 to 8 (EXIF), and ``code_groups`` bounds the prefix code
    groups in a lossless WebP file. Of a HEIC file, ``coded_pixels`` are the pixels that the
    decoder allocates, and ``deep`` says whether they have `DEEP_HEIC_PIXEL_COST`. A JPEG file that
    is larger than the limit is ``halved``: servers divide its sides by at least 2. A decoder keeps
    ``coefficients_size_bytes`` of a JPEG file with several scans, whatever the divisor."""

    name: str
    format: Literal["PNG", "JPEG", "WEBP", "HEIC"]
    width_px: int
    height_px: int
    orientation: int
    data: bytes
    code_groups: int = 0
    coded_pixels: int = 0
    deep: bool = False
    halved: bool = False
    coefficients_size_bytes: int = 0

    @property
    def area(self) -> int:
        return self.width_px * self.height_px

    @property
    def pixels(self) -> int:
        """The decoding cost in pixels, which is width times height, or more for WebP and HEIC. If
        ``halved``, it is about half of them, or more if the coefficients need it."""
        area = self.area
        if self.halved:
            size_bytes = area // 4 * HALVED_PIXEL_SIZE_BYTES + self.coefficients_size_bytes
            return max(math.ceil(area * HALVED_PIXEL_COST), size_bytes // PIXEL_SIZE_BYTES)
        if self.format == "WEBP":
            return math.ceil(area * WEBP_PIXEL_COST) + self.code_groups * CODE_GROUP_COST
        if self.format == "HEIC":
            return math.ceil(self.coded_pixels * DEEP_HEIC_PIXEL_COST) if self.deep else self.coded_pixels
        return area

    @property
    def whole_pixels(self) -> int:
        """The cost of decoding the complete image."""
        return max(self.area, self.pixels)


def broken(name: str, reason: str) -> DataError:
    return DataError(f"{name} is a broken image ({reason}).")


def max_segments(size_bytes: int) -> int:
    return SEGMENTS + size_bytes // MEAN_SEGMENT_SIZE_BYTES


def too_many_segments(name: str, kind: str, size_bytes: int) -> DataError:
    return DataError(f"{name} consists of more than {max_segments(size_bytes)} {kind}; save it again.")
