"""The layout of an image tree. The layout determines which folders are splits and which folder is
the class of each image.

Split folders are recognized by their names. Split folders may be above the class folders
(``train/cat/0.jpg``) or inside them (``cat/train/0.jpg``). If the names and the contents of the
folders are ambiguous, `choose_layout` raises an error. If ``train`` and ``eval`` were regarded as
classes, the network would learn to distinguish the splits instead of the classes. The user can
resolve the ambiguity with ``data.layout`` and ``data.split_folders``.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final, Literal, NamedTuple

from evernear.common.output import quantity
from evernear.data.manifest import SPLITS, Split
from evernear.errors import DataError
from evernear.settings.data import DataSettings

VALIDATION_WORDS = frozenset({"val", "valid", "validation", "dev"})
SPLIT_WORDS: Final[dict[str, Split]] = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "gallery": "gallery",
    "query": "query",
    **dict.fromkeys(VALIDATION_WORDS, "gallery"),
}
"""Validation maps to the gallery, on which training validates the network."""
# Matches the beginning of names such as trainset, tests or Validate.
_BEGINS_LIKE_SPLIT = re.compile(r"(?<![a-z])(?:train|test|valid|gallery|query)")
_MAX_NAMES = 5
_SPELLING_SIMILARITY = 0.8


class Contents(NamedTuple):
    """A top-level folder: its subfolders, whether it has images, and whether evernear wrote it."""

    folders: frozenset[str] = frozenset()
    has_images: bool = False
    is_output: bool = False


class Place(NamedTuple):
    """The meaning of each folder in an image's path."""

    class_folder: str
    split_folder: str
    split: Split | None
    class_folders: list[str]
    """All folders in the path except split folders."""


@dataclass(frozen=True)
class Layout:
    """``splits`` maps split folders, inside the class folders if ``class_first`` is set and
    otherwise at the top level, to their splits."""

    splits: Mapping[str, Split] = field(default_factory=dict[str, Split])
    left_out: frozenset[str] = frozenset()
    left_out_inside: frozenset[str] = frozenset()
    """Folders that are ignored inside top-level folders."""
    class_first: bool = False
    innermost: bool = False
    """Whether the innermost folder in a path, and not the outermost folder, is the class."""

    @property
    def train_folder(self) -> str:
        return next((folder for folder, split in self.splits.items() if split == "train"), "")

    @property
    def top_splits(self) -> Mapping[str, Split]:
        return {} if self.class_first else self.splits

    @property
    def chosen_splits(self) -> tuple[Split, ...]:
        """The splits to which ingest assigns images: train, and all splits that have no folder."""
        return ("train", *(split for split in SPLITS[1:] if split not in self.splits.values()))

    def leaves_out(self, folders: list[str]) -> bool:
        return not (self.left_out.isdisjoint(folders[:1]) and self.left_out_inside.isdisjoint(folders[1:2]))

    def place(self, folders: list[str]) -> Place | None:
        """None if the image is excluded or is not in a class folder."""
        if self.leaves_out(folders):
            return None
        split_folder = ""
        if self.splits:
            depth = 1 if self.class_first else 0
            if len(folders) > depth and folders[depth] in self.splits:
                split_folder = folders[depth]
                # Archives from Kaggle repeat the split in the path, as in
                # seg_train/seg_train/sea/0.jpg.
                repeated = len(folders) > depth + 2 and folders[depth + 1] == split_folder
                folders = [*folders[:depth], *folders[depth + 1 + repeated :]]
            elif not self.class_first:
                return None
        if not folders:
            return None
        class_folder = folders[-1 if self.innermost else 0]
        return Place(class_folder, split_folder, self.splits.get(split_folder), folders)

    def class_folder(self, label: str, file: str = "") -> str:
        """The folder for a new image, which becomes a training image, or for an existing ``file``,
        which stays in its split folder."""
        split_folder = self.train_folder
        if file:
            place = self.place(file.split("/")[:-1])
            split_folder = place.split_folder if place else ""
        parts = (label, split_folder) if self.class_first else (split_folder, label)
        return "/".join(filter(None, parts))

    def require_used(self, name: str, used: Collection[str], settings: DataSettings) -> None:
        """Check that each split folder is in ``used``: contains images in class folders."""
        for folder in sorted(self.splits.keys() - used):
            if folder in settings.split_folders:
                raise DataError(
                    f"data.split_folders names {folder}, but {name} has no folder of this name with images in class"
                    " folders; correct the name or remove the setting."
                )
            if self.train_folder in used:
                split = self.splits[folder]
                raise DataError(
                    f"The folder {folder} of {name} contains no image in a class folder; sort its images into class"
                    f" folders, or move the folder away to let ingest choose {split} images from {self.train_folder}."
                )
        if self.top_splits and not used:
            raise DataError(
                f"{name} contains no image in a class folder: {_listed(self.splits)} are split folders. Sort the images"
                " into class folders in them, or add --set data.layout=classes if these folders are the classes."
            )


