"""Image files in a directory tree or a bucket, stored as ``<class>/<file>`` or
``<split>/<class>/<file>``."""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from evernear.common.disk import disk_errors, missing_directory
from evernear.common.outputs import MARKER, MarkedFolders, is_output
from evernear.common.store import open_store
from evernear.common.text import class_name, require_one_line, spelled
from evernear.data.image_file import SIGNATURE_SIZE_BYTES
from evernear.data.manifest import Split
from evernear.data.sources.base import FileEntry, FileSource, NameSample, file_etag, read_file
from evernear.data.sources.layout import Contents, Layout, NestedFolders, Place, choose_layout, named_like_splits
from evernear.data.sources.names import (
    IMAGE_SUFFIXES,
    has_image_suffix,
    is_image_file,
    is_litter,
    is_skipped,
    names_other_kind,
    skipped_path,
)
from evernear.data.sources.tree import Tree
from evernear.errors import DataError, StoreError
from evernear.settings.data import DataSettings

DEFAULTS = DataSettings()
# Maximum number of folders in a bucket whose contents are read before the listing. For each folder,
# one page is read.
_MAX_FOLDERS_READ = 20
_PAGE_NAMES = 1000
_UNKNOWN_ETAG = "unknown"


def dataset_name(location: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", location.lower()).strip("-")[:63].rstrip("-") or "dataset"


class _Meaning(NamedTuple):
    folder: str | None = None
    skipped: str = ""
    left_out: bool = False
    place: Place | None = None
    """None if the folder is not in a class folder."""
    explicit_split: Split | None = None


class _ClassFolders(FileSource):
    def __init__(self, name: str, settings: DataSettings) -> None:
        self.name = dataset_name(name)
        self.layout = Layout()
        """Known once `entries` has begun."""
        self._settings = settings
        self._split_folders_used: set[str] = set()
        self._nested = NestedFolders()
        self._notes_nested = not settings.layout and settings.group not in ("folder", "stem")
        self._meaning = _Meaning()
        self._labels: dict[str, str] = {}
        self._notes: defaultdict[str, NameSample] = defaultdict(NameSample)
        self.notes = self._notes

    def _read_contents(self, folders: Iterable[str], read: Callable[[str], Contents]) -> dict[str, Contents]:
        """If seg_train contains only seg_train/seg_train, the inner one is read."""
        contents = {folder: read(folder) for folder in folders}
        repeated = [folder for folder, inner in contents.items() if inner == Contents(frozenset({folder}))]
        return contents | {folder: read(f"{folder}/{folder}") for folder in repeated}

    def _set_layout(self, folders: Mapping[str, Contents]) -> None:
        self.layout = choose_layout(self.name, folders, self._settings)
        self._meaning = _Meaning()
        self.chosen_splits = self.layout.chosen_splits

    def _entry(self, path: str, etag: str = "", size_bytes: int = 0, modified_us: int = 0) -> FileEntry | None:
        meaning = self._meaning_of(path.rpartition("/")[0])
        if meaning.place is None:
            return None
        label = self._label(meaning.place.class_folder)
        self._split_folders_used.add(meaning.place.split_folder)
        if self._notes_nested:
            self._nested.add(label, meaning.place)
        return FileEntry(path, etag, label, meaning.explicit_split, size_bytes, "", modified_us)

    def _meaning_of(self, folder: str) -> _Meaning:
        """The last one is remembered, because most files follow one of their folder."""
        if folder != self._meaning.folder:
            parts = folder.split("/")
            place = self.layout.place([part for part in parts if part])
            self._meaning = _Meaning(
                folder,
                skipped_path(folder),
                self.layout.leaves_out(parts),
                place,
                None if place is None or place.split in self.chosen_splits else place.split,
            )
        return self._meaning

    def _check_and_note_folders(self) -> None:
        self.layout.require_used(self.name, self._split_folders_used, self._settings)
        self._note_merged_folders()
        for name in self._nested.names():
            self._notes["nested_folder"].add(name)

    def _label(self, folder: str) -> str:
        if folder not in self._labels:
            self._labels[folder] = class_name(folder)
            if not self._labels[folder]:
                raise DataError(f"The name of the class folder {folder!a} of {self.name} is blank; rename it.")
            require_one_line(self._labels[folder], f"The name of a class folder of {self.name}")
        return self._labels[folder]

    def _note_merged_folders(self) -> None:
        spellings: defaultdict[str, list[str]] = defaultdict(list)
        for folder, label in self._labels.items():
            spellings[label].append(folder)
        for folders in spellings.values():
            if len(folders) > 1:
                self._notes["merged_folders"].add(" and ".join(map(spelled, sorted(folders))))


class Folder(_ClassFolders):
    """Image files in a directory tree. The etags of the files are computed by `file_etag`."""

    def __init__(self, directory: Path, settings: DataSettings = DEFAULTS) -> None:
        with disk_errors(directory):
            super().__init__(directory.resolve().name, settings)
            if not directory.is_dir():
                raise missing_directory("image directory", directory)
        self._directory = directory
        # Paths are strings, because pathlib would use most of the time that it takes to list a
        # million files.
        self._root = os.path.join(directory, "")  # noqa: PTH118 - a Path has no trailing slash

    def entries(self) -> Iterator[FileEntry]:
        tree = Tree(self._directory)
        parents = [str(self._directory)]
        folders = _folders(tree, parents[0])
        contents = self._read_contents(map(self._name, folders), lambda name: _contents(tree, self._root + name))
        tree.require_no_broken_link()
        self._set_layout(contents)
        folders = [folder for folder in folders if self._name(folder) not in self.layout.left_out]
        if self.layout.top_splits:
            parents += folders
            folders = [each for split in folders for each in _folders(tree, split) if self._group(each)]
        for folder in folders:
            yield from self._class_entries(tree, folder)
        tree.require_no_broken_link()
        for name, target in tree.outside.items():
            self._notes["outside_link"].add(f"{name} -> {target}")
        for name in tree.outputs:
            self._notes["litter"].add(name)
        for parent in parents:
            self._record_hidden_folders(parent)
            self._note_outside_classes(parent)
        self._check_and_note_folders()

    def read(self, name: str) -> bytes:
        return read_file(self._directory / name)

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root)

    def _group(self, folder: str) -> tuple[str, Split | None] | None:
        """Class and split of images that are directly in a folder, or None if left out."""
        place = self.layout.place(self._name(folder).split("/"))
        return place and (place.class_folder, place.split)

    def _class_entries(self, tree: Tree, folder: str) -> Iterator[FileEntry]:
        empty = True
        for file in tree.files(folder, self._group):
            name = self._name(file.path)
            if is_skipped(file.name):
                self._note("litter", name)
            elif not _is_image(file.path):
                self._note("not_an_image", name)
            elif entry := self._entry(name):
                _check_utf8(name)
                try:
                    stat = file.stat()
                except FileNotFoundError:  # deleted since the folder was read
                    continue
                except OSError:  # the file is left out and named when it is read
                    entry = entry._replace(etag=_UNKNOWN_ETAG)
                else:
                    entry = entry._replace(
                        etag=file_etag(stat), size_bytes=stat.st_size, modified_us=stat.st_mtime_ns // 1000
                    )
                empty = False
                yield entry
        if empty:
            self._note("empty_folder", self._name(folder))

    def _record_hidden_folders(self, parent: str) -> None:
        """Record class folders that contain images and whose names begin with a dot."""
        with disk_errors(parent), os.scandir(parent) as entries:
            hidden = sorted(e.path for e in entries if e.name.startswith(".") and not is_litter(e.name))
        for folder in hidden:
            if is_output(folder):
                self._note("litter", self._name(folder))
            elif any(has_image_suffix(name) for *_, names in os.walk(folder) for name in names):
                self._note("hidden_folder", self._name(folder))

    def _note_outside_classes(self, parent: str) -> None:
        """Note litter in ``parent``, and files that are next to the class folders."""
        with disk_errors(parent), os.scandir(parent) as entries:
            for entry in entries:
                name = self._name(entry.path)
                if entry.name == MARKER:
                    continue
                if is_litter(entry.name) or (entry.name.startswith(".") and entry.is_file()):
                    self._note("litter", name)
                elif entry.is_file():
                    self._note("no_class" if _is_image(entry.path) else "not_an_image", name)

    def _note(self, rule: str, name: str) -> None:
        self._notes[rule].add(_printable_name(name))


