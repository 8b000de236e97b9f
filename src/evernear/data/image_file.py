"""Inspect the structure of PNG, JPEG, WebP and HEIC files, to limit the cost of decoding them.

A file of a few kilobytes can claim to contain gigabytes of pixels, thousands of passes over the
pixels, or metadata that takes longer to read than the image. `inspect` walks through the chunks or
segments of a file without decoding it. `inspect` rejects files that are too expensive to decode,
and removes the metadata. The decoder then receives one header, one palette and one stream of
pixels.

Pillow itself limits the number of pixels and the size of text, but not the number of scans, chunks
or prefix codes (docs/decisions/0014-pixels.md). HEIC files are in `evernear.data.heic`.

Sources: PNG specification (third edition), sections 5 and 11; ITU-T T.81, annex B; RFC 9649 (WebP),
sections 2 and 3; RFC 6386 (VP8), section 9.1; Exif 2.32, section 4.6.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from evernear.common.disk import GIT_LFS_POINTER, git_lfs_pointer
from evernear.data.encoded_image import HALVED_PIXEL_COST, EncodedImage, broken, max_segments, too_many_segments
from evernear.data.heic import SIGNATURE as HEIC_SIGNATURE
from evernear.data.heic import inspect_heic
from evernear.errors import DataError
from evernear.settings.section import MAX_PIXELS

MAX_SIDE_PX = 2**15 - 1
"""Each row requires a pointer, and resizing requires memory for each column."""
MAX_SCANS = 32
"""Maximum number of scans in a JPEG file. libjpeg writes 10 scans for a color image and 18 for a
CMYK image. MozJPEG writes up to about 20 scans."""
MAX_TABLES_SIZE_BYTES = 2**16
"""Maximum size of the quantization and Huffman tables in a JPEG file. The usual four quantization
tables and eight Huffman tables require 2.8 KiB. Each scan may add Huffman tables."""

EXIF_PREFIX = b"Exif\0\0"
_ORIENTATION_TAG = 0x0112
_EXIF_SHORT, _EXIF_LONG = 3, 4

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_SIGNATURE = b"\xff\xd8\xff"
_WEBP_SIGNATURE = re.compile(rb"RIFF....WEBP", re.DOTALL)
SIGNATURE_SIZE_BYTES = 12
# Image formats that are not supported, so that a message can state the format.
_OTHER_FORMATS = {
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{4}\0{4}",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "AVIF": rb".{4}ftypavi[fs]",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "JPEG 2000": rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  ",
}
_ANY_FORMAT = re.compile(
    b"|".join(
        [
            re.escape(_PNG_SIGNATURE),
            re.escape(_JPEG_SIGNATURE),
            _WEBP_SIGNATURE.pattern,
            HEIC_SIGNATURE.pattern,
            *_OTHER_FORMATS.values(),
        ]
    ),
    re.DOTALL,
)
# A JPEG marker. Stuffed zeros and restart markers belong to the surrounding scan.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_TEM, _SOI, _EOI, _SOS, _APP1 = 0x01, 0xD8, 0xD9, 0xDA, 0xE1
_COLOR_SPACE = {0xE0: b"JFIF\0", 0xEE: b"Adobe"}  # APP0, APP14
_TABLES = frozenset({0xC4, 0xDB, 0xDD})  # DHT, DQT, DRI
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15
_PROGRESSIVE = 0xC2
_HUFFMAN_FRAMES = frozenset({0xC0, 0xC1, _PROGRESSIVE})  # baseline, extended sequential, progressive


def suffix_of(data: bytes) -> Literal[".png", ".jpg", ".webp", ".heic"]:
    """A file of another format counts as PNG."""
    if data.startswith(_JPEG_SIGNATURE):
        return ".jpg"
    if HEIC_SIGNATURE.match(data):
        return ".heic"
    return ".webp" if _WEBP_SIGNATURE.match(data) else ".png"


def inspect(data: bytes, max_pixels: int, name: str = "The image", setting: str = "") -> EncodedImage:
    """Inspect a PNG, JPEG, WebP or HEIC file. The format is detected from the content.

    Raises:
        DataError: the file is empty, broken or animated, or it has an unsupported format, more than
            ``max_pixels`` pixels, or an encoding of unbounded cost. The message begins with
            ``name``, and states the ``setting`` that limits the number of pixels.
    """
    if data.startswith(_PNG_SIGNATURE):
        image = _inspect_png(data, name)
    elif data.startswith(_JPEG_SIGNATURE):
        image = _inspect_jpeg(data, name)
    elif _WEBP_SIGNATURE.match(data):
        image = inspect_webp(data, name)
    elif HEIC_SIGNATURE.match(data):
        image = inspect_heic(data, name)
    elif data.startswith(GIT_LFS_POINTER):
        raise git_lfs_pointer(name)
    elif data:
        other = [kind for kind, signature in _OTHER_FORMATS.items() if re.match(signature, data, re.DOTALL)]
        remedy = f" but {other[0]}; convert it" if other else ""
        raise DataError(f"{name} is not a PNG, JPEG, WebP or HEIC image{remedy}.")
    else:
        raise DataError(f"{name} is empty.")
    limit = min(max_pixels, MAX_PIXELS)
    if image.format == "JPEG" and limit < image.area <= MAX_PIXELS:
        image = replace(image, halved=True)
    if image.pixels > limit:
        size = f"{image.width_px} x {image.height_px} pixels"
        if image.halved:
            size += f" of JPEG count as {image.pixels}"
            size += "; save it as a baseline JPEG" if image.area <= 2 * limit else ""
        elif image.area <= limit:
            kind = "lossless WebP" if image.code_groups else {"WEBP": "WebP"}.get(image.format, image.format)
            size += f" of {kind} count as {image.pixels}; save it as PNG or JPEG"
        elif image.format == "HEIC" and image.area * HALVED_PIXEL_COST <= limit:
            size += " of HEIC; save it as JPEG, which is read at half its size"
        by = f" by {setting}" if setting and limit < MAX_PIXELS else ""  # no setting allows more than MAX_PIXELS
        raise DataError(f"{name} is too large: {size}, {limit} are allowed{by}.")
    if max(image.width_px, image.height_px) > MAX_SIDE_PX:
        raise DataError(f"{name} is too long: {image.width_px} x {image.height_px} pixels, a side has {MAX_SIDE_PX}.")
    if not image.pixels:
        raise broken(name, "it has no pixels")
    return image


def has_image_signature(data: bytes) -> bool:
    """Whether the first `SIGNATURE_SIZE_BYTES` are those of an image, supported or not."""
    return _ANY_FORMAT.match(data) is not None


def _inspect_png(data: bytes, name: str) -> EncodedImage:
    """Keep the chunks IHDR, PLTE and tRNS, and merge the pixel data into one chunk."""
    headers: dict[bytes, memoryview] = {}
    pixels: list[memoryview] = []
    pixels_ended = False
    orientation = 1
    view = memoryview(data)
    for number, (kind, start, stop) in enumerate(_png_chunks(data, name)):
        if (kind == b"IHDR") != (number == 0):
            raise broken(name, "its header is not its first chunk")
        if kind == b"IDAT":
            if not pixels_ended:
                pixels.append(view[start:stop])
            continue
        pixels_ended = bool(pixels)
        if kind == b"acTL" and not pixels and int.from_bytes(data[start : start + 4]) > 1:
            raise DataError(f"{name} is animated; a single image is expected.")
        if kind == b"eXIf":
            orientation = read_orientation(data[start:stop].removeprefix(EXIF_PREFIX))
        elif kind == b"IHDR" or (kind in (b"PLTE", b"tRNS") and not pixels):
            headers.setdefault(kind, view[start - 8 : stop + 4])
    if b"IHDR" not in headers or len(headers[b"IHDR"]) != 25:
        raise broken(name, "it has no header")
    if not pixels:
        raise broken(name, "it has no pixels")
    width_px, height_px = struct.unpack_from(">II", headers[b"IHDR"], 8)
    chunks = [*headers.values(), *_png_chunk(b"IDAT", pixels), *_png_chunk(b"IEND", [])]
    return EncodedImage(name, "PNG", width_px, height_px, orientation, b"".join([_PNG_SIGNATURE, *chunks]))


def _png_chunks(data: bytes, name: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, start and end of each chunk. The last chunk may be truncated."""
    at = len(_PNG_SIGNATURE)
    for _ in range(max_segments(len(data))):
        if at + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, min(at + 8 + length, len(data))
        if kind == b"IEND":
            return
        at += 12 + length
    raise too_many_segments(name, "chunks", len(data))


