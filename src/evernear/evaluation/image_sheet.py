"""Image sheets for a page: many images of one size in one picture."""

import base64
import io

import numpy as np
from PIL import Image

from evernear.common.frozen import Frozen
from evernear.data.preprocess import Pixels

SHEET_COLUMNS = 20
TILE_PX = 96
"""Longest side of an image on the page. Larger images are reduced."""
LOSSLESS_BELOW_PX = 32
"""Shorter side of a tile below which the sheet is compressed without loss, because lossy WebP would
blur small neighboring tiles."""


class Sheet(Frozen):
    """Images of one size, tiled in rows of `SHEET_COLUMNS`."""

    count: int
    width_px: int
    height_px: int
    webp: str
    """Base64."""


class Tiles:
    """Collects images with the dataset's shape, reduced so that the longer side is at most
    ``limit_px``."""

    def __init__(self, shape: tuple[int, int, int], limit_px: int) -> None:
        height, width, _ = shape
        scale = min(1.0, limit_px / max(height, width))
        self._width, self._height = max(1, round(width * scale)), max(1, round(height * scale))
        self._images: list[Image.Image] = []

    def add(self, image: Pixels) -> int:
        """Add an image (H, W, C) and return its number."""
        picture = Image.fromarray(np.squeeze(image, axis=2) if image.shape[2] == 1 else image).convert("RGB")
        self._images.append(picture.resize((self._width, self._height), Image.Resampling.LANCZOS))
        return len(self._images) - 1

    def sheet(self) -> Sheet:
        rows = -(-len(self._images) // SHEET_COLUMNS) or 1
        whole = Image.new("RGB", (SHEET_COLUMNS * self._width, rows * self._height))
        for number, image in enumerate(self._images):
            row, column = divmod(number, SHEET_COLUMNS)
            whole.paste(image, (column * self._width, row * self._height))
        buffer = io.BytesIO()
        lossless = min(self._width, self._height) < LOSSLESS_BELOW_PX
        whole.save(buffer, "WEBP", quality=80, lossless=lossless, method=4)
        return Sheet(
            count=len(self._images),
            width_px=self._width,
            height_px=self._height,
            webp=base64.b64encode(buffer.getvalue()).decode(),
        )
