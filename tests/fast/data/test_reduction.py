"""Different 16-bit and transparent pictures stay different, and visible, in 8 bits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from evernear.data.decoding import Decoder
from evernear.data.image_file import inspect
from evernear.data.preprocess import Flaw, Picture, bit_depth_of, decode_inspected, is_gray
from evernear.data.reduction import BIT_DEPTHS, BitDepth
from evernear.errors import DataError
from tests import hostile
from tests.dataset_images import saved, write_files
from tests.deep_png import deep_png
from tests.small_ingest import findings, opened

LIMIT = 10**6
DIGESTS = {
    "gray": "4e6aa3866d762a7bdb15ae9249d38d165b8d23a9e6b786c03d2bd382e1a2cb27",
    "color": "85d934be55840ef5310179f9f9b180056bc9b09b4e536eefc301bed093131251",
    "one bit": "f7b0c13a04c2ee1a73056bff66953aec4c974d84132032f92a1cc6ee77e7da93",
    "palette": "9fc9a87c575f32006ee5da3f9483a746e4afbe9423a03a20715a286af310d778",
    "opaque gray with alpha": "4e6aa3866d762a7bdb15ae9249d38d165b8d23a9e6b786c03d2bd382e1a2cb27",
    "opaque color with alpha": "85d934be55840ef5310179f9f9b180056bc9b09b4e536eefc301bed093131251",
    "opaque palette with transparency": "9fc9a87c575f32006ee5da3f9483a746e4afbe9423a03a20715a286af310d778",
    "dark gray on transparency": "b0f97206fc542c05a103bbc890b004671967be2330e92ac7954c381171425390",
    "dark color on transparency": "9128407b6e85f337b1b3c6bc08d60244f27fb68ab6337b84fbf5efcb5cbff1ca",
    "lossless WebP": "85d934be55840ef5310179f9f9b180056bc9b09b4e536eefc301bed093131251",
}


def seen(data: bytes, bit_depth: BitDepth = 16) -> Picture:
    return decode_inspected(inspect(data, LIMIT), bit_depth)


def gradient(mode: str) -> Image.Image:
    count = 40 * 30 * len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (40, 30), (np.arange(count) % 251).astype(np.uint8).tobytes())


def opaque(mode: str) -> Image.Image:
    image = gradient(mode)
    image.putalpha(255)
    return image


def palette() -> Image.Image:
    image = gradient("P")
    image.putpalette([(7 * n) % 256 for n in range(768)])
    return image


def dark(mode: str) -> Image.Image:
    channels = len(mode) - 1
    image = Image.new(mode, (40, 30), (0,) * len(mode))
    image.paste((*[0] * channels, 255), (5, 5, 20, 25))
    image.paste((*[40] * channels, 100), (22, 5, 30, 25))
    return image


EIGHT_BIT: dict[str, Callable[[], bytes]] = {
    "gray": lambda: saved(gradient("L")),
    "color": lambda: saved(gradient("RGB")),
    "one bit": lambda: saved(Image.fromarray(np.eye(30, dtype=bool))),
    "palette": lambda: saved(palette()),
    "opaque gray with alpha": lambda: saved(opaque("L")),
    "opaque color with alpha": lambda: saved(opaque("RGB")),
    "opaque palette with transparency": lambda: saved(palette(), transparency=b"\xff" * 251),
    "dark gray on transparency": lambda: saved(dark("LA")),
    "dark color on transparency": lambda: saved(dark("RGBA")),
    "lossless WebP": lambda: saved(gradient("RGB"), "WEBP", lossless=True),
}


@pytest.mark.parametrize("kind", EIGHT_BIT)
@pytest.mark.parametrize("bit_depth", [8, 12, 16])
def test_digests_of_eight_bit_images_never_change(kind: str, bit_depth: BitDepth) -> None:
    """Otherwise images would move between splits."""
    assert seen(EIGHT_BIT[kind](), bit_depth).digest().hex() == DIGESTS[kind]


def values(bit_depth: int, channels: int, size: tuple[int, int] = (9, 7)) -> NDArray[np.uint16]:
    noise = np.random.default_rng(channels).integers(0, 2**bit_depth, (*size, channels), dtype=np.uint16)
    noise[0, 0] = 2**bit_depth - 1
    return noise


@pytest.mark.parametrize("bit_depth", BIT_DEPTHS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_values_keep_their_upper_bits_within_the_bit_depth(bit_depth: BitDepth, channels: int) -> None:
    deep = values(bit_depth, channels)
    if channels in (2, 4):
        deep[..., -1] = 65535
    file = inspect(deep_png(deep), LIMIT)
    colors = deep[..., : 1 if channels < 3 else 3]
    picture = decode_inspected(file, bit_depth)
    assert bit_depth_of(file) == bit_depth
    assert is_gray(file) == (channels < 3)
    assert picture.image.mode == ("L" if channels < 3 else "RGB")
    assert np.array_equal(np.asarray(picture.image), (colors >> (bit_depth - 8)).squeeze())
    assert picture.flaws() == Flaw.NONE
    assert picture.digest() == seen(deep_png(colors), bit_depth).digest(), "alpha that hides nothing"


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_that_differ_in_their_lower_bits_differ(channels: int) -> None:
    one = values(8, channels)
    other = one.copy()
    other[4, 4, 0] ^= 1
    for bit_depth in BIT_DEPTHS:
        assert seen(deep_png(one), bit_depth).digest() != seen(deep_png(other), bit_depth).digest()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_transparent_value_of_a_deep_image_has_all_bits(channels: int) -> None:
    deep = np.full((10, 10, channels), 4000, np.uint16)
    deep[2:8, 2:8] = 4001  # the same upper byte
    picture = seen(deep_png(deep, transparent=(4000,) * channels), 12)
    image = np.asarray(picture.image).reshape(10, 10, channels)
    assert (image[2:8, 2:8] == 250).all()
    assert (image[0] == 0).all(), "the drawing is light"
    assert picture.digest() != seen(deep_png(deep), 12).digest()


def test_deep_transparency_is_laid_over_a_background() -> None:
    deep = np.zeros((10, 10, 4), np.uint16)
    deep[3:7, 3:7] = (4095, 4095, 4095, 65535)
    image = np.asarray(seen(deep_png(deep), 12).image)
    assert image[0, 0].tolist() == [0, 0, 0]
    assert image[5, 5].tolist() == [255, 255, 255]
    hidden = deep.copy()
    hidden[0, 0, :3] = 9
    assert seen(deep_png(hidden), 12).digest() == seen(deep_png(deep), 12).digest(), "an invisible color"


def test_orientation_is_applied_to_all_bits() -> None:
    deep = values(12, 3)
    turned = deep_png(deep, exif=b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0")
    assert seen(turned, 12).digest() == seen(deep_png(np.rot90(deep, -1)), 12).digest()


def test_values_beyond_the_bit_depth_are_clipped_and_reported() -> None:
    deep = np.array([[0, 4095, 4096, 65535]], np.uint16)
    picture = seen(deep_png(deep), 12)
    assert np.asarray(picture.image).tolist() == [[0, 255, 255, 255]]
    assert picture.flaws() == Flaw.CLIPPED
    assert seen(deep_png(deep[:, :2]), 12).flaws() == Flaw.NONE


@pytest.mark.parametrize(
    ("low", "high", "flaws"), [(0, 4095, Flaw.FAINT), (700, 700, Flaw.CONSTANT), (0, 65535, Flaw.NONE)]
)
def test_lost_contrast_is_reported(low: int, high: int, flaws: Flaw) -> None:
    deep = np.full((6, 6), low, np.uint16)
    deep[3] = high
    assert seen(deep_png(deep)).flaws() == flaws


def shape(number: int) -> NDArray[np.bool_]:
    """The drawing ``number``: a bar in one place or another."""
    drawn = np.zeros((16, 16), np.bool_)
    drawn[3:13, 2 + number : 6 + number] = True
    return drawn


def on_transparency(kind: str, value: int, number: int) -> bytes:
    """A drawing of one gray value as a file of some kind."""
    drawn = shape(number)
    if kind == "palette":
        image = Image.fromarray(drawn.astype(np.uint8))
        image = Image.frombytes("P", image.size, image.tobytes())
        image.putpalette([255, 255, 255, value, value, value])
        return saved(image, transparency=b"\x00\xff")
    if kind in ("gray value", "color value"):
        gray = Image.fromarray(np.where(drawn, value, 7).astype(np.uint8))
        return (
            saved(gray, transparency=7) if kind == "gray value" else saved(gray.convert("RGB"), transparency=(7, 7, 7))
        )
    pixels = np.full((16, 16, 2), value, np.uint8)
    pixels[..., 1] = 255 * drawn
    image = Image.fromarray(pixels)
    return (
        saved(image)
        if kind == "LA"
        else saved(image.convert("RGBA"), kind, **({"lossless": True} if kind == "WEBP" else {}))
    )


KINDS = ["LA", "PNG", "WEBP", "palette", "gray value", "color value"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, 60, 128, 200, 250, 255])
def test_drawings_on_transparency_stay_visible_and_differ(kind: str, value: int) -> None:
    pictures = [seen(on_transparency(kind, value, number)) for number in range(4)]
    assert len({picture.digest() for picture in pictures}) == 4
    for number, picture in enumerate(pictures):
        gray = np.asarray(picture.image.convert("L")).astype(int)
        assert abs(gray[shape(number)].mean() - gray[~shape(number)].mean()) > 50
        assert picture.flaws() == Flaw.NONE


def test_black_and_white_drawings_are_laid_over_gray() -> None:
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[2:6, 2:14] = (0, 0, 0, 255)
    pixels[9:13, 2:14] = (255, 255, 255, 255)
    image = seen(saved(Image.fromarray(pixels))).image
    assert [image.getpixel(place) for place in ((0, 0), (5, 4), (5, 10))] == [(128,) * 3, (0,) * 3, (255,) * 3]


def test_drawings_that_differ_only_in_the_color_of_the_background_differ() -> None:
    """White marks in a black frame are invisible on white, but are no copies of each other."""
    digests = set[bytes]()
    for number in range(4):
        pixels = np.zeros((64, 64, 4), np.uint8)
        pixels[:8], pixels[-8:] = (0, 0, 0, 255), (0, 0, 0, 255)
        pixels[30:33, 10 * number : 10 * number + 3] = 255
        digests.add(seen(saved(Image.fromarray(pixels))).digest())
    assert len(digests) == 4


def test_colors_of_transparent_pixels_do_not_matter() -> None:
    pixels = np.array(dark("RGBA"))
    other = pixels.copy()
    other[0, 0, :3] = 90
    assert seen(saved(Image.fromarray(pixels))).digest() == seen(saved(Image.fromarray(other))).digest()
    empty = np.zeros((8, 8, 4), np.uint8)
    assert seen(saved(Image.fromarray(empty))).flaws() == Flaw.CONSTANT


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_transparent_value_of_few_bits_is_scaled_like_the_pixels(bits: int) -> None:
    transparent = hostile.chunk(b"tRNS", (2**bits - 1).to_bytes(2))
    black = hostile.png(8, 8, bits, before=transparent)
    assert seen(black).digest() == seen(hostile.png(8, 8, bits)).digest()
    white = black.replace(transparent, hostile.chunk(b"tRNS", bytes(2)))
    assert seen(white).image.getpixel((0, 0)) == 255, "black is transparent"


# Datasets


def deep_tree(root: Path, bits: dict[str, int], count: int = 20, channels: int = 1) -> Path:
    """``count`` images of each class, whose brightest values have the class's ``bits``."""
    for seed, (name, used) in enumerate(bits.items()):
        for number in range(count):
            noise = np.random.default_rng((seed, number)).integers(0, 2**used, (8, 8, channels), dtype=np.uint16)
            noise[0, 0] = 2**used - 1
            write_files(root / name, {f"{number:03}.png": deep_png(noise)})
    return root