def _png_chunk(kind: bytes, data: list[memoryview]) -> Iterator[bytes | memoryview]:
    yield struct.pack(">I4s", sum(map(len, data)), kind)
    yield from data
    checksum = zlib.crc32(kind)
    for part in data:
        checksum = zlib.crc32(part, checksum)
    yield struct.pack(">I", checksum)


def _inspect_jpeg(data: bytes, name: str) -> EncodedImage:
    """Keep the tables, the frame, the scans and the color space markers (JFIF, Adobe)."""
    parts: list[memoryview] = []
    color_space: dict[int, memoryview] = {}
    frame: tuple[int, int] | None = None
    orientation: int | None = None
    tables_size_bytes = scans = samples = 0
    is_progressive = False
    view = memoryview(data)
    for marker, start, stop in _jpeg_segments(data, name):
        if marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise DataError(f"{name} is a JPEG file of more than {MAX_SCANS} scans; save it again.")
            following = _JPEG_MARKER.search(data, stop)
            parts.append(view[start : following.start() if following else len(data)])
        elif marker == _EOI:
            parts.append(view[start:stop])
        elif marker in _TABLES:
            tables_size_bytes += stop - start
            if tables_size_bytes > MAX_TABLES_SIZE_BYTES:
                raise DataError(
                    f"{name} is a JPEG file with more than {MAX_TABLES_SIZE_BYTES} bytes of tables; save it again."
                )
            parts.append(view[start:stop])
        elif marker in _FRAMES:
            frame = _jpeg_frame(data, marker, start, frame, name)
            samples, is_progressive = _jpeg_samples(data[start:stop], *frame), marker == _PROGRESSIVE
            parts.append(view[start:stop])
        elif marker in _COLOR_SPACE and data.startswith(_COLOR_SPACE[marker], start + 4) and not scans:
            color_space[marker] = view[start:stop]
        elif marker == _APP1 and orientation is None and data.startswith(EXIF_PREFIX, start + 4):
            orientation = read_orientation(data[start + 4 + len(EXIF_PREFIX) : stop])
    if frame is None or not scans:
        raise broken(name, "it has no pixels")
    width_px, height_px = frame
    image_data = b"".join([b"\xff\xd8", *color_space.values(), *parts])
    coefficients = 2 * samples if is_progressive or scans > 1 else 0
    return EncodedImage(
        name, "JPEG", width_px, height_px, orientation or 1, image_data, coefficients_size_bytes=coefficients
    )


