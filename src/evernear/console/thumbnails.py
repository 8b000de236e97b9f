"""Thumbnails of images to review."""

from io import BytesIO

from evernear.data.image_file import inspect
from evernear.data.preprocess import bit_depth_of, decode_inspected
from evernear.settings.section import MAX_PIXELS

SIDE_PX = 192


def thumbnail(image: bytes) -> bytes:
    """A PNG file of at most `SIDE_PX` x `SIDE_PX` pixels.

    Raises:
        DataError: the image file is broken.
    """
    file = inspect(image, MAX_PIXELS)
    picture = decode_inspected(file, bit_depth_of(file) or 16).image
    picture.thumbnail((SIDE_PX, SIDE_PX))
    buffer = BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
