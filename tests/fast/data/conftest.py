"""Small trees of real image files, and readers for ingested snapshots."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.data.manifest import Manifest
from evernear.data.preprocess import decode, image_digest
from tests.dataset_images import saved, write_files
from tests.small_ingest import ingest_with, opened

MakeImage = Callable[..., bytes]
Ingest = Callable[..., Manifest]


@pytest.fixture(scope="session")
def make_image() -> MakeImage:
    """``make_image(number)`` returns a PNG file of noise, unique for each number."""

    @cache
    def make_image(number: int, size: tuple[int, int] = (6, 5), mode: str = "L", kind: str = "PNG") -> bytes:
        channels = len(Image.new(mode, (1, 1)).getbands())
        shape = (size[1], size[0], channels)
        pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        return saved(Image.frombytes(mode, size, pixels.tobytes()), kind)

    return make_image


@pytest.fixture
def tree(tmp_path: Path, make_image: MakeImage) -> Path:
    """A class-per-folder tree: 12 images of each of the classes 1, 2 and 10."""
    names = {number: f"{('1', '2', '10')[number % 3]}/{number:03}.png" for number in range(36)}
    return write_files(tmp_path / "tree", {name: make_image(number) for number, name in names.items()})


@pytest.fixture
def run_ingest(tmp_path: Path) -> Ingest:
    """``run_ingest(source, **settings)`` ingests a source into the test's store."""

    def run_ingest(source: Path | str, **settings: object) -> Manifest:
        source = f"folder:{source}" if isinstance(source, Path) else source
        return ingest_with(source, (tmp_path / "store").as_uri(), **settings)

    return run_ingest


class Contents:
    """All images of a snapshot by digest."""

    def __init__(self, manifest: Manifest) -> None:
        dataset = opened(manifest)
        self.split: dict[bytes, str] = {}
        self.label: dict[bytes, str] = {}
        self.image: dict[bytes, np.ndarray] = {}
        for split in ("train", "test", "gallery", "query"):
            for block in dataset.blocks(split, 7):
                for image, label, digest in zip(block.images, block.labels, block.digests, strict=True):
                    key = digest.tobytes()
                    assert key not in self.split, "an image occurs twice"
                    self.split[key] = split
                    self.label[key] = manifest.labels[label]
                    self.image[key] = image
        for split in ("train", "test", "gallery", "query"):
            assert manifest.count(split) == list(self.split.values()).count(split)

    def __len__(self) -> int:
        return len(self.split)


@pytest.fixture
def digest_of() -> Callable[[bytes], bytes]:
    """Return a function that computes the identity of an encoded image."""
    return lambda data: image_digest(decode(data, 10**6))


@pytest.fixture
def contents() -> type[Contents]:
    return Contents