def _jpeg_segments(data: bytes, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, the start and the end of each segment. Like libjpeg, stop at the end of the
    image or at the first error. The scan data come after the segment."""
    at = 2
    for _ in range(max_segments(len(data))):
        match = _JPEG_MARKER.search(data, at)
        if match is None:
            return
        marker, start, at = data[match.end() - 1], match.start(), match.end()
        if marker == _EOI:
            yield marker, start, at
            return
        if marker == _TEM:
            continue
        length = int.from_bytes(data[at : at + 2])
        at += length
        if marker == _SOI or length < 2 or at > len(data):
            return
        yield marker, start, at
    raise too_many_segments(name, "segments", len(data))


def _jpeg_frame(data: bytes, marker: int, start: int, earlier: tuple[int, int] | None, name: str) -> tuple[int, int]:
    if earlier is not None:
        raise broken(name, "it has two headers")
    if marker not in _HUFFMAN_FRAMES:
        raise DataError(
            f"{name} is a JPEG file with arithmetic or lossless coding; save it as a baseline or progressive one."
        )
    height_px, width_px = struct.unpack_from(">HH", data[start + 5 : start + 9].ljust(4, b"\0"))
    return width_px, height_px


def _jpeg_samples(frame: bytes, width_px: int, height_px: int) -> int:
    """The samples of all components, of which those of color may be fewer than pixels (T.81,
    A.1.1)."""
    factors = [(byte >> 4, byte & 15) for byte in frame[11::3]]
    across, down = max((h for h, _ in factors), default=1) or 1, max((v for _, v in factors), default=1) or 1
    blocks = -(-width_px // (8 * across)) * -(-height_px // (8 * down))
    return 64 * blocks * sum(h * v for h, v in factors)


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
    """Yield type, start and end of each chunk. The last chunk may be truncated."""
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
    """An upper bound, or 0 without a lossless stream. Counting would require decoding, so one group
    is assumed for each block, and the number of bits limits it."""
    blocks = -(-width_px // CODE_GROUP_BLOCK_PX) * -(-height_px // CODE_GROUP_BLOCK_PX)
    return min(MAX_CODE_GROUPS, blocks, -(-8 * lossless_bytes // CODE_GROUP_MIN_BITS))


def _uint24(value: int) -> bytes:
    return value.to_bytes(3, "little")


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