@pytest.mark.parametrize(("bits", "channels"), [*zip(BIT_DEPTHS, (1, 3, 1, 3, 1), strict=True)])
def test_sixteen_bit_files_keep_their_contrast(bits: BitDepth, channels: int, tmp_path, run_ingest, contents) -> None:
    manifest = run_ingest(deep_tree(tmp_path / "deep", {"a": bits, "b": bits}, channels=channels))
    images = contents(manifest)
    assert manifest.bit_depth == bits
    assert manifest.problem_counts == {}
    assert len(images) == 40
    assert min(int(image.max()) - int(image.min()) for image in images.image.values()) > 200


def test_bit_depth_is_that_of_the_brightest_sampled_image_of_all_classes(tmp_path: Path, run_ingest) -> None:
    """Of 150 files, those at the end of the listing are sampled too."""
    assert run_ingest(deep_tree(tmp_path / "deep", {"a": 9, "b": 8, "c": 12}, count=50)).bit_depth == 12


def test_later_images_beyond_the_range_are_reported(tmp_path: Path, run_ingest) -> None:
    root = deep_tree(tmp_path / "deep", {"a": 10, "b": 10})
    first = run_ingest(root)
    (root / "a" / "new.png").write_bytes(deep_png(values(12, 1, (8, 8))))
    second = run_ingest(root)
    assert (first.bit_depth, second.bit_depth) == (10, 10)
    assert second.problem_counts == {"clipped": 1}
    (message,) = [finding.message for finding in findings(second) if finding.rule == "pixels"]
    assert message == (
        "1 image has 16-bit values beyond the dataset's range (data.bit_depth) and was clipped; look at a/new.png."
    )

    with pytest.raises(DataError, match=r"read with data\.bit_depth=10, and the settings ask for 12"):
        run_ingest(root, bit_depth=12)
    wider = run_ingest(root, bit_depth=12, dataset="wider")
    assert (wider.bit_depth, wider.problem_counts) == (12, {})
    dataset = opened(wider)
    dataset.require_bit_depth(12, "The champion")
    with pytest.raises(DataError, match="The champion reads 16-bit images as 16 bits, so it cannot be measured"):
        dataset.require_bit_depth(16, "The champion")


