"""Inspect the structure of HEIC files, and rebuild them with only what a decoder needs.

A HEIC file is a container of items: a picture or the tiles of a picture, thumbnails, depth maps,
gain maps and metadata, in boxes that refer to each other and to ranges of bytes. Any of them can
claim sizes that the file does not have. `inspect_heic` follows the references from the primary
item, reads the size that the HEVC stream itself declares, and writes a new file of one picture, its
tiles and their parameters. The decoder receives none of the other boxes.

Sources: ISO/IEC 14496-12 (boxes), sections 4.2 and 8.11; ISO/IEC 23008-12 (HEIF), sections 6.5, 6.6
and annex B; ISO/IEC 14496-15 (hvcC), section 8.3; ITU-T H.265 (HEVC), sections 7.3.1 to 7.3.3.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec

from evernear.data.encoded_image import EncodedImage, broken, max_segments, too_many_segments
from evernear.errors import DataError

SIGNATURE = re.compile(rb".{4}ftyp(?:hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)

MAX_ITEMS = 1_000
"""A photograph of 48 megapixels has about 200 tiles. libheif reads no more items."""
MAX_PARAMETERS_SIZE_BYTES = 2**14
"""Parameter sets of a stream have about a hundred bytes, without the encoder's own messages."""
MAX_SLICES = 600
"""Slice segments in a picture, as in the highest level of HEVC. Each takes some kilobytes."""
MAX_EXTENTS = 32
MAX_PROPERTIES = 64
_MAX_SPS_SIZE_BYTES = 512
_MAX_CODED_BITS = 32
_CODING_UNIT_PX = 64

_PICTURE, _GRID = b"hvc1", b"grid"
_DESCRIPTIONS = frozenset({b"hvcC", b"ispe", b"colr", b"pixi", b"pasp", b"auxC"})
_ALPHA = re.compile(rb"urn:(?:mpeg:mpegB:cicp:systems:auxiliary:alpha|mpeg:hevc:2015:auxid:1)\0")

_CHROMA_420, _CHROMA_444 = 1, 3
# Types of NAL units.
_RANDOM_ACCESS_PICTURES = range(16, 22)
_PARAMETER_SETS = (_VPS, _SPS, _PPS) = (32, 33, 34)

# The EXIF orientation after a rotation by 90 degrees counterclockwise and after each mirroring, for
# an image that had the orientation of the key.
_ROTATED = {1: 8, 8: 3, 3: 6, 6: 1, 2: 5, 5: 4, 4: 7, 7: 2}
_MIRRORED = (
    {1: 4, 4: 1, 2: 3, 3: 2, 5: 8, 8: 5, 6: 7, 7: 6},  # top and bottom
    {1: 2, 2: 1, 3: 4, 4: 3, 5: 6, 6: 5, 7: 8, 8: 7},  # left and right
)


@cache
def can_decode() -> bool:
    """Whether the extra ``heic`` is installed."""
    return find_spec("pillow_heif") is not None


def inspect_heic(data: bytes, name: str) -> EncodedImage:
    """Keep the primary picture or its tiles, and their parameters."""
    if not can_decode():
        raise DataError(
            f"{name} is a HEIC image, which needs evernear's extra heic: pip install 'evernear[heic]', or convert it."
        )
    try:
        return _inspect(_Container(data, name))
    except EOFError:
        raise broken(name, "a part of it is missing") from None


