"""scikit-learn's digits."""

from collections.abc import Iterator

import numpy as np

from evernear.data.sources.base import ArrayBlock, ArraySource, FileEntry


class Digits(ArraySource):
    """scikit-learn's 1,797 handwritten digits, 8 x 8. Values 0..16 are scaled to 0..255."""

    name = "digits"

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        self._images = np.rint(np.reshape(pixels, (-1, 8, 8)) * (255 / 16)).astype(np.uint8)
        self._labels = [str(label) for label in labels]

    def entries(self) -> Iterator[FileEntry]:
        """List all images."""
        yield from (FileEntry(f"digits[{i}]", "", label, None, 0) for i, label in enumerate(self._labels))

    def blocks(self) -> Iterator[ArrayBlock]:
        """Yield all images as one block."""
        yield ArrayBlock([entry.name for entry in self.entries()], self._labels, None, self._images)
