import contextlib
import struct
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps, UnidentifiedImageError

from evernear.data.image_file import inspect
from evernear.data.preprocess import (
    Resize,
    choose_resize,
    decode,
    decode_inspected,
    image_digest,
    jpeg_divisor,
    pixels_digest,
    to_array,
)
from evernear.errors import DataError
from tests.dataset_images import saved

LIMIT = 10_000


def noise(mode: str, size: tuple[int, int] = (7, 5)) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(0).integers(0, 256, size[0] * size[1] * channels, dtype=np.uint8)
    return Image.frombytes(mode, size, pixels.tobytes())


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_gray_and_color_pngs_keep_their_pixels(mode: str) -> None:
    image = decode(saved(noise(mode)), LIMIT)
    assert image.mode == mode
    assert image.tobytes() == noise(mode).tobytes()


def outcome(read: Callable[[], Image.Image]) -> tuple[str, bytes] | str:
    try:
        image = read()
        return image.mode, image.tobytes()
    except DataError as error:
        return str(error)
    except UnidentifiedImageError:
        return "x.png is a broken image (its header is damaged)."
    except (OSError, SyntaxError) as error:
        return f"x.png is a broken image ({str(error).rstrip('.')})."


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_damaged_png_has_the_pixels_or_the_error_of_pillows_reader(mode: str) -> None:
    whole = saved(noise(mode))
    decoded = 0
    for place in range(8, len(whole)):
        for bits in (0x01, 0x80, 0xFF):
            damaged = whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]
            with contextlib.suppress(DataError):
                file = inspect(damaged, LIMIT, "x.png")
                found = outcome(lambda file=file: decode_inspected(file, 16).image)
                assert found == outcome(lambda file=file: Image.open(BytesIO(file.data), formats=["PNG"])), place
                decoded += isinstance(found, tuple)
    assert decoded > 10


def palette() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    return image


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (saved(Image.fromarray(np.array([[255, 256], [32768, 65279]], np.uint16))), [[0, 1], [128, 254]]),
        (saved(Image.fromarray(np.eye(3, dtype=bool))), [[255, 0, 0], [0, 255, 0], [0, 0, 255]]),
        (saved(palette()), [[[10, 20, 30], [200, 100, 50]]]),
        (saved(palette(), transparency=b"\x00\xff"), [[[255, 255, 255], [200, 100, 50]]]),
        (saved(Image.fromarray(np.array([[(0, 0), (0, 51), (0, 255)]], np.uint8))), [[255, 204, 0]]),
        (saved(Image.new("RGBA", (1, 1), (255, 0, 0, 0))), [[[255, 255, 255]]]),
    ],
    ids=["16 bits", "1 bit", "palette", "transparent palette", "transparent gray", "transparent color"],
)
def test_other_pixels_become_gray_or_color_over_white(data: bytes, pixels: list[object]) -> None:
    assert np.asarray(decode(data, LIMIT)).tolist() == pixels


