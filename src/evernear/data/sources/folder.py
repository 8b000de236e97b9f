"""Trees of image files, in a directory or a bucket: ``<class>/<file>`` or ``<split>/<class>/<file>``."""

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

from evernear.data.manifest import SPLITS, Split, as_split
from evernear.data.sources.base import FileEntry, FileSource
from evernear.disk import disk_errors
from evernear.errors import DataError
from evernear.store import open_store

# Files with these suffixes, or with none, count as images; the content decides whether they are PNG, JPEG or WebP.
_IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".heic", ".avif"}
)
_VALIDATION = frozenset({"val", "valid", "validation", "dev"})
_MAX_NAMES = 5


class _ClassFolders(FileSource):
    """Reads label and split from the path of a file."""

    def __init__(self, name: str) -> None:
        self.name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].rstrip("-") or "dataset"
        self._splits: dict[str, Split] = {}

    def _set_layout(self, folders: set[str]) -> None:
        """Decide from the top-level folders whether they are splits, and which splits ingest assigns."""
        splits = _splits_of(folders)
        if folders and len(set(splits.values())) == len(folders):
            if "train" not in splits.values():
                raise DataError(f"{self.name} has split folders ({', '.join(sorted(folders))}) but no train folder.")
            self._splits = splits
            self.chosen_splits = ("train", *(split for split in SPLITS[1:] if split not in splits.values()))
        elif len(splits) > 1:
            # Treated as classes, they would train a network that tells train from test.
            others = sorted(folders.difference(SPLITS))
            shown = others if len(others) <= _MAX_NAMES else [*others[:_MAX_NAMES], "and more"]
            raise DataError(
                f"{self.name} has folders {', '.join(sorted(splits))}, as if splits were given, which takes train,"
                " test, gallery (or val) and query and nothing else; rename, move or remove"
                f" {', '.join(shown)}."
            )

    def _entry(self, path: str, etag: str = "", size_bytes: int = 0) -> FileEntry | None:
        """The entry of a file by its path in the source; None unless it is an image in a class folder."""
        parts = [part for part in path.split("/") if part]
        split = self._splits.get(parts[0]) if parts else None
        folders = parts[1:-1] if split else parts[:-1]
        if not folders or "/." in f"/{path}" or not _may_be_image(path):
            return None
        return FileEntry(path, etag, folders[0], None if split in self.chosen_splits else split, size_bytes)


class Folder(_ClassFolders):
    """A directory tree of image files. The etag of a file is its size and modification time."""

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
        for parent in parents:
            self._record_hidden_folders(parent)

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
            if entry := self._entry(name):
                _check_utf8(name)
                with disk_errors(file.path):
                    stat = file.stat()
                empty = False
                yield entry._replace(etag=f"{stat.st_size}-{stat.st_mtime_ns}", size_bytes=stat.st_size)
        if empty:
            self.empty_folders = [*self.empty_folders, folder.relative_to(self._directory).as_posix()]

    def _record_hidden_folders(self, parent: Path) -> None:
        for folder in _folders(parent):
            if folder.name.startswith(".") and any(_is_image_name(file.name) for file in _walk(folder)):
                # The name need not be UTF-8.
                name = os.fsencode(folder.relative_to(self._directory)).decode(errors="backslashreplace")
                self.hidden_folders = [*self.hidden_folders, name]


class Bucket(_ClassFolders):
    """The image files under a prefix of an S3 bucket. The etag of a file is that of S3."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.removeprefix("s3://"))
        self._store = open_store(uri)

    def entries(self) -> Iterator[FileEntry]:
        """List the image files."""
        self._set_layout(set(self._store.folders()))
        hidden: set[str] = set()
        for info in self._store.list(""):
            if entry := self._entry(info.key, info.etag, info.size_bytes):
                yield entry
            elif _is_image_name(info.key):
                hidden.update(self._hidden_folder(PurePosixPath(info.key).parts))
        self.hidden_folders = sorted(hidden)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self._get(name)

    @cached_property
    def _get(self) -> Callable[[str], bytes]:
        return self._store.reader()

    def _hidden_folder(self, parts: tuple[str, ...]) -> Iterator[str]:
        """The class folder of a key if its name begins with a dot."""
        for depth in (1, 2) if self._splits else (1,):
            if len(parts) > depth and parts[depth - 1].startswith("."):
                yield "/".join(parts[:depth])
                return


def _splits_of(folders: set[str]) -> dict[str, Split]:
    """The splits that ``folders`` name, ignoring case; a validation folder is the gallery, or else the test split.

    Training is validated on the gallery. A dataset with nothing but train and validation reports its results on the
    latter.
    """
    names = {folder: folder.lower() for folder in folders}
    validation: Split = "gallery" if "test" in names.values() else "test"
    splits: dict[str, Split] = {}
    for folder, name in names.items():
        if split := validation if name in _VALIDATION else as_split(name):
            splits[folder] = split
    return splits


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files below a folder, unsorted: sorting would hold the listing of a whole folder in memory.

    Dangling links are included: an image must not leave the dataset because a disk is not mounted.
    """
    with disk_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            elif entry.is_file() or not Path(entry.path).exists():
                yield entry


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"The name of {os.fsencode(name)!r} is not UTF-8; rename it.") from None


def _is_image_name(name: str) -> bool:
    return _suffix(name) in _IMAGE_SUFFIXES


def _may_be_image(name: str) -> bool:
    suffix = _suffix(name)
    # A key that ends in a slash marks a folder of a bucket.
    return suffix in _IMAGE_SUFFIXES or not (suffix or name.endswith("/"))


def _suffix(name: str) -> str:
    """The suffix in lower case. pathlib is ten times slower, which matters for millions of names."""
    return posixpath.splitext(name)[1].rstrip(".").lower()


def _folders(directory: Path) -> list[Path]:
    with disk_errors(directory):
        return sorted(path for path in directory.iterdir() if path.is_dir())


def _visible_folders(directory: Path) -> list[Path]:
    folders = [folder for folder in _folders(directory) if not folder.name.startswith(".")]
    for folder in folders:
        _check_utf8(folder.name)
    return folders
