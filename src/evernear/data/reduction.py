"""Reduce images to 8 bits without transparency. 16-bit values are scaled according to the dataset's
bit depth. Transparent images are placed over a background.

Many 16-bit PNG files, such as camera images, X-ray images and depth maps, use only 8, 10, 12 or 14
of their bits. An image of only the upper bytes would be almost black. White drawings on a
transparent background would be invisible on a white background.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from evernear.data.encoded_image import EncodedImage

BitDepth = Literal[8, 10, 12, 14, 16]
BIT_DEPTHS: tuple[BitDepth, ...] = get_args(BitDepth)

Box = tuple[int, int, int, int]
_BAND_PIXELS = 2**16

# Pillow's raw modes for a 16-bit PNG file, keyed by color type. Color images are decoded twice.
# When the values are read as big-endian, Pillow keeps the upper bytes, and when they are read as
# little-endian, Pillow keeps the lower bytes. Gray with alpha takes four bytes per pixel.
_GRAY, _COLOR, _GRAY_ALPHA, _COLOR_ALPHA = 0, 2, 4, 6
_RAW_MODES = {
    _GRAY: ("I;16B",),
    _COLOR: ("RGB;16B", "RGB;16L"),
    _GRAY_ALPHA: ("RGBA",),
    _COLOR_ALPHA: ("RGBA;16B", "RGBA;16L"),
}

_BACKGROUNDS = (255, 0, 128)
_NEAR = 32
"""Minimum difference between the gray values of a visible pixel and the background."""
_MAX_HIDDEN = 0.1
_MIN_DRAWN_ALPHA = 32


class Reduced(NamedTuple):
    """A 16-bit image reduced to 8 bits: ``L``, ``LA``, ``RGB`` or ``RGBA``. ``digest`` is of the
    16-bit content. ``span`` is about the largest difference in a channel, 0 only if every channel
    is constant. ``clipped``: whether values exceed the bit depth."""

    image: Image.Image
    digest: bytes
    span: int
    clipped: bool


class DeepImage:
    """A decoded 16-bit PNG file with all bits. In Pillow, color images have 8 bits per channel."""

    def __init__(self, color_type: int, load: Callable[[str], Image.Image]) -> None:
        """Decode the file with ``load``, a function that takes a Pillow raw mode."""
        self._color_type = color_type
        self._parts = [load(raw_mode) for raw_mode in _RAW_MODES[color_type]]
        self._transparent_color = self._parts[0].info.get("transparency")
        self._opaque = self._transparent_color is None and (
            color_type in (_GRAY, _COLOR) or all(_least_alpha(part) == 255 for part in self._parts)
        )

    @property
    def mode(self) -> str:
        return ("L" if self._color_type in (_GRAY, _GRAY_ALPHA) else "RGB") + ("" if self._opaque else "A")

    def used_bit_depth(self) -> BitDepth:
        """The smallest bit depth that can represent all visible values."""
        most = max(int(_extrema(upper)[: self._colors, 1].max()) for _, upper, _ in self._bands())
        return next(depth for depth in BIT_DEPTHS if most < 2 ** (depth - 8) or depth == BIT_DEPTHS[-1])

    def reduce(self, bit_depth: BitDepth) -> Reduced:
        """Reduce values of ``bit_depth`` bits to 8 bits. Larger values are clipped."""
        # The upper byte of a value within the range has bit_depth - 8 bits, which become the upper
        # bits of the result.
        from_upper = [min(255, byte << 16 - bit_depth) if byte < 2 ** (bit_depth - 8) else 255 for byte in range(256)]
        from_lower = [byte >> bit_depth - 8 for byte in range(256)]
        has_alpha = 0 if self._opaque else 1
        upper_table = from_upper * self._colors + [*range(256)] * has_alpha
        lower_table = from_lower * self._colors + [0] * 256 * has_alpha
        # Reduce in place if possible, so that no more memory is used than for other images.
        target = self._parts[0] if self._colors == 3 else Image.new(self.mode, self._parts[0].size)
        digests = hashlib.sha256(), hashlib.sha256()
        extrema = [np.array([[255, 0]] * len(self.mode)), np.array([[255, 0]] * len(self.mode))]
        for box, *halves in self._bands():
            for number, half in enumerate(halves):
                digests[number].update(half.tobytes())
                seen = _extrema(half)
                extrema[number][:, 0] = np.minimum(extrema[number][:, 0], seen[:, 0])
                extrema[number][:, 1] = np.maximum(extrema[number][:, 1], seen[:, 1])
            upper, lower = halves
            target.paste(ImageChops.add(upper.point(upper_table), lower.point(lower_table)), box)
        upper_span, lower_span = (int((seen[:, 1] - seen[:, 0]).max()) for seen in extrema)
        header = b"%s;16 %d %d\n" % (self.mode.encode(), *target.size)
        return Reduced(
            image=target,
            digest=hashlib.sha256(header + digests[0].digest() + digests[1].digest()).digest(),
            span=upper_span << 8 or lower_span,
            clipped=int(extrema[0][: self._colors, 1].max()) >= 2 ** (bit_depth - 8),
        )

    @property
    def _colors(self) -> int:
        return 1 if self._color_type in (_GRAY, _GRAY_ALPHA) else 3

    def _bands(self) -> Iterator[tuple[Box, Image.Image, Image.Image]]:
        """Yield each box with two images of mode `mode`, which contain the upper bytes and the
        lower bytes of the box's pixels. Transparent pixels are set to zero, because their color is
        not visible."""
        for box in bands(self._parts[0], _BAND_PIXELS):
            upper, lower = self._halves([part.crop(box) for part in self._parts])
            if self._transparent_color is not None:
                alpha = _drawn(upper, lower, self._transparent_color)
                upper.putalpha(alpha)
                lower.putalpha(alpha)
            if not self._opaque:
                alpha = ImageChops.lighter(upper.getchannel("A"), lower.getchannel("A"))
                transparent = alpha.point([255] + [0] * 255)
                for half in (upper, lower):
                    half.paste((0,) * len(self.mode), mask=transparent)
            yield box, as_mode(upper, self.mode), as_mode(lower, self.mode)

    def _halves(self, parts: list[Image.Image]) -> tuple[Image.Image, Image.Image]:
        if self._color_type == _GRAY:
            values = np.asarray(parts[0])
            return Image.fromarray((values >> 8).astype(np.uint8)), Image.fromarray(values.astype(np.uint8))
        if self._color_type == _GRAY_ALPHA:
            upper, lower, upper_alpha, lower_alpha = parts[0].split()
            return Image.merge("LA", (upper, upper_alpha)), Image.merge("LA", (lower, lower_alpha))
        return parts[0], parts[1]


def _least_alpha(part: Image.Image) -> int:
    return int(_extrema(part)[-1, 0])


def _drawn(upper: Image.Image, lower: Image.Image, transparent: int | tuple[int, ...]) -> Image.Image:
    """An alpha channel that is 0 where the color is ``transparent``, and 255 elsewhere."""
    values = np.asarray(upper).astype(np.uint16) << 8 | np.asarray(lower)
    drawn = values != np.asarray(transparent)
    return Image.fromarray((drawn if drawn.ndim == 2 else drawn.any(axis=2)).astype(np.uint8) * np.uint8(255))


def _extrema(image: Image.Image) -> NDArray[np.int64]:
    """The smallest and the largest value of each channel, as an array of shape (C, 2)."""
    return np.asarray(image.getextrema(), np.int64).reshape(-1, 2)


def deep_color_type(file: EncodedImage) -> int | None:
    """The PNG color type of a 16-bit file, or None for a file that does not have 16 bits."""
    bits, color_type = file.data[24:26]  # IHDR is the first chunk
    return color_type if file.format == "PNG" and bits == 16 and color_type in _RAW_MODES else None


def is_deep_gray(file: EncodedImage) -> bool:
    return deep_color_type(file) in (_GRAY, _GRAY_ALPHA)


def flatten(image: Image.Image, mode: str) -> tuple[Image.Image, bytes]:
    """Place a transparent image over a plain background, and return an image with ``mode`` ``L`` or
    ``RGB``.

    The background is the first of white, black and gray that hides at most a tenth of the drawing.
    If each of these colors hides more, the background is the color that hides the least. The choice
    depends only on the image, so ingest and servers choose the same background. The second returned
    value identifies the drawn pixels that have the background's color. Two images may become equal
    although they differ in these pixels. The second value is empty if no drawn pixel has the
    background's color.
    """
    weights, opaque = np.zeros(256), True
    for box in bands(image, _BAND_PIXELS):
        layer = image.crop(box).convert("RGBA")
        alpha = layer.getchannel("A")
        weights += np.bincount(np.asarray(layer.convert("L")).ravel(), np.asarray(alpha).ravel(), 256)
        opaque = opaque and alpha.getextrema()[0] == 255
    background = _background(weights)
    color = (background, background, background, 255)
    flat, hidden, any_hidden = Image.new(mode, image.size), hashlib.sha256(), False
    for box in bands(image, _BAND_PIXELS):
        layer = image.crop(box).convert("RGBA")
        composite = Image.alpha_composite(Image.new("RGBA", layer.size, color), layer)
        flat.paste(as_mode(composite, mode), box)
        if not opaque:
            same = np.asarray(composite).view(np.uint32) == np.array(color, np.uint8).view(np.uint32)
            same &= np.asarray(layer)[..., 3:] >= _MIN_DRAWN_ALPHA
            any_hidden = any_hidden or bool(same.any())
            hidden.update(np.packbits(same, axis=1).tobytes())
    return flat, hidden.digest() if any_hidden else b""


def _background(weights: NDArray[np.float64]) -> int:
    values = np.arange(256)
    hidden = {value: float(weights[abs(values - value) < _NEAR].sum()) for value in _BACKGROUNDS}
    limit = _MAX_HIDDEN * float(weights.sum())
    return next((value for value in _BACKGROUNDS if hidden[value] <= limit), min(hidden, key=hidden.__getitem__))


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)


def bands(image: Image.Image, pixels: int) -> Iterator[Box]:
    """Boxes (left, top, right, bottom) of about ``pixels`` pixels, from top to bottom."""
    rows = max(1, pixels // image.width)
    for top in range(0, image.height, rows):
        yield 0, top, image.width, min(top + rows, image.height)