def test_cmyk_becomes_rgb() -> None:
    image = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), LIMIT)
    red, green, blue = image.getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_every_orientation_is_applied_like_in_pillow(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(noise("RGB", (24, 16)), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    decoded = decode(data, LIMIT)
    assert decoded.size == expected.size
    assert decoded.tobytes() == expected.tobytes()


def exif_data(*tags: tuple[int, int, int, bytes]) -> bytes:
    """EXIF data of possibly invalid tags: (number, type, count, 4-byte value)."""
    entries = b"".join(struct.pack("<HHI4s", *tag) for tag in tags)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


TURNED = (0x0112, 3, 1, struct.pack("<I", 3))


@pytest.mark.parametrize(
    ("exif", "rotated"),
    [
        (b"Exif\0\0no TIFF file at all", False),
        (exif_data(TURNED, (0x011A, 2, 1, b"x")), True),  # text instead of a fraction
    ],
)
def test_damaged_exif_data_does_not_affect_the_image(exif: bytes, rotated: bool) -> None:
    for kind in ("JPEG", "PNG"):
        plain = decode(saved(noise("RGB", (16, 16)), kind), LIMIT)
        upright = plain.transpose(Image.Transpose.ROTATE_180) if rotated else plain
        assert decode(saved(noise("RGB", (16, 16)), kind, exif=exif), LIMIT).tobytes() == upright.tobytes()


animated = saved(Image.new("L", (4, 4), 1), save_all=True, append_images=[Image.new("L", (4, 4), 9)], duration=50)
whole = saved(noise("L", (64, 64)))
photo = saved(noise("L", (64, 64)), "JPEG")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "x.png is empty."),
        (b"no image, only words", "x.png is not a PNG, JPEG, WebP or HEIC image."),
        (whole[: len(whole) // 2], "x.png is a broken image"),
        (photo[: len(photo) // 2], "x.png is a broken image"),
        (whole[:60] + bytes(40) + whole[100:], "x.png is a broken image"),
        (animated, "x.png is animated"),
    ],
)
def test_unusable_image_is_reported(data: bytes, sentence: str) -> None:
    with pytest.raises(DataError) as exc_info:
        decode(data, LIMIT, "x.png")
    assert str(exc_info.value).startswith(sentence)


def test_second_picture_of_an_mpo_file_is_ignored() -> None:
    two = saved(noise("RGB", (16, 16)), "MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))])
    assert decode(two, LIMIT).size == (16, 16)


def test_array_has_the_requested_shape() -> None:
    for mode in ("L", "RGB"):
        for channels in (1, 3):
            array = to_array(noise(mode), 9, 4, channels)
            assert array.shape == (9, 4, channels)
            assert array.dtype == np.uint8
    assert to_array(noise("RGB"), 5, 7, 3).tobytes() == noise("RGB").tobytes()
    gray = to_array(noise("L"), 5, 7, 3)
    assert (gray[..., :1] == gray).all()


def test_jpeg_files_are_decoded_at_a_scale_that_keeps_twice_the_sides() -> None:
    for side, target, divisor in ((3000, 224, 4), (3584, 224, 8), (480, 224, 1), (480, 28, 8)):
        file = inspect(saved(Image.new("L", (4000, side)), "JPEG"), 10**8)
        assert jpeg_divisor(file, target // 2, target) == divisor
        assert decode_inspected(file, 16, divisor).image.size == (4000 // divisor, side // divisor)
    assert jpeg_divisor(inspect(saved(Image.new("L", (400, 300))), 10**8), 28, 28) == 1, "PNG"


def test_downscaling_averages_pixels() -> None:
    stripes = Image.fromarray(np.tile(np.array([0, 255], np.uint8), (16, 8)))
    assert np.abs(to_array(stripes, 2, 2, 1).astype(int) - 128).max() < 20


def test_identity_depends_on_pixels_not_on_files() -> None:
    image = noise("L")
    fast, small = saved(image, compress_level=0), saved(image, compress_level=9)
    assert image_digest(decode(fast, LIMIT)) == image_digest(decode(small, LIMIT))
    assert image_digest(image) == pixels_digest("L", 7, 5, image.tobytes())
    assert image_digest(image) != image_digest(image.transpose(Image.Transpose.ROTATE_180))
    blank = {image_digest(Image.new("L", size)) for size in ((2, 6), (6, 2), (3, 4), (4, 3), (12, 1))}
    assert len(blank) == 5
    assert image_digest(Image.new("RGB", (1, 1))) != image_digest(Image.new("L", (3, 1)))


def bars(width: int, height: int) -> Image.Image:
    """White, with a black frame on the left and right fifth."""
    image = Image.new("L", (width, height), 255)
    for left in (0, width - width // 5):
        image.paste(0, (left, 0, left + width // 5, height))
    return image


def test_resizing_keeps_the_aspect_ratio_unless_asked_to_stretch() -> None:
    wide = bars(100, 60)
    cropped, boxed, stretched = (to_array(wide, 30, 30, 1, kind)[..., 0] for kind in ("crop", "letterbox", "stretch"))
    assert cropped[:, 1:-1].min() == 255, "the center of 60 x 60"
    assert (boxed[:6] == 128).all()
    assert (boxed[-6:] == 128).all()
    assert (boxed[8:-8, 10:20] == 255).all()
    assert (stretched[:, 0] == 0).all()
    assert np.array_equal(to_array(wide, 30, 30, 1, "auto")[..., 0], cropped)
    assert to_array(bars(100, 20), 30, 30, 1, "auto")[0, 0, 0] == 128, "a crop would keep a fifth"


@pytest.mark.parametrize("resize", ["auto", "crop", "letterbox", "stretch"])
def test_images_of_the_size_are_untouched(resize: Resize) -> None:
    image = noise("RGB")
    assert np.array_equal(to_array(image, image.height, image.width, 3, resize), np.asarray(image))
    assert choose_resize(image.size, image.height, image.width, resize) is None