class NestedFolders:
    """Folders inside class folders. Memory does not grow with their number."""

    def __init__(self) -> None:
        self._folders: dict[str, set[str]] = {}
        self._images: Counter[str] = Counter()
        self._direct: set[str] = set()

    def add(self, label: str, place: Place) -> None:
        if len(place.class_folders) == 1:
            self._direct.add(label)
            return
        self._images[label] += 1
        folders = self._folders.setdefault(label, set())
        if len(folders) <= _MAX_NAMES:
            folders.add(place.class_folders[1])

    def names(self) -> Iterator[str]:
        """Class folders whose subfolders may be classes or splits. A single one is neither."""
        single = {label for label, folders in self._folders.items() if len(folders) == 1 and label not in self._direct}
        for label, folders in self._folders.items():
            if len(folders) > 1 or (label in single and len(single) > 1) or _split_words(folders):
                yield f"{label} ({_listed(folders)}: {quantity(self._images[label], 'image', 'images')})"


def choose_layout(name: str, folders: Mapping[str, Contents], settings: DataSettings) -> Layout:
    ignored = frozenset(folder for folder, split in settings.split_folders.items() if split == "none")
    left_out, left_out_inside = ignored & folders.keys(), ignored - folders.keys()
    for folder in left_out_inside.difference(*(contents.folders for contents in folders.values())):
        _reject_misspelled(name, folder, folders.keys() - ignored)
    given: dict[str, Split] = {folder: split for folder, split in settings.split_folders.items() if split != "none"}
    folders = {
        folder: Contents(contents.folders - left_out_inside, contents.has_images)
        for folder, contents in folders.items()
        if folder not in left_out
    }
    if settings.layout == "classes":
        return Layout({}, left_out, left_out_inside)
    top = _top_splits(name, folders, given)
    splits = _splits_in_classes(name, folders, given) if top is None else top
    class_first = top is None and bool(splits)
    return Layout(splits, left_out, left_out_inside, class_first, innermost=settings.layout == "innermost")


def _top_splits(name: str, folders: Mapping[str, Contents], given: Mapping[str, Split]) -> Mapping[str, Split] | None:
    """The splits of the top-level folders, or None if the top-level folders are classes."""
    named = folders.keys() & given.keys()
    words = _split_words(folders.keys() - given.keys())
    known, unknown = _known_splits(words, folders.keys(), given)
    if unknown:
        signs = _alike(words) | _look_like_splits(words, folders)
        if not (named or signs):
            return None
        raise _question(f"{name} has", known.keys() | named if named else known.keys() & signs, unknown, folders)
    if not (known or named):
        return None
    splits: dict[str, Split] = {**known, **given}
    if "train" not in splits.values():
        raise DataError(
            f"{name} has split folders ({_listed(splits)}) but no train folder; name one with"
            f" {split_option(min(splits), 'train')}, or add --set data.layout=classes if they are classes."
        )
    return splits