class Bucket(_ClassFolders):
    """Image files under a prefix in an S3 bucket. The etag of a file is the ETag from S3."""

    def __init__(self, uri: str, settings: DataSettings = DEFAULTS) -> None:
        super().__init__(uri.removeprefix("s3://"), settings)
        self._store = open_store(uri)

    def entries(self) -> Iterator[FileEntry]:
        folders = [folder for folder in self._store.folders() if not is_skipped(folder)]
        read = {*named_like_splits(folders), *folders[:: len(folders) // _MAX_FOLDERS_READ + 1]}
        contents = dict.fromkeys(folders, Contents()) | self._read_contents(read, self._contents)
        self._set_layout({folder: inner for folder, inner in contents.items() if not inner.is_output})
        hidden: set[str] = set()
        litter: set[str] = set()
        marked = MarkedFolders()
        for info in self._store.list(""):
            if marked.contain(info.key):
                continue
            folder, _, file = info.key.rpartition("/")
            meaning = self._meaning_of(folder)
            if skipped := meaning.skipped or (info.key if is_skipped(file) else ""):
                is_folder = skipped != info.key
                if is_folder and self._is_class_folder(skipped) and not is_litter(skipped.rpartition("/")[2]):
                    hidden.update({skipped} if has_image_suffix(info.key) else ())
                elif skipped not in litter:
                    litter.update({skipped} if is_folder else ())
                    self._notes["litter"].add(skipped)
            elif not file or meaning.left_out:
                continue  # the object marks a folder, or the settings leave it out
            elif not _may_be_image(info.key, info.size_bytes):
                self._notes["not_an_image"].add(info.key)
            elif entry := self._entry(
                info.key, info.read_etag(), info.size_bytes, int(info.modified.timestamp() * 1e6)
            ):
                yield entry
            else:
                self._notes["no_class"].add(info.key)
        for folder in marked.names:
            self._notes["litter"].add(folder)
        self._check_and_note_folders()
        for folder in hidden:
            self._notes["hidden_folder"].add(folder)

    def read(self, name: str) -> bytes:
        return self._get(name)

    @cached_property
    def _get(self) -> Callable[[str], bytes]:
        return self._store.reader()

    def _contents(self, folder: str) -> Contents:
        """The contents of a folder, as far as a single request shows them."""
        page = list(islice(self._store.children(folder), _PAGE_NAMES))
        names = [name for name in page if not is_skipped(name.rstrip("/"))]
        folders = frozenset(name.removesuffix("/") for name in names if name.endswith("/"))
        return Contents(folders, any(map(has_image_suffix, names)), MARKER in page)

    def _is_class_folder(self, path: str) -> bool:
        parts = path.split("/")
        return len(parts) == 1 or (len(parts) == 2 and parts[0] in self.layout.top_splits)


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"The name of {os.fsencode(name)!r} is not UTF-8; rename it.") from None


def _is_image(path: str) -> bool:
    try:
        return is_image_file(path)
    except StoreError:  # the file is left out and named when it is read
        return not names_other_kind(path)


def _may_be_image(key: str, size_bytes: int) -> bool:
    """False if the suffix belongs to another type, or the object is too small."""
    # Equivalent to `has_image_suffix`, because the file name does not begin with a dot, and five
    # times as fast.
    suffix = key[key.rfind(".") :]
    return suffix.lower() in IMAGE_SUFFIXES or (size_bytes >= SIGNATURE_SIZE_BYTES and not names_other_kind(key))


def _printable_name(path: str | Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _folders(tree: Tree, parent: str) -> list[str]:
    folders = tree.folders(parent)
    for folder in folders:
        _check_utf8(posixpath.basename(folder))
    return folders


def _contents(tree: Tree, folder: str) -> Contents:
    folders: set[str] = set()
    has_images = False
    for entry, kind in tree.scan(folder):
        if kind == "folder":
            folders.add(entry.name)
        has_images = has_images or (kind == "file" and has_image_suffix(entry.name))
    return Contents(frozenset(folders), has_images)