class _Reader:
    """Reads big-endian integers and boxes from a part of ``data``. Raises EOFError at its end."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def take(self, size: int) -> bytes:
        start = self.at
        self.skip(size)
        return self.data[start : self.at]

    def skip(self, size: int) -> None:
        if size > self.end - self.at:
            raise EOFError
        self.at += size

    def uint(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def full_box(self) -> tuple[int, int]:
        """Version and flags."""
        return self.uint(1), self.uint(3)

    def boxes(self, name: str) -> "Iterator[tuple[bytes, _Reader]]":
        """Yield type and content of each box up to the end."""
        for _ in range(MAX_ITEMS + max_segments(len(self.data))):
            if self.at >= self.end:
                return
            start, size, kind = self.at, self.uint(4), self.take(4)
            if size == 1:
                size = self.uint(8)
            end = start + size if size else self.end
            if not self.at <= end:
                raise broken(name, "a box is smaller than its header")
            yield kind, _Reader(self.data, self.at, min(end, self.end))
            self.at = end
        raise too_many_segments(name, "boxes", len(self.data))


@dataclass
class _Extents:
    """Where the bytes of an item are: in the file, or in the box ``idat``."""

    in_idat: bool
    ranges: list[tuple[int, int]]


@dataclass
class _Properties:
    """The properties of an item. ``orientation`` is the EXIF one of its rotation and mirroring."""

    boxes: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    orientation: int = 1

    def size(self, name: str) -> tuple[int, int]:
        content = self.boxes.get(b"ispe", b"")
        if len(content) != 12:
            raise broken(name, "its size is missing")
        return struct.unpack(">4xII", content)


class _Container:
    """The items of a HEIC file. Nothing that an item refers to is read before it is asked for."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self._data = data
        self._kinds: dict[int, bytes] = {}
        self._extents: dict[int, _Extents] = {}
        self._references: list[tuple[bytes, int, tuple[int, ...]]] = []
        self._properties: list[tuple[bytes, _Reader]] = []
        self._associations: dict[int, tuple[int, bytes]] = {}
        self._idat = _Reader(data, 0, 0)
        self._left_bytes, self._left_units = len(data), MAX_ITEMS + max_segments(len(data))
        self.primary = 0
        self._read_meta()

    def kind(self, item: int) -> bytes:
        return self._kinds.get(item, b"")

    def tiles(self) -> tuple[int, ...]:
        """The items of which the primary item is made."""
        return next((to for kind, item, to in self._references if kind == b"dimg" and item == self.primary), ())

    def has_alpha(self) -> bool:
        auxiliary = [item for kind, item, to in self._references if kind == b"auxl" and self.primary in to]
        return any(
            kind == b"auxC" and _ALPHA.match(content, 4)
            for item in auxiliary
            for _, kind, content in self._associated(item)
        )

    def properties(self, item: int) -> _Properties:
        """Raises DataError for a property that must be understood, and is not."""
        found = _Properties()
        transformed = False
        for essential, kind, content in self._associated(item):
            if kind == b"irot" and content:
                for _ in range(content[0] & 3):
                    found.orientation = _ROTATED[found.orientation]
            elif kind == b"imir" and content:
                found.orientation = _MIRRORED[content[0] & 1][found.orientation]
            elif kind == b"clap" and transformed:
                raise unsupported(self.name, "crops a rotated picture")
            elif kind == b"colr" and content[:4] != b"nclx":
                continue  # an ICC profile, which is not used in other formats either
            elif kind in _DESCRIPTIONS or kind == b"clap":
                found.boxes.setdefault(kind, content)
            elif essential:
                raise unsupported(self.name, f"needs {kind.decode('latin1')!r}")
            transformed = transformed or kind in (b"irot", b"imir")
        return found

    def _associated(self, item: int) -> Iterator[tuple[bool, bytes, bytes]]:
        """Yield the properties of an item: whether a reader must understand it, type, content."""
        size, indices = self._associations.get(item, (1, b""))
        if len(indices) > size * MAX_PROPERTIES:
            raise DataError(f"{self.name} has an item of more than {MAX_PROPERTIES} properties; save it again.")
        top = 1 << 8 * size - 1
        for at in range(0, len(indices), size):
            index = int.from_bytes(indices[at : at + size])
            if not 0 < index & ~top <= len(self._properties):
                raise broken(self.name, "a property is missing")
            kind, reader = self._properties[(index & ~top) - 1]
            yield bool(index & top), kind, self._data[reader.at : reader.end]

    def units(self, item: int, length_size: int) -> Iterator[bytes]:
        """Yield the NAL units of a picture."""
        stream = self.content(item)
        reader = _Reader(stream, 0, len(stream))
        while reader.at < reader.end:
            self._left_units -= 1
            if self._left_units < 0:
                raise too_many_segments(self.name, "units", len(self._data))
            yield reader.take(reader.uint(length_size))

    def content(self, item: int) -> bytes:
        """The bytes of an item. All items together have at most as many as the file."""
        extents = self._extents.get(item)
        if extents is None:
            raise EOFError
        start, end = (self._idat.at, self._idat.end) if extents.in_idat else (0, len(self._data))
        parts: list[bytes] = []
        for offset, length in extents.ranges:
            reader = _Reader(self._data, start, end)
            reader.skip(offset)
            part = reader.take(length or reader.end - reader.at)
            self._left_bytes -= len(part)
            if self._left_bytes < 0:
                raise broken(self.name, "its parts overlap")
            parts.append(part)
        return b"".join(parts)

    def _read_meta(self) -> None:
        parts: dict[bytes, _Reader] = {}
        for kind, content in _Reader(self._data, 0, len(self._data)).boxes(self.name):
            if kind == b"moov":
                raise DataError(f"{self.name} is animated; a single image is expected.")
            if kind == b"meta" and not parts:
                content.full_box()
                for part, reader in content.boxes(self.name):
                    parts.setdefault(part, reader)
        if b"pitm" not in parts:
            raise broken(self.name, "it has no pixels")
        for part, reader in parts.items():
            self._read_part(part, reader)

    def _read_part(self, kind: bytes, content: _Reader) -> None:
        match kind:
            case b"pitm":
                version, _ = content.full_box()
                self.primary = content.uint(4 if version else 2)
            case b"iinf":
                self._read_kinds(content)
            case b"iloc":
                self._read_extents(content)
            case b"iref":
                self._read_references(content)
            case b"iprp":
                self._read_properties(content)
            case b"idat":
                self._idat = content
            case _:
                pass

    def _read_kinds(self, content: _Reader) -> None:
        version, _ = content.full_box()
        self._require_few(content.uint(4 if version else 2))
        for kind, entry in content.boxes(self.name):
            if kind == b"infe":
                version, _ = entry.full_box()
                item = entry.uint(4 if version > 2 else 2)
                entry.skip(2)
                self._kinds[item] = entry.take(4) if version > 1 else b""

    def _read_extents(self, content: _Reader) -> None:
        version, _ = content.full_box()
        sizes = content.uint(2)
        offset_size, length_size, base_size = sizes >> 12, sizes >> 8 & 15, sizes >> 4 & 15
        index_size = sizes & 15 if version else 0
        count = content.uint(4 if version > 1 else 2)
        self._require_few(count)
        for _ in range(count):
            item = content.uint(4 if version > 1 else 2)
            method = content.uint(2) & 15 if version else 0
            content.skip(2)  # the data are in this file
            base, extents = content.uint(base_size), content.uint(2)
            if extents > MAX_EXTENTS:
                raise DataError(f"{self.name} has an item of more than {MAX_EXTENTS} parts; save it again.")
            ranges: list[tuple[int, int]] = []
            for _ in range(extents):
                content.skip(index_size)
                ranges.append((base + content.uint(offset_size), content.uint(length_size)))
            if method < 2:  # the offsets of method 2 are in another item
                self._extents[item] = _Extents(method == 1, ranges)

    def _read_references(self, content: _Reader) -> None:
        version, _ = content.full_box()
        id_size = 4 if version else 2
        for kind, reference in content.boxes(self.name):
            if kind in (b"dimg", b"auxl"):
                item, count = reference.uint(id_size), reference.uint(2)
                self._require_few(count)
                to = struct.unpack(f">{count}{'I' if version else 'H'}", reference.take(count * id_size))
                self._references.append((kind, item, to))

    def _read_properties(self, content: _Reader) -> None:
        for kind, part in content.boxes(self.name):
            if kind == b"ipco" and not self._properties:
                self._properties = list(part.boxes(self.name))
            elif kind == b"ipma":
                version, flags = part.full_box()
                size, count = 2 if flags & 1 else 1, part.uint(4)
                self._require_few(len(self._associations) + count)
                for _ in range(count):
                    item = part.uint(4 if version else 2)
                    self._associations[item] = size, part.take(size * part.uint(1))

    def _require_few(self, count: int) -> None:
        if count > MAX_ITEMS:
            raise DataError(f"{self.name} consists of more than {MAX_ITEMS} items; save it again.")


