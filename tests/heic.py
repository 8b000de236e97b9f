"""HEIC files: those that pillow-heif writes, and hand-crafted ones that no camera writes."""

import struct
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import pillow_heif
from PIL import Image

Tile = tuple[int, bytes, bytes]
"""Side length, parameters (the box hvcC) and stream."""
ULTRAFAST = {"preset": "ultrafast"}


def heic(image: Image.Image, **options: object) -> bytes:
    """A HEIC file as pillow-heif writes it, with the tags and the profile of ``image``."""
    buffer = BytesIO()
    pillow_heif.from_pillow(image).save(buffer, enc_params=ULTRAFAST, **options)
    return buffer.getvalue()


def deep_heic(values: np.ndarray, bits: int, chroma: int = 444) -> bytes:
    """A HEIC file of ``bits`` bits per sample, of uint16 values with shape (H, W, 3) or (H, W)."""
    size, buffer = (values.shape[1], values.shape[0]), BytesIO()
    pillow_heif.options.SAVE_HDR_TO_12_BIT = bits == 12
    try:
        file = pillow_heif.from_bytes("RGB;16" if values.ndim == 3 else "I;16", size, values.tobytes())
        file.save(buffer, quality=95, chroma=chroma, enc_params=ULTRAFAST)
    finally:
        pillow_heif.options.SAVE_HDR_TO_12_BIT = False
    return buffer.getvalue()


def box(kind: bytes, *parts: bytes) -> bytes:
    """A box of a HEIC file."""
    return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)


def size_box(width: int, height: int) -> bytes:
    return box(b"ispe", struct.pack(">4xII", width, height))


def crop_box(width: int, height: int) -> bytes:
    """The property that crops to the center."""
    return box(b"clap", struct.pack(">8I", width, 1, height, 1, 0, 1, 0, 1))


@cache
def picture(side: int, *, deep: bool = False, noise: bool = False) -> tuple[bytes, bytes]:
    """The parameters (the box hvcC) and the stream of a square picture."""
    values = np.random.default_rng(0).integers(0, 2**16 if noise else 1, (side, side, 3), np.uint16)
    data = deep_heic(values, 12) if deep else heic(Image.fromarray((values >> 8).astype(np.uint8)), chroma=420)
    at = data.index(b"hvcC") - 4
    return data[at : at + int.from_bytes(data[at : at + 4])], data[data.index(b"mdat") + 4 :]


def container(
    streams: Sequence[bytes],
    properties: Sequence[bytes],
    *,
    grid: tuple[int, int, int, int] | None = None,
    kinds: Sequence[bytes] = (b"hvc1",),
    of_each: Sequence[int] = (1, 2),
    of_grid: Sequence[int] = (1,),
    extents: int = 1,
    shared: bool = False,
    others: bytes = b"",
    references: bytes = b"",
) -> bytes:
    """A HEIC file whose items are ``streams``.

    ``properties`` are boxes, and ``of_each`` and ``of_grid`` are the numbers of those that each
    item and the grid (rows, columns, width, height) have. Each item consists of ``extents`` equal
    parts. All items are the same bytes if ``shared`` is set. ``others`` are boxes at the end.
    """
    contents = [(kinds[number % len(kinds)], stream) for number, stream in enumerate(streams)]
    if grid is not None:
        rows, columns, width, height = grid
        contents.insert(0, (b"grid", struct.pack(">BBBBII", 0, 1, rows - 1, columns - 1, width, height)))
        ids = struct.pack(f">HH{len(streams)}H", 1, len(streams), *range(2, len(streams) + 2))
        references += box(b"dimg", ids)
    entries = b"".join(
        box(b"infe", struct.pack(">IHH4sx", 2 << 24, number, 0, kind)) for number, (kind, _) in enumerate(contents, 1)
    )
    associations = b""
    for number, (kind, _) in enumerate(contents, 1):
        indices = of_grid if kind == b"grid" else of_each
        associations += struct.pack(f">HB{len(indices)}H", number, len(indices), *indices)

    def meta(at: int) -> bytes:
        locations = b""
        for number, (_, content) in enumerate(contents, 1):
            locations += struct.pack(">HHH", number, 0, extents)
            step = len(content) // extents
            for part in range(extents):
                length = len(content) - part * step if part == extents - 1 else step
                locations += struct.pack(">II", at + part * step, length)
            at += 0 if shared and len(contents) > number > (grid is not None) else len(content)
        return box(
            b"meta",
            bytes(4),
            box(b"hdlr", struct.pack(">8x4s13x", b"pict")),
            box(b"pitm", struct.pack(">IH", 0, 1)),
            box(b"iloc", struct.pack(">IBBH", 0, 0x44, 0, len(contents)), locations),
            box(b"iinf", struct.pack(">IH", 0, len(contents)), entries),
            *([box(b"iref", bytes(4), references)] if references else []),
            box(b"iprp", box(b"ipco", *properties), box(b"ipma", struct.pack(">II", 1, len(contents)), associations)),
        )

    file_type = box(b"ftyp", b"heic", bytes(4), b"mif1", b"heic")
    start = len(file_type) + len(meta(0)) + 8
    distinct = contents[: 2 if grid is not None else 1] if shared else contents
    return b"".join([file_type, meta(start), box(b"mdat", *(content for _, content in distinct)), others])


