"""Hand-crafted PNG, JPEG, WebP and HEIC files that cost a decoder time or memory.

No library would write such files. The files in `REFUSED` must be rejected by their structure. The
files of `largest_valid_files` are just within every limit.
"""

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, ImageFile

from evernear.data.encoded_image import CODE_GROUP_COST, DEEP_HEIC_PIXEL_COST, WEBP_PIXEL_COST
from evernear.data.heic import MAX_EXTENTS, MAX_ITEMS, MAX_PARAMETERS_SIZE_BYTES, MAX_PROPERTIES, MAX_SLICES
from evernear.data.image_file import CODE_GROUP_BLOCK_PX, MAX_SCANS, MAX_TABLES_SIZE_BYTES
from tests import heic
from tests.dataset_images import saved

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAY, RGB, PALETTE, GRAY_ALPHA, RGBA = 0, 2, 3, 4, 6
_CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGBA: 4}
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
PAETH = 4


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    depth: int = 8,
    color: int = GRAY,
    *,
    interlaced: bool = False,
    row_filter: int = 0,
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """A black PNG file, about a thousandth of its pixels; ``before`` and ``after`` surround the
    pixel data."""

    def rows(width: int, height: int) -> Iterator[bytes]:
        row = bytes([row_filter]) + bytes((width * _CHANNELS[color] * depth + 7) // 8)
        yield from (row for _ in range(height if width else 0))

    packer = zlib.compressobj(9)
    passes = [((width - x + dx - 1) // dx, (height - y + dy - 1) // dy) for x, y, dx, dy in _ADAM7]
    parts = [packer.compress(row) for size in (passes if interlaced else [(width, height)]) for row in rows(*size)]
    pixels = b"".join([*parts, packer.flush()])
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced))
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if color == PALETTE else b""
    return b"".join([SIGNATURE, header, palette, before, chunk(b"IDAT", pixels), after, chunk(b"IEND", b"")])


def empty_blocks(size_bytes: int) -> bytes:
    """A deflate stream of empty blocks, each with a Huffman table for the decoder to build (RFC
    1951, 3.2.7)."""
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
    lengths = dict.fromkeys((*range(1, 16), 18), 4)
    codes = _canonical(lengths)
    header = "0" + _number(2, 2) + _number(0, 5) + _number(0, 5) + _number(15, 4)
    header += "".join(_number(lengths.get(symbol, 0), 3) for symbol in order)
    # Symbols 0 to 14 have 1 to 15 bits, the end of the block has 15, all between have none, and so
    # has the distance 1.
    table = "".join(codes[length] for length in range(1, 16))
    table += codes[18] + _number(138 - 11, 7) + codes[18] + _number(103 - 11, 7) + codes[15] + codes[1]
    end = _canonical({**{symbol: symbol + 1 for symbol in range(15)}, 256: 15})[256]
    bits = (header + table + end) * 8
    blocks = bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
    return blocks * (size_bytes // len(blocks))


def _canonical(lengths: dict[int, int]) -> dict[int, str]:
    """Return the canonical Huffman codes for code lengths, first bit first."""
    codes: dict[int, str] = {}
    code = 0
    for length in range(1, 16):
        for symbol in sorted(symbol for symbol, code_length in lengths.items() if code_length == length):
            codes[symbol] = format(code, f"0{length}b")
            code += 1
        code <<= 1
    return codes


def _number(value: int, bits: int) -> str:
    return format(value, f"0{bits}b")[::-1]


def packed_with_empty_blocks(side: int, size_bytes: int) -> bytes:
    """A gray PNG file whose pixels follow ``size_bytes`` of `empty_blocks`."""
    whole = png(side, side)
    packed = whole[whole.index(b"IDAT") + 4 : -16]
    pixels = packed[:2] + empty_blocks(size_bytes) + packed[2:]
    return whole[: whole.index(b"IDAT") - 4] + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def segment(marker: int, data: bytes) -> bytes:
    """A JPEG segment."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def jpeg(mode: str = "L", size: tuple[int, int] = (8, 8), **options: object) -> bytes:
    """A JPEG file of one color, written by Pillow."""
    return saved(Image.new(mode, size), "JPEG", **options)


def insert(data: bytes, *segments: bytes) -> bytes:
    """Insert segments at the beginning of a JPEG file."""
    return b"".join([data[:2], *segments, data[2:]])


EMPTY_SCAN = bytes.fromhex("FFDA0008010100000010")
"""One component, a refinement of its DC coefficients, no data."""


def with_empty_scans(data: bytes, count: int) -> bytes:
    """Add ``count`` empty scans to a progressive JPEG file."""
    return data[:-2] + EMPTY_SCAN * count + data[-2:]


def progressive(width: int, height: int, components: int, scans: int) -> bytes:
    """A progressive JPEG file whose scans of a few bytes make the decoder visit every
    coefficient.

    Each Huffman table has one code: no change (DC), or the longest end-of-band run (AC).
    """
    blocks = -(-width // 8) * -(-height // 8)
    names = range(1, components + 1)
    quantization = segment(0xDB, bytes([0]) + bytes([1] * 64))
    frame = segment(
        0xC2, struct.pack(">BHHB", 8, height, width, components) + b"".join(bytes([n, 0x11, 0]) for n in names)
    )
    tables = _huffman(0x00, 0x00) + _huffman(0x10, 0xE0)
    direct = segment(0xDA, bytes([components]) + b"".join(bytes([n, 0]) for n in names) + bytes([0, 0, 0x01]))
    direct += bytes(-(-blocks * components // 8))
    runs = _bits(("0" + "1" * 14) * -(-blocks // 32767))
    first = [segment(0xDA, bytes([1, n, 0, 1, 63, 0x01])) + runs for n in names]
    refined = [
        segment(0xDA, bytes([1, number % components + 1, 0, 1, 63, 0x10])) + runs
        for number in range(scans - 1 - components)
    ]
    return b"".join([b"\xff\xd8", quantization, frame, tables, direct, *first, *refined, b"\xff\xd9"])


def _huffman(table: int, symbol: int) -> bytes:
    return segment(0xC4, bytes([table, 1, *[0] * 15, symbol]))


def _bits(text: str) -> bytes:
    text += "1" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8).replace(b"\xff", b"\xff\x00")


def exif(entries: int, size_bytes: int) -> bytes:
    """EXIF data with many tags, each of which claims all the data as its value."""
    tags = b"".join(struct.pack("<HHII", n, 7, size_bytes, 0) for n in range(entries))
    return (b"II*\0" + struct.pack("<IH", 8, entries) + tags).ljust(size_bytes, b"\0")


def noise(mode: str, side: int, **options: object) -> bytes:
    """A JPEG file of noise at full quality, the largest possible file for its pixels."""
    buffer, block = BytesIO(), ImageFile.MAXBLOCK
    ImageFile.MAXBLOCK = 8 * side * side + 2**16  # a progressive file is written in one piece
    try:
        _noise(mode, side).save(buffer, "JPEG", quality=100, subsampling=0, **options)
    finally:
        ImageFile.MAXBLOCK = block
    return buffer.getvalue()


def _noise(mode: str, side: int) -> Image.Image:
    size = min(side, 512)
    tile = np.random.default_rng(0).integers(0, 256, (size, size, len(mode)), np.uint8)
    pixels = np.tile(tile, (-(-side // size), -(-side // size), 1))[:side, :side]
    return Image.frombytes(mode, (side, side), np.ascontiguousarray(pixels).tobytes())


def animated(frames: int = 3) -> bytes:
    """An animated PNG file."""
    images = [Image.new("L", (8, 8), shade) for shade in range(frames)]
    return saved(images[0], "PNG", save_all=True, append_images=images[1:])


def arithmetic(marker: int = 0xC9) -> bytes:
    """A JPEG file that declares arithmetic instead of Huffman coding."""
    return jpeg().replace(b"\xff\xc0", bytes([0xFF, marker]), 1)


def webp_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a WebP file."""
    return struct.pack("<4sI", kind, len(data)) + data + bytes(len(data) % 2)


def riff(*chunks: bytes) -> bytes:
    """A WebP file of ``chunks``."""
    body = b"".join([b"WEBP", *chunks])
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp(mode: str = "RGB", size: tuple[int, int] = (8, 8), **options: object) -> bytes:
    """A WebP file of a gradient, as Pillow writes it."""
    gradient = np.arange(size[0] * size[1] * len(mode)).astype(np.uint8).reshape(size[1], size[0], len(mode))
    return saved(Image.frombytes(mode, size, gradient.tobytes()), "WEBP", **options)


def webp_noise(side: int) -> bytes:
    """A lossy WebP file of noise at full quality."""
    return saved(_noise("RGB", side), "WEBP", quality=100, method=0)


def code_groups(side: int, groups: int) -> bytes:
    """A lossless WebP file whose blocks of 4 x 4 pixels choose among ``groups`` groups of prefix
    codes (RFC 9649)."""
    bits: list[str] = []

    def put(value: int, count: int) -> None:
        bits.append(_number(value, count))

    def one_symbol() -> None:
        put(0b0001, 4)  # a simple code, of one symbol, of one bit, which is 0

    def bytes_of_8_bits() -> None:
        put(0, 1)  # a normal code, whose lengths are coded with one length: 8
        order = (17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8)
        put(len(order) - 4, 4)
        for length in order:
            put(length == 8, 3)
        put(1 | 3 << 1 | 254 << 4, 12)  # for the first 256 symbols

    put(0x2F, 8)
    put(side - 1, 14)
    put(side - 1, 14)
    put(0, 4)  # opaque, version 0
    put(0b100, 3)  # neither transforms nor a color cache, but groups
    put(0, 3)  # for blocks of 4 x 4 pixels
    put(0, 1)  # the image of the groups has no color cache
    bytes_of_8_bits()  # green: the lower byte of the group's number
    bytes_of_8_bits()  # red: the upper one
    for _ in range(3):
        one_symbol()
    for block in range((-(-side // 4)) ** 2):
        number = block % groups
        bits.append(format(number & 255, "08b") + format(number >> 8, "08b"))
    bits.append(_number(0b0001, 4) * 5 * groups)
    text = "".join(bits)
    text += "0" * (-len(text) % 8 + 64)
    return riff(webp_chunk(b"VP8L", int(text[::-1], 2).to_bytes(len(text) // 8, "little")))


def forged_webp(width: int, height: int) -> bytes:
    """A lossy WebP file of 8 x 8 pixels whose header declares another size."""
    whole = webp()
    at = whole.index(b"\x9d\x01\x2a") + 3
    return whole[:at] + struct.pack("<HH", width, height) + whole[at + 4 :]


def animated_webp() -> bytes:
    """An animated WebP file."""
    images = [Image.new("RGB", (8, 8), color) for color in ("red", "green")]
    return saved(images[0], "WEBP", save_all=True, append_images=images[1:])


@dataclass(frozen=True)
class Bomb:
    """A file that must be rejected by its structure; the error contains ``sentence``."""

    make: Callable[[], bytes]
    sentence: str


def forged(width: int, height: int) -> bytes:
    """A PNG file of 8 x 8 pixels with a different size in its header."""
    whole = png(8, 8)
    return whole[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, GRAY, 0, 0, 0)) + whole[33:]


TEXT = chunk(b"tEXt", b"a\0b")
REFUSED = {
    "10,000 by 10,000 in 1 bit": Bomb(lambda: png(10_000, 10_000, 1), "is too large"),
    "5,001 by 5,001 in 64 bits": Bomb(lambda: png(5_001, 5_001, 16, RGBA), "is too large"),
    "65,535 by 65,535 by its header": Bomb(
        lambda: jpeg().replace(b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08", b"\xff\xc0\x00\x0b\x08\xff\xff\xff\xff"),
        "is too large",
    ),
    "a column of 20,000,000 pixels": Bomb(lambda: forged(1, 20_000_000), "is too long"),
    "a row of 20,000,000 pixels": Bomb(lambda: forged(20_000_000, 1), "is too long"),
    "9,000 scans": Bomb(lambda: with_empty_scans(jpeg(size=(2_000, 2_000), progressive=True), 9_000), "scans"),
    "one scan too many": Bomb(lambda: progressive(512, 512, 3, MAX_SCANS + 1), "scans"),
    "quantization tables": Bomb(
        lambda: insert(jpeg(), *[segment(0xDB, bytes(65) * 1_000)] * (MAX_TABLES_SIZE_BYTES // 65_000 + 1)), "tables"
    ),
    "segments": Bomb(lambda: insert(jpeg(), segment(0xE1, b"Exif\0\0ab") * 60_000), "segments"),
    "chunks": Bomb(lambda: png(8, 8, before=TEXT * 60_000), "chunks"),
    "empty chunks of pixels": Bomb(lambda: png(8, 8, before=chunk(b"IDAT", b"") * 60_000), "chunks"),
    "animation": Bomb(animated, "is animated"),
    "arithmetic coding": Bomb(lambda: arithmetic(0xC9), "arithmetic or lossless"),
    "progressive arithmetic coding": Bomb(lambda: arithmetic(0xCA), "arithmetic or lossless"),
    "lossless coding": Bomb(lambda: arithmetic(0xC3), "arithmetic or lossless"),
    "WebP of 16,383 by 16,383 by its header": Bomb(lambda: forged_webp(16_383, 16_383), "is too large"),
    "WebP of more pixels than its memory allows": Bomb(lambda: forged_webp(4_000, 4_000), "count as 26666667"),
    "WebP of 65,536 groups of codes": Bomb(lambda: code_groups(1_024, 65_536), "pixels of lossless WebP count as"),
    "animated WebP": Bomb(animated_webp, "is animated"),
    "chunks of a WebP": Bomb(lambda: riff(webp_chunk(b"XMP ", b"a") * 60_000), "chunks"),
    "HEIC of 65,535 by 65,535 by its box": Bomb(lambda: heic.single(64, (65_535, 65_535)), "is too large"),
    "HEIC whose stream exceeds its box": Bomb(lambda: heic.single(1_024, (64, 64)), "is that of another picture"),
    "HEIC of 750 tiles of which one is a picture": Bomb(
        lambda: heic.tiled(3, 250, (64, 64)), "its tiles do not fit its grid"
    ),
    "HEIC whose tiles are the same bytes": Bomb(
        lambda: heic.tiled(4, 4, (256, 256), (64, *heic.picture(64, noise=True)), shared=True), "its parts overlap"
    ),
    "HEIC of fewer tiles than its grid has": Bomb(
        lambda: heic.tiled(2, 2, (128, 128), grid=(2, 3, 128, 128)), "4 of 6 tiles are there"
    ),
    "HEIC of tiles beyond all limits": Bomb(lambda: heic.tiled(250, 4, (30_000, 30_000)), "items"),
    "items of a HEIC": Bomb(lambda: heic.many_items(MAX_ITEMS + 1), "items"),
    "parts of a HEIC item": Bomb(lambda: heic.single(extents=MAX_EXTENTS + 1), "parts"),
    "properties of a HEIC item": Bomb(lambda: heic.single(of_each=[1, 2] + [1] * (MAX_PROPERTIES - 1)), "properties"),
    "parameters of a HEIC": Bomb(lambda: heic.long_parameters(MAX_PARAMETERS_SIZE_BYTES), "bytes of parameters"),
    "slices of a HEIC": Bomb(lambda: heic.slices(MAX_SLICES + 1), "slices"),
    "units of a HEIC": Bomb(lambda: heic.padded_units(60_000), "units"),
    "two pictures in a HEIC item": Bomb(heic.two_pictures, "a tile is not one picture"),
    "boxes of a HEIC": Bomb(lambda: heic.single(others=heic.box(b"free") * 60_000), "boxes"),
    "animated HEIC": Bomb(lambda: heic.single(others=heic.box(b"moov")), "is animated"),
    "transparent HEIC": Bomb(heic.transparent, "transparency"),
    "HEIC that crops beyond itself": Bomb(lambda: heic.single(64, None, heic.crop_box(65, 64)), "its crop"),
}


def largest_valid_files(max_pixels: int) -> dict[str, Callable[[], bytes]]:
    """Files of ``max_pixels`` in every supported format, each with the most expensive content
    within the limits."""
    side = int(max_pixels**0.5)
    files: dict[str, Callable[[], bytes]] = {
        "PNG, RGBA, 16 bits": lambda: png(side, side, 16, RGBA),
        "PNG, RGBA, 16 bits, interlaced": lambda: png(side, side, 16, RGBA, interlaced=True),
        "PNG, RGBA, 16 bits, Paeth filter": lambda: png(side, side, 16, RGBA, row_filter=PAETH),
        "PNG, gray and alpha, 16 bits": lambda: png(side, side, 16, GRAY_ALPHA),
        "PNG, gray, 16 bits, interlaced": lambda: png(side, side, 16, GRAY, interlaced=True),
        "PNG, palette with transparency": lambda: png(side, side, 8, PALETTE, before=chunk(b"tRNS", bytes(range(256)))),
        "PNG, gray, 1 bit": lambda: png(side, side, 1),
        "PNG, gray, 6 MB of Huffman tables": lambda: packed_with_empty_blocks(side, 6_000_000),
        "PNG, metadata of 6 MB in 11,000 chunks": lambda: png(
            side, side, before=chunk(b"tEXt", b"a\0" + bytes(530)) * 11_000
        ),
        "PNG, 60 compressed texts of 1 MiB": lambda: png(
            side, side, before=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20), 9)) * 60
        ),
        "PNG, color profile of 64 MiB": lambda: png(
            side, side, before=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**26), 9))
        ),
        "PNG, EXIF of 6 MB": lambda: png(side, side, before=chunk(b"eXIf", exif(60_000, 6_000_000))),
        "JPEG, RGB, noise": lambda: noise("RGB", side),
        "JPEG, RGB, progressive, noise": lambda: noise("RGB", side, progressive=True),
        "JPEG, CMYK": lambda: jpeg("CMYK", (side, side), subsampling=0),
        "JPEG, EXIF of 11,000 segments": lambda: insert(
            jpeg("RGB", (side, side)), segment(0xE1, b"Exif\0\0" + exif(8, 530)) * 11_000
        ),
        "JPEG, color profile of 16 MB": lambda: insert(
            jpeg("RGB", (side, side)),
            *[segment(0xE2, b"ICC_PROFILE\0" + bytes([n, 255]) + bytes(65_000)) for n in range(1, 256)],
        ),
    }
    doubled = int((2 * max_pixels) ** 0.5) // 2 * 2
    files["JPEG, RGB, twice the pixels"] = lambda: noise("RGB", doubled)
    files["JPEG, RGB, progressive, twice the pixels"] = lambda: progressive(doubled, doubled, 1, MAX_SCANS)
    short = max_pixels // 32_767
    if short:
        files["PNG, RGBA, 16 bits, 32,767 rows"] = lambda: png(short, 32_767, 16, RGBA)
        files["PNG, RGBA, 16 bits, 32,767 columns"] = lambda: png(32_767, short, 16, RGBA)
        files["PNG, one column of 32,767 pixels"] = lambda: png(1, 32_767, 16, RGBA)
    # WebP pixels count as more; see WEBP_PIXEL_COST and CODE_GROUP_COST.
    files["WebP, RGB, noise"] = lambda: webp_noise(int((max_pixels / WEBP_PIXEL_COST) ** 0.5))
    blocks = int((max_pixels / (CODE_GROUP_BLOCK_PX**2 * WEBP_PIXEL_COST + CODE_GROUP_COST)) ** 0.5)
    files["WebP, a group of codes for each block"] = lambda: code_groups(CODE_GROUP_BLOCK_PX * blocks, blocks**2)
    if max_pixels >= 1_000_000:  # the groups that a smaller file might have count as too many pixels
        reduced = int((0.7 * max_pixels / WEBP_PIXEL_COST) ** 0.5)
        files["WebP, RGBA"] = lambda: webp("RGBA", (reduced, reduced), method=0)
        files["WebP, RGBA, lossless"] = lambda: webp("RGBA", (reduced, reduced), lossless=True, method=0, quality=0)
    files["HEIC, RGB, noise"] = lambda: heic.largest(max_pixels)
    files["HEIC, RGB, 12 bits, 4:4:4"] = lambda: heic.largest(int(max_pixels / DEEP_HEIC_PIXEL_COST), deep=True)
    for components, name in ((1, "gray"), (3, "RGB"), (4, "CMYK")):
        files[f"JPEG, {name}, progressive, {MAX_SCANS} scans"] = lambda components=components: progressive(
            side, side, components, MAX_SCANS
        )
    return files


def mutated(rng: random.Random, image: bytes) -> bytes:
    """Damage an image file in one or several places."""
    data = bytearray(image)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.choice(["flip", "cut", "drop", "repeat", "insert", "marker"]):
            case "flip" if data:
                data[at] ^= 1 << rng.randrange(8)
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + rng.randrange(1, 64)]
            case "repeat":
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            case "marker":
                data[at:at] = bytes([0xFF, rng.randrange(256)])
            case _:
                data[at:at] = rng.randbytes(rng.randrange(64))
    return bytes(data)