def unsupported(name: str, reason: str) -> DataError:
    return DataError(f"{name} is a HEIC file that {reason}; save it as JPEG.")


def _inspect(container: _Container) -> EncodedImage:
    primary, name = container.primary, container.name
    kind = container.kind(primary)
    if kind not in (_PICTURE, _GRID):
        raise unsupported(name, f"has a picture of type {kind.decode('latin1')!r}" if kind else "has no picture")
    if container.has_alpha():
        raise DataError(f"{name} is a HEIC image with transparency; save it as PNG.")
    properties = container.properties(primary)
    width_px, height_px = properties.size(name)
    if kind == _PICTURE:
        descriptor, streams = b"", [_Stream.read(container, primary)]
        coded_pixels = max(width_px * height_px, streams[0].pixels)
    else:
        descriptor, tiles = container.content(primary), container.tiles()
        _require_tiles(
            [container.properties(tile).size(name) for tile in tiles], descriptor, (width_px, height_px), name
        )
        streams = [_Stream.read(container, tile) for tile in tiles]
        coded_pixels = width_px * height_px + max(stream.pixels for stream in streams)
    cropped_px = _cropped_size(properties, name)
    return EncodedImage(
        name,
        "HEIC",
        *(cropped_px or (width_px, height_px)),
        properties.orientation,
        _rebuild(streams, descriptor, properties),
        coded_pixels=coded_pixels,
        deep=any(stream.deep for stream in streams),
    )


