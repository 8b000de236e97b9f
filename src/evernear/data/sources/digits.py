"""scikit-learn's digits dataset, as a source and as image folders."""

import secrets
import shutil
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from evernear.common.disk import disk_errors
from evernear.data.sources.base import ArrayBlock, ArraySource, FileEntry
from evernear.errors import SettingsError


class Digits(ArraySource):
    """scikit-learn's 1,797 digits of 8 x 8 pixels, with values scaled from 16 to 255."""

    name = "digits"

    def __init__(self) -> None:
        # Not with load_digits, because importing scikit-learn takes a second.
        path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        rows = np.loadtxt(Path(str(path)), np.uint8, delimiter=",")  # the pixels of an image, and its label
        self._images = np.rint(np.reshape(rows[:, :-1], (-1, 8, 8)) * (255 / 16)).astype(np.uint8)
        self._labels = [str(label) for label in rows[:, -1]]

    def entries(self) -> Iterator[FileEntry]:
        yield from (FileEntry(f"digits[{i}]", "", label, None, 0) for i, label in enumerate(self._labels))

    def blocks(self) -> Iterator[ArrayBlock]:
        yield ArrayBlock([entry.name for entry in self.entries()], self._labels, None, self._images)


class DigitFolders(NamedTuple):
    """A source that lacks one class, and a folder with the images of that class."""

    known: Path
    unseen: Path


def lay_out_digits(directory: Path, without: str) -> DigitFolders:
    """A folder that already exists is not changed."""
    (block,) = Digits().blocks()
    if without not in block.labels:
        raise SettingsError(f"{without!r} is not a class of the digits; choose one of 0 to 9.")
    folders = DigitFolders(directory / f"digits-without-{without}", directory / f"digits-{without}")
    known, unseen = ({}, {})
    for number, (label, image) in enumerate(zip(block.labels, block.images, strict=True)):
        if label == without:
            unseen[f"{number:04d}.png"] = image
        else:
            known[f"{label}/{number:04d}.png"] = image
    for folder, files in ((folders.known, known), (folders.unseen, unseen)):
        if not folder.exists():
            with disk_errors(folder):
                _write_folder(folder, files)
    return folders


def _write_folder(folder: Path, files: dict[str, np.ndarray]) -> None:
    """Write all ``files`` or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".digits-{secrets.token_hex(8)}"
    unfinished.mkdir()
    try:
        for name, image in files.items():
            (unfinished / name).parent.mkdir(exist_ok=True)
            Image.fromarray(image).save(unfinished / name)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
