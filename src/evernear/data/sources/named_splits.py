"""The splits that are specified in a table or a packed file with words such as train, test and
validation."""

from typing import Literal

from evernear.data.manifest import SPLITS, Split
from evernear.data.sources.layout import SPLIT_WORDS, VALIDATION_WORDS
from evernear.errors import DataError
from evernear.settings.data import DataSettings

NamedSplit = Split | Literal["", "none", "validation"]


class NamedSplits:
    """Collects the split words in a source, and then determines the split of each image.

    As with folders, validation images belong to the gallery if any image is in the test split, and
    to the test split otherwise. If no image specifies a certain split, ingest fills this split with
    images from train.
    """

    def __init__(self, name: str, settings: DataSettings) -> None:
        self._name, self._given = name, settings.split_folders
        self._used: set[NamedSplit] = set()
        self.chosen_splits: tuple[Split, ...] = SPLITS

    def add(self, word: str, where: str) -> NamedSplit:
        """Return the split that ``word`` specifies, as an argument for `explicit`. Return ``none``
        if ``data.split_folders`` excludes images with this word."""
        plain = word.strip().casefold()
        split: NamedSplit | None = self._given.get(word.strip())
        if split is None:
            split = "validation" if plain in VALIDATION_WORDS else SPLIT_WORDS.get(plain, "" if not plain else None)
        if split is None:
            raise DataError(
                f"The split {word!r} in {where} of {self._name} is unknown; write train, test, validation, gallery or"
                f" query, or add --set data.split_folders.{word.strip()}=test (or another split, or none to leave its"
                " images out)."
            )
        self._used.add(split)
        return split

    def finish(self) -> None:
        """Determine the splits to which ingest assigns images. Call this method after the last call
        of `add`."""
        used = {self._split(split) for split in self._used} - {None}
        if used and not self._used & {"train", ""}:
            raise DataError(
                f"{self._name} has the splits {', '.join(sorted(str(split) for split in used))}, but no image in train;"
                " add training images, or leave all splits empty to let ingest choose them."
            )
        self.chosen_splits = ("train", *(split for split in SPLITS[1:] if split not in used)) if used else SPLITS

    def explicit(self, split: NamedSplit) -> Split | None:
        """The explicit split of an image, or None if ingest chooses the image's split. Call this
        after `finish`."""
        chosen = self._split(split)
        return None if chosen in self.chosen_splits else chosen

    def _split(self, split: NamedSplit) -> Split | None:
        if split == "validation":
            return "gallery" if "test" in self._used else "test"
        return None if split in ("", "none") else split
