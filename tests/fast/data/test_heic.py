"""HEIC files are decoded as libheif decodes them, and as the same picture in another format."""

import struct
from io import BytesIO

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms
from PIL.ExifTags import Base

from evernear.data import heic as module
from evernear.data.image_file import inspect, suffix_of
from evernear.data.preprocess import Flaw, decode, decode_inspected, is_gray
from evernear.errors import DataError
from tests import heic
from tests.dataset_images import saved

LIMIT = 25_000_000


def photograph(width: int = 120, height: int = 80) -> Image.Image:
    """A picture of smooth colors without symmetry."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 0.6 * x + 20 * (y > 180)], axis=2).astype(np.uint8))


def by_libheif(data: bytes) -> np.ndarray:
    """The pixels of a complete file, with the rotation that libheif applies."""
    return np.asarray(pillow_heif.open_heif(BytesIO(data)).to_pillow().convert("RGB"))


def difference(one: Image.Image, other: Image.Image) -> float:
    assert one.size == other.size
    return float(abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).mean())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_a_photograph_is_that_of_a_jpeg(orientation: int) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    data = heic.heic(photograph(), quality=95, chroma=444, exif=exif.tobytes())
    file = inspect(data, LIMIT)
    assert (file.orientation, file.width_px, file.height_px) == (orientation, 120, 80)
    assert difference(decode(data, LIMIT), decode(saved(photograph(), "JPEG", quality=95, exif=exif), LIMIT)) < 3


@pytest.mark.parametrize("mirrored", [None, 0, 1])
@pytest.mark.parametrize("turns", range(4))
def test_rotation_and_mirroring_are_those_of_libheif_in_either_order(mirrored: int | None, turns: int) -> None:
    parameters, stream = heic.picture(64, noise=True)
    boxes = [heic.box(b"irot", bytes([turns]))]
    boxes += [] if mirrored is None else [heic.box(b"imir", bytes([mirrored]))]
    for transformations in (boxes, boxes[::-1]):
        properties = [heic.size_box(64, 64), parameters, heic.crop_box(64, 40), *transformations]
        data = heic.container([stream], properties, of_each=range(1, len(properties) + 1))
        file = inspect(data, LIMIT)
        assert (file.width_px, file.height_px) == (64, 40)
        assert np.array_equal(np.asarray(decode(data, LIMIT)), by_libheif(data))


@pytest.mark.parametrize("size", [(200, 150), (128, 128), (131, 77)])
def test_tiles_are_joined_without_the_rest_of_the_file(size: tuple[int, int]) -> None:
    image = photograph(*size)
    image.info["exif"] = b"Exif\0\0" + bytes(2_000)
    image.info["xmp"] = b"<x:xmpmeta/>" * 100
    data = heic.heic(image, tile_size=64, quality=90)
    file = inspect(data, LIMIT)
    assert size[0] * size[1] < file.pixels <= size[0] * size[1] + 128**2
    assert b"Exif" not in file.data
    assert b"xmp" not in file.data
    assert len(file.data) < len(data) - 3_000
    assert np.array_equal(np.asarray(decode(data, LIMIT)), by_libheif(data))
    assert inspect(file.data, LIMIT).data == file.data


def test_thumbnails_and_other_pictures_are_left_out() -> None:
    image, buffer = photograph(), BytesIO()
    file = pillow_heif.from_pillow(image)
    file.add_from_pillow(Image.new("RGB", (300, 300)))
    file.save(buffer, thumbnails=[64], primary_index=0, quality=90)
    data = buffer.getvalue()
    opened = pillow_heif.open_heif(BytesIO(inspect(data, LIMIT).data))
    assert (len(opened), opened.size, opened.info["thumbnails"]) == (1, (120, 80), [])
    assert np.array_equal(np.asarray(decode(data, LIMIT)), by_libheif(data))


def test_color_profile_is_ignored_as_in_a_jpeg() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    tagged = photograph()
    tagged.info["icc_profile"] = profile
    data = heic.heic(tagged, quality=95, chroma=444)
    assert profile in data
    assert profile[:64] not in inspect(data, LIMIT).data
    assert decode(data, LIMIT).tobytes() == decode(heic.heic(photograph(), quality=95, chroma=444), LIMIT).tobytes()
    jpegs = [decode(saved(photograph(), "JPEG", **options), LIMIT) for options in ({}, {"icc_profile": profile})]
    assert jpegs[0].tobytes() == jpegs[1].tobytes()


@pytest.mark.parametrize("bits", [10, 12])
@pytest.mark.parametrize("chroma", [420, 422, 444])
def test_more_bits_are_reduced_to_their_upper_8(bits: int, chroma: int) -> None:
    values = np.asarray(photograph(128, 128)).astype(np.uint16) << 8
    data = heic.deep_heic(values, bits, chroma)
    file = inspect(data, LIMIT)
    assert file.pixels == (16_384 if chroma == 420 else 21_846)
    assert difference(decode(data, LIMIT), photograph(128, 128)) < 3


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_gray_stays_gray(bits: int) -> None:
    gray = photograph().convert("L")
    values = np.asarray(gray).astype(np.uint16) << 8
    data = heic.heic(gray, quality=95) if bits == 8 else heic.deep_heic(values, bits, 420)
    file = inspect(data, LIMIT)
    assert is_gray(file)
    picture = decode_inspected(file, 16)
    assert picture.image.mode == "L"
    assert picture.flaws() is Flaw.NONE
    assert difference(picture.image, gray) < 3


@pytest.mark.parametrize("data", [heic.single(), heic.tiled(2, 2, (100, 90))], ids=["picture", "tiles"])
def test_truncated_file_is_broken(data: bytes) -> None:
    for length in range(32, len(data), 7):
        with pytest.raises(DataError, match=r"^x is (a broken image|a HEIC file that has no picture)"):
            decode(data[:length], LIMIT, "x")


@pytest.mark.parametrize("kind", [b"av01", b"iovl", b"iden"])
def test_picture_of_another_coding_is_named(kind: bytes) -> None:
    parameters, stream = heic.picture(64)
    data = heic.container([stream], [heic.size_box(64, 64), parameters], kinds=[kind])
    with pytest.raises(DataError, match=rf"has a picture of type '{kind.decode()}'; save it as JPEG\.$"):
        inspect(data, LIMIT)


def test_property_that_must_be_understood_is_named() -> None:
    with pytest.raises(DataError, match=r"^The image is a HEIC file that needs 'lsel'; save it as JPEG\.$"):
        inspect(heic.single(64, None, heic.box(b"lsel", b"\0\0"), of_each=[1, 2, 0x8003]), LIMIT)
    assert inspect(heic.single(64, None, heic.box(b"lsel", b"\0\0")), LIMIT).pixels == 4_096


def test_without_the_extra_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_decode", lambda: False)
    with pytest.raises(DataError) as exc_info:
        inspect(heic.single(), LIMIT, "cat/1.heic")
    assert str(exc_info.value) == (
        "cat/1.heic is a HEIC image, which needs evernear's extra heic: pip install 'evernear[heic]', or convert it."
    )


def test_picture_that_is_read_only_as_a_jpeg_says_so() -> None:
    with pytest.raises(DataError, match=r"128 x 128 pixels of HEIC; save it as JPEG, .* 10000 are allowed"):
        inspect(heic.tiled(2, 2, (128, 128)), 10_000)
    with pytest.raises(DataError, match="is too large: 128 x 128 pixels, 5000 are allowed"):
        inspect(heic.tiled(2, 2, (128, 128)), 5_000)


def test_file_is_recognized_by_its_content() -> None:
    assert suffix_of(heic.single()) == ".heic"
    assert suffix_of(struct.pack(">I8s", 24, b"ftypmif1")) == ".heic"