def _require_tiles(tiles: list[tuple[int, int]], descriptor: bytes, size: tuple[int, int], name: str) -> None:
    """Check that a grid (HEIF, section 6.6.2.3) has a tile for each of its cells, and that each is
    a part of the picture. Tiles are decoded one after another."""
    reader = _Reader(descriptor, 0, len(descriptor))
    wide = reader.take(2)[1] & 1
    rows, columns = reader.uint(1) + 1, reader.uint(1) + 1
    if size != (reader.uint(4 if wide else 2), reader.uint(4 if wide else 2)):
        raise broken(name, "its grid has another size")
    if rows * columns != len(tiles):
        raise broken(name, f"{len(tiles)} of {rows * columns} tiles are there")
    width_px, height_px = tiles[0]
    if {*tiles} != {tiles[0]} or (columns - 1) * width_px >= size[0] or (rows - 1) * height_px >= size[1]:
        raise broken(name, "its tiles do not fit its grid")


def _cropped_size(properties: _Properties, name: str) -> tuple[int, int] | None:
    """The size of the clean aperture, which is inside the picture."""
    content = properties.boxes.get(b"clap")
    if content is None:
        return None
    if len(content) != 32:
        raise EOFError
    width, width_by, height, height_by = struct.unpack_from(">4I", content)
    if not width_by or not height_by:
        raise broken(name, "its crop has no size")
    cropped, whole = (round(width / width_by), round(height / height_by)), properties.size(name)
    if cropped[0] > whole[0] or cropped[1] > whole[1]:
        raise broken(name, "its crop is larger than the picture")
    return cropped


