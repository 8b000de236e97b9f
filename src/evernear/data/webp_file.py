"""Inspect the structure of WebP files. See `evernear.data.image_file`. Sources: RFC 9649 (WebP),
sections 2 and 3; RFC 6386 (VP8), section 9.1."""

import struct
from collections.abc import Iterator

from evernear.data.encoded_image import (
    EXIF_PREFIX,
    EncodedImage,
    broken,
    max_segments,
    read_orientation,
    too_many_segments,
)
from evernear.errors import DataError

MAX_CODE_GROUPS = 2**16
CODE_GROUP_BLOCK_PX = 4
"""Smallest side length of the blocks in which a group of prefix codes is chosen."""
CODE_GROUP_MIN_BITS = 20
"""Minimum size of a group, which has five codes with one symbol each. Each code takes 4 bits."""
_WEBP_ANIMATION, _WEBP_ALPHA = 0x02, 0x10  # flags of VP8X
_VP8_KEY_FRAME = b"\x9d\x01\x2a"
_VP8L_SIGNATURE = 0x2F


def inspect_webp(data: bytes, name: str) -> EncodedImage:
    """Keep the first image and its transparency."""
    image: tuple[bytes, int, int] | None = None
    alpha: tuple[int, int] | None = None
    orientation = 1
    for kind, start, stop in _webp_chunks(data, name):
        flags = data[start] if kind == b"VP8X" and start < stop else 0
        if kind in (b"ANIM", b"ANMF") or flags & _WEBP_ANIMATION:
            raise DataError(f"{name} is animated; a single image is expected.")
        if kind == b"EXIF":
            orientation = read_orientation(data[start:stop].removeprefix(EXIF_PREFIX))
        elif kind == b"ALPH" and image is None and alpha is None:
            alpha = start, stop
        elif kind in (b"VP8 ", b"VP8L") and image is None:
            image = kind, start, stop
    if image is None:
        raise broken(name, "it has no pixels")
    kind, start, stop = image
    width_px, height_px = (_vp8_size if kind == b"VP8 " else _vp8l_size)(data[start:stop], name)
    lossless_bytes = stop - start if kind == b"VP8L" else 0
    chunks = [_webp_chunk(kind, data[start:stop])]
    if alpha is not None and kind == b"VP8 ":
        transparency = data[slice(*alpha)]
        if transparency[:1] and transparency[0] & 0b11:
            lossless_bytes = len(transparency)
        canvas = bytes([_WEBP_ALPHA, 0, 0, 0]) + _uint24(width_px - 1) + _uint24(height_px - 1)
        chunks = [_webp_chunk(b"VP8X", canvas), _webp_chunk(b"ALPH", transparency), *chunks]
    body = b"".join([b"WEBP", *chunks])
    return EncodedImage(
        name,
        "WEBP",
        width_px,
        height_px,
        orientation,
        b"RIFF" + struct.pack("<I", len(body)) + body,
        _max_code_groups(width_px, height_px, lossless_bytes),
    )


def _webp_chunks(data: bytes, name: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type of each chunk, and the start and the end of the chunk's data. If the file is
    truncated, the last chunk is also truncated."""
    at, end = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for _ in range(max_segments(len(data))):
        if at + 8 > end:
            return
        kind, length = struct.unpack_from("<4sI", data, at)
        yield kind, at + 8, min(at + 8 + length, end)
        at += 8 + length + length % 2
    raise too_many_segments(name, "chunks", len(data))


def _webp_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack("<4sI", kind, len(data)) + data + b"\0" * (len(data) % 2)


def _vp8_size(frame: bytes, name: str) -> tuple[int, int]:
    if len(frame) < 10 or frame[0] & 1 or frame[3:6] != _VP8_KEY_FRAME:
        raise broken(name, "it has no header")
    width, height = struct.unpack_from("<HH", frame, 6)
    return width & 0x3FFF, height & 0x3FFF


def _vp8l_size(stream: bytes, name: str) -> tuple[int, int]:
    if len(stream) < 5 or stream[0] != _VP8L_SIGNATURE or stream[4] >> 5:
        raise broken(name, "it has no header")
    (header,) = struct.unpack_from("<I", stream, 1)
    return (header & 0x3FFF) + 1, (header >> 14 & 0x3FFF) + 1


def _max_code_groups(width_px: int, height_px: int, lossless_bytes: int) -> int:
    """Maximum number of prefix code groups in a lossless stream of ``lossless_bytes`` bytes, or 0
    if there is no such stream.

    Counting the groups would require decoding the stream. Instead, one group is assumed for each
    block, and the number of groups is limited by the number of bits in the stream.
    """
    blocks = -(-width_px // CODE_GROUP_BLOCK_PX) * -(-height_px // CODE_GROUP_BLOCK_PX)
    return min(MAX_CODE_GROUPS, blocks, -(-8 * lossless_bytes // CODE_GROUP_MIN_BITS))


def _uint24(value: int) -> bytes:
    return value.to_bytes(3, "little")
