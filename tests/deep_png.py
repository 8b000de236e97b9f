"""16-bit PNG files of any color type, which Pillow cannot write."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from tests import hostile


def deep_png(values: NDArray[np.uint16], *, transparent: tuple[int, ...] = (), exif: bytes = b"") -> bytes:
    """A PNG file of ``values`` (H, W) or (H, W, C): gray, gray with alpha, color, or color with
    alpha.

    ``transparent`` is the color that is transparent (tRNS).
    """
    values = np.atleast_3d(values)
    height, width, channels = values.shape
    color = {1: hostile.GRAY, 2: hostile.GRAY_ALPHA, 3: hostile.RGB, 4: hostile.RGBA}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [hostile.chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0))]
    if transparent:
        chunks.append(hostile.chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)))
    if exif:
        chunks.append(hostile.chunk(b"eXIf", exif))
    chunks += [hostile.chunk(b"IDAT", zlib.compress(rows)), hostile.chunk(b"IEND", b"")]
    return b"".join([hostile.SIGNATURE, *chunks])