@dataclass(frozen=True)
class _Stream:
    """A picture in HEVC: its parameters (the box hvcC), its slices, and the properties to keep.
    ``pixels`` is the size that the decoder allocates. Samples of a ``deep`` stream take much
    memory."""

    pixels: int
    deep: bool
    parameters: bytes
    slices: bytes
    properties: _Properties

    @staticmethod
    def read(container: _Container, item: int) -> "_Stream":
        name, properties = container.name, container.properties(item)
        if container.kind(item) != _PICTURE:
            raise unsupported(name, "has tiles of another type")
        if item != container.primary and (properties.orientation > 1 or b"clap" in properties.boxes):
            raise unsupported(name, "rotates or crops its tiles")
        parameters, length_size, pixels, deep = _parameters(properties.boxes.get(b"hvcC", b""), name)
        coded = properties.size(name)
        if pixels > (coded[0] + _CODING_UNIT_PX) * (coded[1] + _CODING_UNIT_PX):
            raise broken(name, "its size is that of another picture")
        return _Stream(pixels, deep, parameters, _slices(container.units(item, length_size), name), properties)


@lru_cache(maxsize=8)  # the tiles of a picture usually have the same ones
def _parameters(content: bytes, name: str) -> tuple[bytes, int, int, bool]:
    """Keep one parameter set for the sequence, and those of the video and the picture. Return the
    content of the new hvcC, the number of bytes of a length in the stream, and what `_sps` returns
    for the first set."""
    if len(content) > MAX_PARAMETERS_SIZE_BYTES:
        raise DataError(
            f"{name} is a HEIC file with more than {MAX_PARAMETERS_SIZE_BYTES} bytes of parameters; save it again."
        )
    reader = _Reader(content, 0, len(content))
    header = bytearray(reader.take(22))
    arrays: dict[int, list[bytes]] = {kind: [] for kind in _PARAMETER_SETS}
    for _ in range(reader.uint(1)):
        kind = reader.uint(1) & 63
        units = [reader.take(reader.uint(2)) for _ in range(reader.uint(2))]
        if kind in arrays:
            arrays[kind] += [unit for unit in units if _nal_type(unit) == kind]
    if len(arrays[_SPS]) != 1 or not arrays[_PPS]:
        raise broken(name, "its parameters are missing")
    length_size = (header[21] & 3) + 1
    header[21] |= 3  # the rebuilt stream has lengths of 4 bytes
    parts = [bytes(header), bytes([len(arrays)])]
    for kind, units in arrays.items():
        parts.append(struct.pack(">BH", 0x80 | kind, len(units)))
        parts += [struct.pack(">H", len(unit)) + unit for unit in units]
    return b"".join(parts), length_size, *_sps(arrays[_SPS][0])


def _nal_type(unit: bytes) -> int | None:
    """None for a unit without content, and for one of another layer."""
    if len(unit) < 3 or unit[0] & 0x81 or unit[1] & 0xF8:
        return None
    return unit[0] >> 1


def _slices(units: Iterator[bytes], name: str) -> bytes:
    """Keep the slices of one picture that depends on no other."""
    slices: list[bytes] = []
    for unit in units:
        if _nal_type(unit) in _RANDOM_ACCESS_PICTURES:
            first_in_picture = bool(unit[2] & 0x80)
            if first_in_picture == bool(slices):
                raise broken(name, "a tile is not one picture")
            slices += [struct.pack(">I", len(unit)), unit]
    if not slices:
        raise broken(name, "it has no pixels")
    if len(slices) > 2 * MAX_SLICES:
        raise DataError(f"{name} is a HEIC file of more than {MAX_SLICES} slices; save it again.")
    return b"".join(slices)


