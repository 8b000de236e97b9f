"""Trees of image files, in a directory or a bucket: ``<class>/<file>`` or ``<split>/<class>/<file>``."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from evernear.class_names import class_name, spelled
from evernear.data.image_file import SIGNATURE_SIZE_BYTES, has_image_suffix, is_image_file
from evernear.data.manifest import SPLITS, Split
from evernear.data.sources.base import FileEntry, FileSource, NameSample, file_etag
from evernear.data.sources.names import is_litter, is_skipped, names_other_kind, skipped_path
from evernear.disk import disk_errors
from evernear.errors import DataError, StoreError
from evernear.store import open_store

_VALIDATION = frozenset({"val", "valid", "validation", "dev"})
SPLIT_WORDS: Final[dict[str, Split]] = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "gallery": "gallery",
    "query": "query",
    **dict.fromkeys(_VALIDATION, "gallery"),
}
"""Words in the names of split folders, and their splits. Training is validated on the gallery."""
_MAX_NAMES = 5


class _ClassFolders(FileSource):
    """Reads label and split from the path of a file."""

    def __init__(self, name: str) -> None:
        self.name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].rstrip("-") or "dataset"
        self._splits: dict[str, Split] = {}
        self._splits_found: set[Split | None] = set()
        self._labels: dict[str, str] = {}
        self._notes: defaultdict[str, NameSample] = defaultdict(NameSample)
        self.notes = self._notes

    @property
    def train_folder(self) -> str:
        """The split folder of the training images, known once `entries` has begun; empty without split folders."""
        return next((folder for folder, split in self._splits.items() if split == "train"), "")

    def _set_layout(self, folders: set[str]) -> None:
        """Decide from the top-level folders whether they are splits, and which splits ingest assigns."""
        words = _split_words(folders)
        splits = _splits_of(words)
        if folders and len(set(splits.values())) == len(folders):
            if "train" not in splits.values():
                raise DataError(f"{self.name} has split folders ({', '.join(sorted(folders))}) but no train folder.")
            self._splits = splits
            self.chosen_splits = ("train", *(split for split in SPLITS[1:] if split not in splits.values()))
        elif alike := _alike(words):
            # Treated as classes, they would train a network that tells train from test.
            uses = Counter(splits[folder] for folder in alike)
            others = sorted(folder for folder in folders if folder not in alike or uses[splits[folder]] > 1)
            shown = others if len(others) <= _MAX_NAMES else [*others[:_MAX_NAMES], "and more"]
            raise DataError(
                f"{self.name} has split folders ({', '.join(sorted(alike))}). There may be one each for train, test,"
                f" gallery (or val) and query, and no other folder; rename, move or remove {', '.join(shown)}."
            )

    def _entry(self, path: str, etag: str = "", size_bytes: int = 0) -> FileEntry | None:
        """The entry of an image by its path in the source; None unless it is in a class folder."""
        parts = [part for part in path.split("/") if part]
        split = self._splits.get(parts[0]) if parts else None
        folders = parts[1:-1] if split else parts[:-1]
        if len(folders) > 1 and split and folders[0] == parts[0]:
            # Archives from Kaggle repeat the split: seg_train/seg_train/sea/0.jpg.
            folders = folders[1:]
        if not folders:
            return None
        self._splits_found.add(split)
        return FileEntry(
            path, etag, self._label(folders[0]), None if split in self.chosen_splits else split, size_bytes
        )

    def _label(self, folder: str) -> str:
        if folder not in self._labels:
            self._labels[folder] = class_name(folder)
            if not self._labels[folder]:
                raise DataError(f"The name of the class folder {folder!a} of {self.name} is blank; rename it.")
        return self._labels[folder]

    def _note_merged_folders(self) -> None:
        spellings: defaultdict[str, list[str]] = defaultdict(list)
        for folder, label in self._labels.items():
            spellings[label].append(folder)
        for folders in spellings.values():
            if len(folders) > 1:
                self._notes["merged_folders"].add(" and ".join(map(spelled, sorted(folders))))

    def _check_splits(self) -> None:
        """Refuse split folders without labeled images next to a train folder with some."""
        for folder, split in self._splits.items():
            if "train" in self._splits_found and split not in self._splits_found:
                raise DataError(
                    f"The folder {folder} of {self.name} contains no image in a class folder; sort its images into"
                    " class folders, or move the folder away to let ingest choose"
                    f" {split} images from {self.train_folder}."
                )


class Folder(_ClassFolders):
    """A directory tree of image files, with the etags of `file_etag`."""

    def __init__(self, directory: Path) -> None:
        with disk_errors(directory):
            super().__init__(directory.resolve().name)
            if not directory.is_dir():
                raise DataError(f"The image directory {directory} does not exist.")
        self._directory = directory
        self._root = os.path.join(directory, "")  # noqa: PTH118 - a Path has no trailing slash

    def entries(self) -> Iterator[FileEntry]:
        """List the image files, class by class."""
        top_folders = _visible_folders(self._directory)
        self._set_layout({folder.name for folder in top_folders})
        parents = [self._directory]
        class_folders = top_folders
        if self._splits:
            parents += top_folders
            class_folders = [folder for split in top_folders for folder in _visible_folders(split)]
        for folder in class_folders:
            yield from self._class_entries(folder)
        self._check_splits()
        self._note_merged_folders()
        for parent in parents:
            self._record_hidden_folders(parent)
            self._note_outside_classes(parent)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        path = self._directory / name
        with disk_errors(path):
            return path.read_bytes()

    def _class_entries(self, folder: Path) -> Iterator[FileEntry]:
        empty = True
        for file in _walk(folder):
            # pathlib would take most of the time of listing a million files.
            name = file.path.removeprefix(self._root)
            if is_skipped(file.name):
                self._note("litter", name)
            elif not _is_image(file.path):
                self._note("not_an_image", name)
            elif entry := self._entry(name):
                _check_utf8(name)
                with disk_errors(file.path):
                    stat = file.stat()
                empty = False
                yield entry._replace(etag=file_etag(stat), size_bytes=stat.st_size)
        if empty:
            self.empty_folders = [*self.empty_folders, folder.relative_to(self._directory).as_posix()]

    def _record_hidden_folders(self, parent: Path) -> None:
        for folder in _folders(parent):
            hidden = folder.name.startswith(".") and not is_litter(folder.name)
            if hidden and any(has_image_suffix(file.name) for file in _walk(folder)):
                name = _printable_name(folder.relative_to(self._directory))
                self.hidden_folders = [*self.hidden_folders, name]

    def _note_outside_classes(self, parent: Path) -> None:
        """Note the litter and the files next to the class folders in ``parent``."""
        with disk_errors(parent), os.scandir(parent) as entries:
            for entry in entries:
                name = entry.path.removeprefix(self._root)
                if is_litter(entry.name) or (entry.name.startswith(".") and entry.is_file()):
                    self._note("litter", name)
                elif entry.is_file():
                    self._note("no_class" if _is_image(entry.path) else "not_an_image", name)

    def _note(self, rule: str, name: str) -> None:
        self._notes[rule].add(_printable_name(name))


class Bucket(_ClassFolders):
    """The image files under a prefix of an S3 bucket. The etag of a file is that of S3."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.removeprefix("s3://"))
        self._store = open_store(uri)

    def entries(self) -> Iterator[FileEntry]:
        """List the image files."""
        self._set_layout({folder for folder in self._store.folders() if not is_litter(folder)})
        hidden: set[str] = set()
        litter: set[str] = set()
        for info in self._store.list(""):
            if skipped := skipped_path(info.key):
                is_folder = skipped != info.key
                if is_folder and self._is_class_folder(skipped) and not is_litter(skipped.rpartition("/")[2]):
                    hidden.update({skipped} if has_image_suffix(info.key) else ())
                elif skipped not in litter:
                    litter.update({skipped} if is_folder else ())
                    self._notes["litter"].add(skipped)
            elif not info.key or info.key.endswith("/"):
                continue  # it marks a folder
            elif not _may_be_image(info.key, info.size_bytes):
                self._notes["not_an_image"].add(info.key)
            elif entry := self._entry(info.key, info.etag, info.size_bytes):
                yield entry
            else:
                self._notes["no_class"].add(info.key)
        self._check_splits()
        self._note_merged_folders()
        self.hidden_folders = sorted(hidden)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self._get(name)

    @cached_property
    def _get(self) -> Callable[[str], bytes]:
        return self._store.reader()

    def _is_class_folder(self, path: str) -> bool:
        parts = path.split("/")
        return len(parts) == 1 or (len(parts) == 2 and parts[0] in self._splits)