def _splits_in_classes(name: str, folders: Mapping[str, Contents], given: Mapping[str, Split]) -> Mapping[str, Split]:
    """The splits of folders inside class folders, or nothing if those are no splits."""
    inner = [contents.folders for contents in folders.values()]
    plain = {folder: re.sub("[^a-z]", "", folder.lower()) for names in inner for folder in names - given.keys()}
    words = {folder: word for folder, word in plain.items() if word in SPLIT_WORDS}
    splits: dict[str, Split] = {**_splits_of(words, given), **given}
    with_train = [names for names in inner if len(names) > 1 and "train" in map(splits.get, names)]
    if not any(splits.get(name, "train") != "train" for names in with_train for name in names) and len(with_train) < 2:
        return given
    unknown: set[str] = set()
    for names in inner:
        if names & splits.keys():
            unknown |= _known_splits({folder: words[folder] for folder in names & words.keys()}, names, given)[1]
    if unknown:
        raise _question(f"The class folders of {name} contain", splits.keys() - unknown, unknown, folders)
    return splits


def named_like_splits(folders: Collection[str]) -> set[str]:
    """Folders whose contents determine whether they are splits."""
    return {folder for folder in folders if _split_words([folder]) or _BEGINS_LIKE_SPLIT.search(folder.lower())}


def _known_splits(
    words: Mapping[str, str], folders: Collection[str], given: Mapping[str, Split]
) -> tuple[dict[str, Split], set[str]]:
    """Splits of folders, and folders that have none or share it with another folder."""
    splits = _splits_of(words, given)
    uses = Counter(splits.values())
    known: dict[str, Split] = {folder: split for folder, split in splits.items() if uses[split] == 1}
    return known, set(folders) - known.keys() - given.keys()


def _split_words(folders: Collection[str]) -> dict[str, str]:
    """Map folders with exactly one word of `SPLIT_WORDS`, in any case, to this word."""
    words = {folder: SPLIT_WORDS.keys() & re.findall("[a-z]+", folder.lower()) for folder in folders}
    return {folder: found.pop() for folder, found in words.items() if len(found) == 1}


def _splits_of(words: Mapping[str, str], given: Mapping[str, Split]) -> dict[str, Split]:
    """A validation folder is the test split if the source has no test folder, and otherwise the
    gallery: published results were then measured on it."""
    has_test = "test" in given.values() or any(SPLIT_WORDS[word] == "test" for word in words.values())
    return {
        folder: "test" if word in VALIDATION_WORDS and not has_test else SPLIT_WORDS[word]
        for folder, word in words.items()
    }


def _alike(words: Mapping[str, str]) -> set[str]:
    """Folders that differ only in the word for the split, such as ``seg_train``, ``seg_test``."""
    patterns = {folder: re.sub(f"(?<![a-z]){word}(?![a-z])", "*", folder.lower()) for folder, word in words.items()}
    counts = Counter(patterns.values())
    return {folder for folder, pattern in patterns.items() if counts[pattern] > 1}


def _look_like_splits(words: Collection[str], folders: Mapping[str, Contents]) -> set[str]:
    """Folders with one of the ``words`` that contain class folders and no image, and folders named
    like splits that share names of class folders with others."""
    sharing = _sharing(folders)
    with_word = {
        folder for folder in words if folder in sharing or (folders[folder].folders and not folders[folder].has_images)
    }
    return with_word | {folder for folder in sharing if _BEGINS_LIKE_SPLIT.search(folder.lower())}


def _sharing(folders: Mapping[str, Contents]) -> set[str]:
    """Folders that contain a subfolder with the same name as a subfolder of another folder."""
    counts = Counter(inner for contents in folders.values() for inner in contents.folders)
    return {folder for folder, contents in folders.items() if any(counts[inner] > 1 for inner in contents.folders)}