class _Bits:
    """Reads the bits of a NAL unit, without its bytes for emulation prevention."""

    def __init__(self, unit: bytes) -> None:
        payload = unit.replace(b"\0\0\3", b"\0\0")
        self._bits, self._left = int.from_bytes(payload), 8 * len(payload)

    def u(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise EOFError
        return self._bits >> self._left & ((1 << count) - 1)

    def ue(self) -> int:
        zeros = 0
        while not self.u(1):
            zeros += 1
        if zeros > _MAX_CODED_BITS:
            raise EOFError
        return (1 << zeros) - 1 + self.u(zeros)


def _sps(unit: bytes) -> tuple[int, bool]:
    """The pixels that a sequence parameter set declares (H.265, 7.3.2.2), and whether a pixel has
    more than 8 bits per sample and more than half of the samples of color."""
    bits = _Bits(unit[:_MAX_SPS_SIZE_BYTES])
    bits.u(16 + 4)
    sub_layers = bits.u(3)
    bits.u(1 + 88 + 8)  # the general profile, tier and level
    if sub_layers:
        present = [(bits.u(1), bits.u(1)) for _ in range(8)]
        for profile, level in present[:sub_layers]:
            bits.u(88 * profile + 8 * level)
    bits.ue()
    chroma = bits.ue()
    if chroma == _CHROMA_444:
        bits.u(1)
    pixels = bits.ue() * bits.ue()
    if bits.u(1):
        for _ in range(4):
            bits.ue()
    return pixels, max(bits.ue(), bits.ue()) > 0 and chroma > _CHROMA_420


def _box(kind: bytes, *parts: bytes) -> bytes:
    return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)


def _rebuild(streams: list[_Stream], descriptor: bytes, primary: _Properties) -> bytes:
    """A HEIC file of one picture, or of a grid and its tiles, without other items. Rotation and
    mirroring are left out, because they are applied as in other formats."""
    kept: dict[bytes, int] = {}

    def indices(properties: _Properties, parameters: bytes) -> bytes:
        boxes = [(kind, properties.boxes[kind]) for kind in (b"ispe", b"colr", b"clap") if kind in properties.boxes]
        boxes += [(b"hvcC", parameters)] if parameters else []
        numbers = [kept.setdefault(_box(kind, content), len(kept) + 1) for kind, content in boxes]
        essential = [0x8000 if kind in (b"hvcC", b"clap") else 0 for kind, _ in boxes]
        return bytes([len(boxes)]) + b"".join(
            struct.pack(">H", flag | number) for flag, number in zip(essential, numbers, strict=True)
        )

    items = [(_PICTURE, stream.slices, indices(stream.properties, stream.parameters)) for stream in streams]
    grid = [(_GRID, descriptor, indices(primary, b""))] if descriptor else []
    items = grid + items
    numbers = range(1, len(items) + 1)
    entries = [
        _box(b"infe", struct.pack(">IHH4sx", 2 << 24, number, 0, kind))
        for number, (kind, _, _) in zip(numbers, items, strict=True)
    ]
    associations = [struct.pack(">H", number) + item[2] for number, item in zip(numbers, items, strict=True)]
    tiles = struct.pack(f">HH{len(streams)}H", 1, len(streams), *numbers[1:]) if descriptor else b""

    def meta(at: int) -> bytes:
        locations: list[bytes] = []
        for number, (_, content, _) in zip(numbers, items, strict=True):
            locations.append(struct.pack(">HHHII", number, 0, 1, at, len(content)))
            at += len(content)
        return _box(
            b"meta",
            bytes(4),
            _box(b"hdlr", struct.pack(">8x4s13x", b"pict")),
            _box(b"pitm", struct.pack(">IH", 0, 1)),
            _box(b"iloc", struct.pack(">IBBH", 0, 0x44, 0, len(items)), *locations),
            _box(b"iinf", struct.pack(">IH", 0, len(items)), *entries),
            *([_box(b"iref", bytes(4), _box(b"dimg", tiles))] if tiles else []),
            _box(
                b"iprp",
                _box(b"ipco", *kept),
                _box(b"ipma", struct.pack(">II", 1, len(items)), *associations),
            ),
        )

    file_type = _box(b"ftyp", b"heic", bytes(4), b"mif1", b"heic")
    start = len(file_type) + len(meta(0)) + 8
    return b"".join([file_type, meta(start), _box(b"mdat", *(content for _, content, _ in items))])
