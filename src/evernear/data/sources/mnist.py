"""MNIST, and datasets in the MNIST format (IDX, http://yann.lecun.com/exdb/mnist)."""

import gzip
import math
import os
import struct
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.error import URLError

import numpy as np

from evernear.common.disk import disk_errors
from evernear.common.environment import through_proxy
from evernear.data.manifest import Split
from evernear.data.preprocess import Pixels
from evernear.data.sources.base import ArrayBlock, ArraySource, FileEntry
from evernear.errors import DataError

_BLOCK_IMAGES = 1024
_PARTS: tuple[tuple[str, Split | None], ...] = (("t10k", "test"), ("train", None))


class Mnist(ArraySource):
    """Four IDX files, plain or gzipped. The 10,000 official test images are the test split."""

    name = "mnist"
    chosen_splits = ("train", "gallery", "query")

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def entries(self) -> Iterator[FileEntry]:
        for part, split in _PARTS:
            with _open_idx(self._find(f"{part}-labels", "idx1-ubyte")) as labels:
                for i, label in enumerate(labels.read(labels.shape[0]).tolist()):
                    yield FileEntry(f"{part}[{i}]", "", str(label), split, 0)

    def blocks(self) -> Iterator[ArrayBlock]:
        for part, split in _PARTS:
            images_path = self._find(f"{part}-images", "idx3-ubyte")
            labels_path = self._find(f"{part}-labels", "idx1-ubyte")
            with _open_idx(images_path) as images, _open_idx(labels_path) as labels:
                if len(images.shape) != 3 or 0 in images.shape:
                    raise DataError(f"{images_path} contains no images; download it again.")
                if labels.shape != images.shape[:1]:
                    raise DataError(
                        f"{images_path} and {labels_path} do not match: their arrays have the shapes"
                        f" {images.shape} and {labels.shape}; download both again."
                    )
                for start in range(0, images.shape[0], _BLOCK_IMAGES):
                    pixels, numbers = images.read(_BLOCK_IMAGES), labels.read(_BLOCK_IMAGES)
                    names = [f"{part}[{start + i}]" for i in range(len(pixels))]
                    yield ArrayBlock(names, [str(number) for number in numbers.tolist()], split, pixels)

    def _find(self, stem: str, kind: str) -> Path:
        with disk_errors(self._directory):
            for directory in (self._directory, self._directory / "MNIST" / "raw"):
                for name in (f"{stem}-{kind}", f"{stem}-{kind}.gz", f"{stem}.{kind}", f"{stem}.{kind}.gz"):
                    if (directory / name).is_file():
                        return directory / name
        raise DataError(
            f"{self._directory} contains no {stem}-{kind}, plain or .gz; pass a directory with the IDX files."
        )


class _IdxReader:
    def __init__(self, file: BinaryIO | gzip.GzipFile, path: Path) -> None:
        self._file, self._path = file, path
        zeros, kind, dimensions = struct.unpack(">HBB", self._read_bytes(4))
        if zeros != 0 or kind != 8 or dimensions == 0:
            raise DataError(f"{path} is not an IDX file of bytes; download it again.")
        self.shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", self._read_bytes(4 * dimensions))
        self._left = self.shape[0]

    def read(self, count: int) -> Pixels:
        count = min(count, self._left)
        self._left -= count
        shape = (count, *self.shape[1:])
        return np.frombuffer(self._read_bytes(math.prod(shape)), np.uint8).reshape(shape)

    def _read_bytes(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self._path} is broken ({error}); download it again.") from None
        if len(data) != size:
            raise DataError(f"{self._path} is truncated; download it again.")
        return data


@contextmanager
def _open_idx(path: Path) -> Generator[_IdxReader]:
    with disk_errors(path):
        file = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115
    with file:
        yield _IdxReader(file, path)


def download_mnist() -> Path:
    """The directory with the files, which torchvision downloads once and verifies."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evernear" / "mnist"
    if not directory.is_dir():
        from torchvision.datasets import MNIST

        with disk_errors(directory.parent):
            directory.parent.mkdir(parents=True, exist_ok=True)
            # The download is moved to its final location when it is complete, so that an
            # interrupted download does not look complete.
            with tempfile.TemporaryDirectory(prefix=".mnist-", dir=directory.parent) as partial:
                try:
                    MNIST(partial, download=True)
                except (URLError, RuntimeError) as error:
                    reason = " ".join(str(error).split())
                    proxy = through_proxy(MNIST.mirrors[0])
                    raise DataError(
                        f"MNIST cannot be downloaded{proxy} ({reason}); pass a directory that contains it:"
                        " mnist:DIRECTORY."
                    ) from error
                (Path(partial) / "MNIST" / "raw").rename(directory)
    return directory