def _split_words(folders: set[str]) -> dict[str, str]:
    """The word of `SPLIT_WORDS` in each of ``folders`` that contains exactly one, ignoring case."""
    words = {folder: SPLIT_WORDS.keys() & re.findall("[a-z]+", folder.lower()) for folder in folders}
    return {folder: found.pop() for folder, found in words.items() if len(found) == 1}


def _splits_of(words: dict[str, str]) -> dict[str, Split]:
    """The splits of folders with ``words``; a validation folder is the gallery, or else the test split.

    A dataset with nothing but train and validation reports its results on the latter.
    """
    has_test = any(SPLIT_WORDS[word] == "test" for word in words.values())
    return {
        folder: "test" if word in _VALIDATION and not has_test else SPLIT_WORDS[word] for folder, word in words.items()
    }


def _alike(words: dict[str, str]) -> set[str]:
    """Folders whose names differ only in the split, such as ``seg_train`` and ``seg_test``."""
    patterns = {folder: re.sub(f"(?<![a-z]){word}(?![a-z])", "*", folder.lower()) for folder, word in words.items()}
    counts = Counter(patterns.values())
    return {folder for folder, pattern in patterns.items() if counts[pattern] > 1}


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files below a folder, unsorted: sorting would hold the listing of a whole folder in memory.

    A folder that `is_skipped` is yielded instead of the files in it.
    Dangling links are included: an image must not leave the dataset because a disk is not mounted.
    """
    with disk_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            if is_skipped(entry.name):
                yield entry
            elif entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            elif entry.is_file() or not Path(entry.path).exists():
                yield entry


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"The name of {os.fsencode(name)!r} is not UTF-8; rename it.") from None


def _is_image(path: str) -> bool:
    try:
        return is_image_file(path)
    except StoreError:
        if names_other_kind(path):
            return False
        raise


def _may_be_image(key: str, size_bytes: int) -> bool:
    """Whether an object has to be read to know: a suffix of another kind, or its size, saves the request."""
    return has_image_suffix(key) or (size_bytes >= SIGNATURE_SIZE_BYTES and not names_other_kind(key))


def _printable_name(path: str | Path) -> str:
    """``path`` with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _folders(directory: Path) -> list[Path]:
    with disk_errors(directory):
        return sorted(path for path in directory.iterdir() if path.is_dir())


def _visible_folders(directory: Path) -> list[Path]:
    folders = [folder for folder in _folders(directory) if not is_skipped(folder.name)]
    for folder in folders:
        _check_utf8(folder.name)
    return folders
