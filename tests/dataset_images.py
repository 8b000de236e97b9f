"""Image files, and small folders of noise images."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` with their folders, and return ``root``."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_images(folder: Path, count: int, first: int = 0, size: tuple[int, int] = (30, 26), mode: str = "L") -> None:
    """Write images of noise into the folders of the classes 2, 10 and été."""
    for number in range(first, first + count):
        path = folder / ("2", "10", "été")[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (size[1], size[0]) + ((3,) if mode == "RGB" else ())
        Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, np.uint8)).save(path)