def _question(
    subject: str, known: Collection[str], unknown: Collection[str], folders: Mapping[str, Contents]
) -> DataError:
    sharing = _sharing(folders)
    used: set[str] = {SPLIT_WORDS[word] for word in _split_words(known).values()}
    answers: list[str] = []
    for folder in sorted(unknown):
        match = _BEGINS_LIKE_SPLIT.search(folder.lower())
        likely: list[str] = [SPLIT_WORDS[match[0]]] if match else []
        likely += ["test"] if folder in sharing or folder not in folders else []
        split = next((split for split in likely if split not in used), "none")
        used.add(split)
        answers.append(split_option(folder, split))
    looks = f"split folders ({_listed(known)}) and others ({_listed(unknown)})" if known else f"{_listed(unknown)}"
    return DataError(
        f"{subject} {looks}, which may be splits or classes. Give each its split (train, test, gallery, query, or none"
        f" to leave it out), as in {' '.join(answers[:_MAX_NAMES])}, or add --set data.layout=classes if every"
        " top-level folder is a class."
    )


def _reject_misspelled(name: str, folder: str, known: Collection[str]) -> None:
    """A folder to leave out may have been removed, and fold1 be there without fold2. With another
    spelling, it would be used."""
    others = [other for other in known if re.sub(r"\d+", "", other) != re.sub(r"\d+", "", folder)]
    if close := get_close_matches(folder, others, n=1, cutoff=_SPELLING_SIMILARITY):
        raise DataError(
            f"data.split_folders leaves out {folder}, which {name} does not have; write {close[0]!r} if you mean that,"
            " or remove the setting."
        )


def split_option(folder: str, split: str) -> str:
    if re.search(r"[.=\s]|__", folder):
        return f"--set {shlex.quote(f'data.split_folders={json.dumps({folder: split}, ensure_ascii=False)}')}"
    return f"--set {shlex.quote(f'data.split_folders.{folder}={split}')}"


def _listed(folders: Iterable[str]) -> str:
    shown = sorted(folders)
    return ", ".join(shown if len(shown) <= _MAX_NAMES else [*shown[:_MAX_NAMES], "and more"])


NamedSplit = Split | Literal["", "none", "validation"]


class NamedSplits:
    """Collects the split words of a source. As with folders, validation is the gallery if any image
    is in test, and test otherwise. Ingest fills splits that no image names."""

    def __init__(self, name: str, settings: DataSettings) -> None:
        self._name, self._given = name, settings.split_folders
        self._used: set[NamedSplit] = set()
        self._words: set[str] = set()
        self.chosen_splits: tuple[Split, ...] = SPLITS

    def add(self, word: str, where: str) -> NamedSplit:
        """Return the split for `explicit`, or ``none`` if the settings exclude the word."""
        plain = word.strip().casefold()
        split: NamedSplit | None = self._given.get(word.strip())
        if split is None:
            split = "validation" if plain in VALIDATION_WORDS else SPLIT_WORDS.get(plain, "" if not plain else None)
        if split is None:
            raise DataError(
                f"The split {word!r} in {where} of {self._name} is unknown; write train, test, validation, gallery or"
                f" query, or add {split_option(word.strip(), 'test')} (or another split, or none to leave its images"
                " out)."
            )
        self._used.add(split)
        self._words.add(word.strip())
        return split

    def finish(self) -> None:
        """Determine the splits to which ingest assigns images, after the last `add`."""
        for word, split in self._given.items():
            if split == "none" and word not in self._words:
                _reject_misspelled(self._name, word, self._words - self._given.keys())
            elif word not in self._words:
                raise DataError(
                    f"data.split_folders names {word}, but no image of {self._name} has this split; correct the name or"
                    " remove the setting."
                )
        used = {self._split(split) for split in self._used} - {None}
        if used and not self._used & {"train", ""}:
            raise DataError(
                f"{self._name} has the splits {', '.join(sorted(str(split) for split in used))}, but no image in train;"
                " add training images, or leave all splits empty to let ingest choose them."
            )
        self.chosen_splits = ("train", *(split for split in SPLITS[1:] if split not in used)) if used else SPLITS

    def explicit(self, split: NamedSplit) -> Split | None:
        """The explicit split, or None if ingest chooses one. Call this after `finish`."""
        chosen = self._split(split)
        return None if chosen in self.chosen_splits else chosen

    def _split(self, split: NamedSplit) -> Split | None:
        if split == "validation":
            return "gallery" if "test" in self._used else "test"
        return None if split in ("", "none") else split