def test_lost_contrast_is_a_finding(tmp_path: Path, run_ingest) -> None:
    root = deep_tree(tmp_path / "deep", {"a": 16, "b": 16})
    for number in range(3):
        (root / "b" / f"dark-{number}.png").write_bytes(deep_png(values(9, 1, (8, 8))[..., 0] + np.uint16(number)))
    manifest = run_ingest(root)
    assert manifest.problem_counts["low_contrast"] == 3
    assert "duplicate" not in manifest.problem_counts, "they are different pictures"
    problem = next(problem for problem in manifest.problems if problem.kind == "low_contrast")
    assert problem.detail == "b/dark-0.png lost its contrast when it was reduced to 8 bits."


def test_bit_depth_survives_an_interrupted_ingest(tmp_path: Path, run_ingest, monkeypatch) -> None:
    """An ingest that continues does not sample again: the files may have changed."""
    root = deep_tree(tmp_path / "deep", {"a": 10, "b": 10})
    real, decoded = Decoder._decode, 0

    def interrupted(*arguments):
        nonlocal decoded
        decoded += 1
        if decoded > 20:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_ingest(root, decode_threads=1, requests_in_flight=1, part_names=8)  # in order
    (root / "a" / "new.png").write_bytes(deep_png(values(12, 1, (8, 8))))
    resumed = run_ingest(root)
    assert resumed.bit_depth == 10
    assert resumed.problem_counts["clipped"] == 1
