"""The cost of decoding is bounded before decoding starts."""

import contextlib
import random
import struct
from io import BytesIO
from pathlib import Path

import pillow_heif
import pytest
from PIL import Image, ImageFile
from PIL.ExifTags import Base

from evernear.data import image_file
from evernear.data.image_file import MAX_SCANS, inspect
from evernear.data.preprocess import decode, jpeg_divisor
from evernear.data.sources.names import is_image_file
from evernear.errors import DataError
from tests import heic, hostile
from tests.dataset_images import saved

GRAY = Image.new("L", (4, 4))

LIMIT = 25_000_000


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The data of every file, or pixels of a plain PNG file, that a decoder gets."""
    opened: list[bytes] = []
    real, real_pixels = Image.open, Image.frombytes

    def recording(file: BytesIO, formats: tuple[str, ...]) -> ImageFile.ImageFile:
        opened.append(file.getvalue())
        return real(file, formats=formats)

    def recording_pixels(mode: str, size: tuple[int, int], data: bytes, *decoder: str) -> Image.Image:
        opened.extend([data] * (decoder[:1] == ("zip",)))
        return real_pixels(mode, size, data, *decoder)

    def recording_heic(file: BytesIO) -> ImageFile.ImageFile:
        opened.append(file.getvalue())
        return real_heic(file)

    real_heic = pillow_heif.HeifImageFile
    monkeypatch.setattr(Image, "open", recording)
    monkeypatch.setattr(Image, "frombytes", recording_pixels)
    monkeypatch.setattr(pillow_heif, "HeifImageFile", recording_heic)
    return opened


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_decompression_bomb_is_rejected_before_decoding(name: str, passes: list[bytes]) -> None:
    bomb = hostile.REFUSED[name]
    data = bomb.make()
    with pytest.raises(DataError, match=bomb.sentence) as exc_info:
        decode(data, LIMIT, "x.png")
    assert str(exc_info.value).startswith("x.png ")
    assert str(exc_info.value).endswith(".")
    assert passes == []


@pytest.mark.parametrize("name", hostile.largest_valid_files(10_000))
def test_image_within_limits_is_decoded_without_metadata(name: str, passes: list[bytes]) -> None:
    data = hostile.largest_valid_files(10_000)[name]()
    file = inspect(data, 10_000)
    assert file.pixels > 6_000
    assert decode(data, LIMIT).size == (file.width_px, file.height_px)
    assert file.pixels <= 10_000
    decoded, *again = passes
    assert again == [decoded] * (name.startswith("PNG, RGBA, 16 bits")), "once for the upper bytes, once for the lower"
    assert not [mark for mark in (b"Exif", b"eXIf", b"tEXt", b"zTXt", b"iCCP", b"ICC_PROFILE") if mark in decoded]
    assert len(decoded) <= len(data)


def test_jpeg_with_the_maximum_number_of_scans_is_decoded_completely(passes: list[bytes]) -> None:
    decode(hostile.progressive(64, 64, 3, MAX_SCANS), LIMIT)
    assert passes[0].count(b"\xff\xda") == MAX_SCANS


def test_png_pixel_data_becomes_one_chunk() -> None:
    whole = hostile.png(40, 30)
    at = whole.index(b"IDAT")
    pixels = whole[at + 4 : -16]
    split = b"".join(hostile.chunk(b"IDAT", pixels[n : n + 1]) for n in range(len(pixels)))
    assert inspect(whole[: at - 4] + split + whole[-12:], LIMIT).data == whole


def test_large_png_may_have_as_many_chunks_as_libpng_writes() -> None:
    """Each chunk has 8 KiB of pixels: an incompressible 16-bit RGBA file."""
    chunks = hostile.chunk(b"IDAT", bytes(8192)) * 3_000
    assert inspect(hostile.png(8, 8, before=chunks), LIMIT).data.count(b"IDAT") == 1


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [False, True])
def test_webp_is_decoded_without_its_metadata(passes: list[bytes], mode: str, lossless: bool) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    plain = hostile.webp(mode, (40, 30), lossless=lossless)
    data = hostile.webp(mode, (40, 30), lossless=lossless, exif=exif, icc_profile=bytes(500), xmp=b"<x/>")
    file = inspect(data, LIMIT)
    assert (file.format, file.width_px, file.height_px, file.orientation) == ("WEBP", 40, 30, 6)
    assert not [kind for kind in (b"EXIF", b"ICCP", b"XMP ") if kind in file.data]
    assert inspect(plain, LIMIT).data == file.data
    upright = decode(plain, LIMIT)
    passes.clear()
    decoded = decode(data, LIMIT)
    assert len(passes) == 1
    assert decoded.tobytes() == upright.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_webp_counts_its_pixels_and_its_groups_of_codes() -> None:
    assert inspect(hostile.webp("RGB", (30, 40)), LIMIT).pixels == 2_000
    assert inspect(hostile.code_groups(400, 10_000), LIMIT).code_groups == 10_000, "as many as there are blocks"
    small = hostile.webp("RGB", (2_000, 2_000), lossless=True, quality=100)
    assert 0 < inspect(small, 80_000_000).code_groups <= len(small) * 8 / image_file.CODE_GROUP_MIN_BITS
    transparent = inspect(hostile.webp("RGBA", (40, 40)), LIMIT)
    assert 0 < transparent.code_groups <= 100


OTHER_FORMATS = {
    "GIF": saved(GRAY, "GIF"),
    "BMP": saved(GRAY, "BMP"),
    "TIFF": saved(GRAY, "TIFF"),
    "AVIF": b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf",
    "JPEG XL": b"\xff\x0a\x38\x1f\x98\x08\0\0\0\0\0\0",
    "JPEG 2000": saved(GRAY, "JPEG2000"),
}


def test_signature_is_recognized_in_12_bytes() -> None:
    for data in (hostile.png(8, 8), hostile.jpeg(), hostile.webp(), heic.single(), *OTHER_FORMATS.values()):
        assert image_file.has_image_signature(data[: image_file.SIGNATURE_SIZE_BYTES])
    for data in (b"", b"RIFF\0\0\0\0WAVE", b"README", b"BMW and others", b"\0\0\0\x18ftypmp42", b"\xff\xfea"):
        assert not image_file.has_image_signature(data)


@pytest.mark.parametrize("kind", OTHER_FORMATS)
def test_image_of_another_format_is_named_with_the_remedy(kind: str) -> None:
    with pytest.raises(DataError, match=rf"^a\.png is not a PNG, JPEG, WebP or HEIC image but {kind}; convert it\.$"):
        inspect(OTHER_FORMATS[kind], LIMIT, "a.png")


def test_git_lfs_pointer_is_named_with_the_remedy() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
    with pytest.raises(DataError, match=r"^a\.png is a Git LFS pointer without .*; run `git lfs pull` in its rep"):
        inspect(pointer, LIMIT, "a.png")


def test_file_among_others_is_an_image_by_its_suffix_or_else_by_its_content(tmp_path: Path) -> None:
    for name in ("a.png", "a.JPG", "a.b.jpeg", "a.jfif", "a.heif", "broken.webp"):
        (tmp_path / name).write_bytes(b"")
        assert is_image_file(tmp_path / name)
    for name in ("a.jpg_large", "a.jpg?w=640", "a.jpg.1", "a.JPG~", "a.jpg.txt", "a.png.", "a.", "a", "a.png:large"):
        (tmp_path / name).write_bytes(hostile.jpeg())
        assert is_image_file(tmp_path / name)
        (tmp_path / name).write_bytes(b"some words, no pixels")
        assert not is_image_file(str(tmp_path / name))


def test_limit_is_width_times_height() -> None:
    with pytest.raises(DataError, match="10 x 10 pixels, 99 are allowed"):
        inspect(hostile.png(10, 10), 99)
    assert inspect(hostile.png(10, 10), 100).pixels == 100


@pytest.mark.parametrize(("options", "pixels"), [
    ({}, 9_216),
    ({"progressive": True}, 9_216),
    ({"progressive": True, "subsampling": 0}, 13_600),  # 2 bytes for each sample, and 10 for each pixel that is left
])  # fmt: skip
def test_jpeg_beyond_the_limit_is_halved(options: dict[str, object], pixels: int, passes: list[bytes]) -> None:
    data = hostile.jpeg("RGB", (160, 120), **options)
    file = inspect(data, 15_000)
    assert (file.halved, file.whole_pixels, file.pixels) == (True, 19_200, pixels)
    assert jpeg_divisor(file, 200, 200) == 2
    assert jpeg_divisor(file, 20, 20) == 2
    assert jpeg_divisor(file, 15, 15) == 4
    assert decode(data, 15_000).size == (80, 60)
    assert not inspect(data, 19_200).halved
    with pytest.raises(DataError, match=rf"160 x 120 pixels of JPEG count as {pixels}.*, {pixels - 1} are allowed"):
        inspect(data, pixels - 1)
    with pytest.raises(DataError, match="160 x 120 pixels, 9600 are allowed"):
        inspect(hostile.png(160, 120), 9_600)


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_of_50_megapixels_is_read(progressive: bool) -> None:
    small = hostile.jpeg("RGB", (64, 64), progressive=progressive)
    at = small.index(b"\xff\xc2" if progressive else b"\xff\xc0") + 5
    assert inspect(small[:at] + struct.pack(">HH", 6_144, 8_192) + small[at + 4 :], LIMIT).halved


def test_limit_cannot_exceed_that_of_pillow() -> None:
    with pytest.raises(DataError, match=f"{image_file.MAX_PIXELS} are allowed"):
        inspect(hostile.png(10_000, 9_000, 1), 10**12)
    assert Image.MAX_IMAGE_PIXELS == image_file.MAX_PIXELS
    large = hostile.jpeg().replace(b"\x08\x00\x08\x00\x08", b"\x08" + struct.pack(">HH", 10_000, 10_000), 1)
    with pytest.raises(DataError, match="10000 x 10000 pixels, "):
        inspect(large, 10**12)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_orientation_is_read_among_other_tags(order: str, kind: int) -> None:
    value = struct.pack(f"{order}I" if kind == 4 else f"{order}HH", *([6] if kind == 4 else [6, 0]))
    tags = struct.pack(f"{order}HHII", 0x0100, 4, 1, 9) + struct.pack(f"{order}HHI", Base.Orientation, kind, 1) + value
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, 2) + tags + bytes(4)
    assert inspect(hostile.insert(hostile.jpeg(), hostile.segment(0xE1, b"Exif\0\0" + tiff)), LIMIT).orientation == 6
    assert inspect(hostile.png(8, 8, before=hostile.chunk(b"eXIf", tiff)), LIMIT).orientation == 6
    assert inspect(hostile.png(8, 8, after=hostile.chunk(b"eXIf", b"Exif\0\0" + tiff)), LIMIT).orientation == 6


@pytest.mark.parametrize("tiff", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", hostile.exif(5_000, 60)])
def test_truncated_exif_data_is_ignored(tiff: bytes) -> None:
    data = hostile.insert(hostile.jpeg(), hostile.segment(0xE1, b"Exif\0\0" + tiff[:60_000]))
    assert inspect(data, LIMIT).orientation == 1


def test_adobe_segment_after_the_first_scan_is_ignored() -> None:
    plain = hostile.jpeg("RGB", progressive=True)
    late = plain[:-2] + hostile.segment(0xEE, b"Adobe\0d\0\0\0\0\x00") + plain[-2:]
    assert decode(late, LIMIT).tobytes() == decode(plain, LIMIT).tobytes()


def test_damaged_files_stay_within_limits_and_known_errors() -> None:
    rng = random.Random(0)
    whole = [
        hostile.png(9, 7, 16, hostile.RGBA, interlaced=True),
        hostile.png(9, 7, 8, hostile.PALETTE, before=hostile.chunk(b"tRNS", b"\0\1")),
        hostile.jpeg("RGB", (20, 20), progressive=True),
        hostile.jpeg("CMYK", (20, 20)),
        hostile.progressive(20, 20, 3, MAX_SCANS),
        hostile.insert(hostile.jpeg(), hostile.segment(0xE1, b"Exif\0\0" + hostile.exif(4, 100))),
        hostile.webp("RGB", (20, 20)),
        hostile.webp("RGBA", (8, 8)),
        hostile.webp("RGBA", (8, 8), lossless=True),
        hostile.code_groups(8, 3),
        heic.single(
            64, None, heic.box(b"irot", b"\1"), heic.box(b"clap", struct.pack(">8I", 60, 1, 60, 1, 0, 1, 0, 1))
        ),
        heic.tiled(1, 2, (80, 60)),
    ]
    decoded = sum(damage_keeps_the_limits(rng, whole, str(number)) for number in range(3_000))
    assert decoded > 100


def damage_keeps_the_limits(rng: random.Random, whole: list[bytes], note: str) -> bool:
    """Decode one damaged file; return whether that yielded an image."""
    data = hostile.mutated(rng, rng.choice(whole))
    with contextlib.suppress(DataError):
        file = inspect(data, 10_000)
        assert file.pixels <= 10_000, note
        assert inspect(file.data, 10_000).data == file.data, f"a decoded file must be within the limits: {note}"
    try:
        image = decode(data, 10_000)
    except DataError:
        return False
    assert image.mode in ("L", "RGB"), note
    assert image.width * image.height <= 10_000, note
    return True