def single(side: int = 64, size: tuple[int, int] | None = None, *more: bytes, **options: Any) -> bytes:
    """A picture with the ``more`` properties and, in its box, another ``size``."""
    parameters, stream = picture(side)
    properties = [size_box(*(size or (side, side))), parameters, *more]
    return container([stream], properties, **{"of_each": range(1, len(properties) + 1), **options})


def tiled(rows: int, columns: int, size: tuple[int, int], tile: Tile | None = None, **options: Any) -> bytes:
    """A picture of ``size`` (width, height) that consists of equal tiles."""
    side, parameters, stream = (64, *picture(64)) if tile is None else tile
    properties = [size_box(*size), size_box(side, side), parameters]
    defaults = {"grid": (rows, columns, *size), "of_each": (2, 3)}
    return container([stream] * (rows * columns), properties, **{**defaults, **options})


def largest(max_pixels: int, *, deep: bool = False) -> bytes:
    """A picture of noise just below a number of pixels, in as many tiles as possible if it is
    large."""
    side = int(max_pixels**0.5) // 16 * 16
    if side < 512:
        parameters, stream = picture(side, deep=deep, noise=True)
        return container([stream], [size_box(side, side), parameters])
    tile = side // 30 // 16 * 16
    count = int((max_pixels - tile**2) ** 0.5) // tile
    noise = tile, *picture(tile, deep=deep, noise=True)
    return tiled(count, count, (count * tile, count * tile), noise)


def units(stream: bytes) -> list[bytes]:
    """The NAL units of a stream with their lengths."""
    found: list[bytes] = []
    while stream:
        length = 4 + int.from_bytes(stream[:4])
        found.append(stream[:length])
        stream = stream[length:]
    return found


def slices(count: int) -> bytes:
    """A picture of one slice, whose continuation is repeated until it has ``count`` slices."""
    parameters, stream = picture(64)
    first = units(stream)[-1]
    later = first[:6] + bytes([first[6] & 0x7F]) + first[7:]
    return container([first + later * (count - 1)], [size_box(64, 64), parameters])


def two_pictures() -> bytes:
    parameters, stream = picture(64)
    return container([stream * 2], [size_box(64, 64), parameters])


def padded_units(count: int) -> bytes:
    """A picture among units that a decoder skips."""
    parameters, stream = picture(64)
    return container([struct.pack(">IHB", 3, 40 << 9 | 1, 0) * count + stream], [size_box(64, 64), parameters])


def long_parameters(size_bytes: int) -> bytes:
    parameters, stream = picture(64)
    return container([stream], [size_box(64, 64), box(b"hvcC", parameters[8:], bytes(size_bytes))])


def transparent() -> bytes:
    return heic(Image.new("RGBA", (64, 64), (255, 0, 0, 100)))


def many_items(count: int) -> bytes:
    """A picture, and other items of no use."""
    parameters, stream = picture(64)
    return container([stream, *[b""] * (count - 1)], [size_box(64, 64), parameters], kinds=(b"hvc1",))
