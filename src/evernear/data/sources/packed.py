"""Packed files, such as tar and Parquet files, each of which contains many encoded images. Packed
files are the second form of a file source.

Packed files are listed and read sequentially, one file at a time. The names in one file, and one
image, are in memory at a time. If a file is in a bucket, it is first copied to the temporary
directory. An image is named ``<file>/<member>``. The etag of an image is the etag of its packed
file, so an unchanged file is neither listed nor read again.
"""

import os
import posixpath
import re
import tempfile
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from evernear.common.disk import disk_errors, missing_directory
from evernear.common.output import named, quantity
from evernear.common.outputs import MARKER, MarkedFolders, is_output
from evernear.common.store import open_store
from evernear.common.text import class_name, require_one_line
from evernear.data.manifest import Split
from evernear.data.sources.base import FileEntry, FileSource, NameSample, file_etag, missing_file
from evernear.data.sources.folder import dataset_name
from evernear.data.sources.layout import SPLIT_WORDS, NamedSplit, NamedSplits, split_option
from evernear.data.sources.names import skipped_path
from evernear.errors import DataError
from evernear.settings.data import DataSettings

_WITH_NOTES = " notes"
_OF_EXPORT = (MARKER, ".staging/")
# A file of several, as `datasets` names them. Earlier versions appended a hash.
_OF_SEVERAL = re.compile(r"(.*)-(\d+)-of-(\d+)(?:-[0-9a-f]{16})?(\.[a-z.]+)", re.IGNORECASE)
_METADATA = frozenset(
    {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
    | {".gitattributes", ".gitignore", "LICENSE", "README.md"}
)


class Member(NamedTuple):
    """An image in a packed file. Size 0 is unknown, and an empty group is none."""

    name: str
    label: str
    size_bytes: int = 0
    group: str = ""


class PackedFile(NamedTuple):
    name: str
    etag: str
    split: NamedSplit
    word: str


class PackedFiles(FileSource):
    """Packed files below a directory or below a prefix in a bucket. Subclasses implement the file
    formats. The name of a file, or the name of a folder above it, may indicate the split of the
    file's images, as in ``train-00000.tar``."""

    only_images = True
    suffixes: tuple[str, ...]
    kind: str

    def __init__(self, location: str, settings: DataSettings) -> None:
        self._location, self._settings = location, settings
        self._store = open_store(location) if location.startswith("s3://") else None
        if self._store is None and not Path(location).is_dir():
            raise self._one_file() or missing_directory("directory", Path(location))
        self.name = dataset_name(location.removeprefix("s3://") if self._store else Path(location).resolve().name)
        self._notes: defaultdict[str, NameSample] = defaultdict(NameSample)
        self.notes = self._notes
        self.remembered: Callable[[str, str], Iterable[FileEntry]] = lambda file, etag: ()
        """The images of an unchanged file, as they were listed before."""
        self._advice = ""

    def entries(self) -> Iterator[FileEntry]:
        self._notes.clear()
        self._advice = ""
        files, splits = self._files()
        self.chosen_splits = splits.chosen_splits
        labeled, unlabeled = Counter[str](), Counter[str]()
        for file in files:
            explicit = splits.explicit(file.split)
            known = self.remembered(file.name, file.etag)
            entries = [entry._replace(explicit_split=explicit) for entry in known]
            if not entries:
                entries, count = self._listed(file, explicit)
                unlabeled[file.word] += count
            labeled[file.word] += len(entries)
            yield from entries
        if not labeled.total():
            raise DataError(f"{self._location} contains no image with a label in {self.kind}.{self._advice}")
        self._require_labels({word: count for word, count in unlabeled.items() if count and not labeled[word]})

    def read(self, name: str) -> bytes:
        """Read one image. For many, `read_in_order` reads each file only once."""
        entry = FileEntry(name, "", "", None, 0)
        return next(self.read_in_order([entry]))[1]

    def read_in_order(self, entries: Iterable[FileEntry]) -> Iterator[tuple[FileEntry, bytes]]:
        """Yield contents. Images of a file are consecutive, and it is read once."""
        for file, group in groupby(entries, key=lambda entry: self.file_of(entry.name)):
            wanted = {entry.name.removeprefix(f"{file}/"): entry for entry in group}
            with self._opened(file) as path:
                for member, data in self._images(path, file, wanted):
                    yield wanted.pop(member), data
            if wanted:
                raise DataError(f"{file} no longer contains {min(wanted)}, which was listed; run again.")

    def _require_labels(self, hidden: Mapping[str, int]) -> None:
        """Reject splits without a label: ``hidden`` counts images by split word."""
        if not hidden:
            return
        counts = [f"{quantity(count, 'image')} of {word}" for word, count in hidden.items()]
        remedy = "add them"
        if not {"train", "training"} & hidden.keys():
            options = " ".join(split_option(word, "none") for word in hidden)
            remedy += f" or, to leave these images out and let ingest choose others, add {options}"
        raise DataError(
            f"{' and '.join(counts)} in {self._location} have no label, and no other image of the same split has one;"
            f" {remedy}."
        )

    def _strays(self, names: Sequence[str]) -> set[str]:
        """Files among ``names`` that do not belong to the dataset despite their suffix."""
        return set()

    def _small_file(self, file: str) -> bytes:
        with self._opened(file) as path, disk_errors(path):
            return path.read_bytes()

    @abstractmethod
    def _members(self, path: Path, file: str) -> Iterator[Member]:
        """Yield the images in a file, whose name in messages is ``file``."""

    @abstractmethod
    def _images(self, path: Path, file: str, wanted: Mapping[str, FileEntry]) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each of the ``wanted`` members, in the order of the
        file."""

    def _listed(self, file: PackedFile, explicit: Split | None) -> tuple[list[FileEntry], int]:
        """Read a file's list of images, and the number of images without a label."""
        entries: dict[str, FileEntry] = {}
        noted = sum(note.count for note in self._notes.values())
        with self._opened(file.name) as path:
            for member in self._members(path, file.name):
                name = f"{file.name}/{member.name}"
                if name in entries:
                    raise DataError(f"{file.name} contains two images called {member.name}; rename one of them.")
                label = require_one_line(class_name(member.label), f"The label of {member.name} in {file.name}")
                entries[name] = FileEntry(name, file.etag, label, explicit, member.size_bytes, member.group)
        no_label = {""}
        if file.split not in ("", "train") and {entry.label for entry in entries.values()} <= {"", "-1"}:
            no_label.add("-1")  # the labels of a test split are hidden, and no feature names the classes
        unlabeled = [entry.name for entry in entries.values() if entry.label in no_label]
        for name in unlabeled:
            self._notes["no_label"].add(name)
        # A file with notes is listed again every time, because only the file itself shows which
        # images are left out.
        has_notes = noted != sum(note.count for note in self._notes.values())
        etag = file.etag + _WITH_NOTES if has_notes else file.etag
        labeled = [entry._replace(etag=etag) for entry in entries.values() if entry.label not in no_label]
        return labeled, len(unlabeled)

    def _files(self) -> tuple[list[PackedFile], NamedSplits]:
        splits = NamedSplits(self._location, self._settings)
        etags = {name: etag for name, etag in self._all_files() if not name.startswith(_OF_EXPORT)}
        strays, litter = self._strays([*etags]), set[str]()
        files: list[PackedFile] = []
        for name, etag in etags.items():
            if posixpath.basename(name) in _METADATA:
                continue
            if skipped := skipped_path(name):
                litter.add(skipped)
            elif not name.lower().endswith(self.suffixes):
                self._notes["not_an_image"].add(name)
            elif name in strays:
                litter.add(name)
            else:
                word = split_word(name, self._settings.split_folders)
                split = splits.add(word, f"the name of the file {name}")
                if split != "none":
                    files.append(PackedFile(name, etag, split, word))
        for name in litter:
            self._notes["litter"].add(name)
        unnamed = [file.name for file in files if not file.split]
        if unnamed and len(unnamed) < len(files):
            parts = unnamed[0].split("/")
            is_shared = len(parts) == 1 or any(parts[-2] in file.name.split("/") for file in files if file.split)
            option = split_option(_stem(parts[-1]) if is_shared else parts[-2], "test")
            raise DataError(
                f"Some files of {self._location} name a split, and others do not: {named(unnamed)};"
                f" put train, test, validation, gallery or query into each name, or into none, or give the"
                f" others a split (or none to leave them out), as in {option}."
            )
        if not files:
            raise self._no_files(litter)
        self._require_complete([file.name for file in files])
        splits.finish()
        return sorted(files), splits

    def _one_file(self) -> DataError | None:
        """The error for the location of one of the files instead of their directory."""
        folder, _, file = self._location.rpartition("/")
        if not file.lower().endswith(self.suffixes):
            return None
        return DataError(f"{self._location} is not a directory; name the one that contains the file, {folder}.")

    def _no_files(self, litter: Collection[str] = ()) -> DataError:
        if error := self._one_file():
            return error
        others = self._notes["not_an_image"]
        but = f", except {named(sorted(litter))}, which belong to no dataset" if litter else ""
        has = f" It has {named(others.names, others.count)}." if others.count else ""
        return DataError(f"{self._location} contains no {self.kind} ({', '.join(self.suffixes)}){but}.{has}")

    def _require_complete(self, names: Sequence[str]) -> None:
        """Reject ``train-00000-of-00003`` without the others, whose images would be missing."""
        numbers: defaultdict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
        for name in names:
            if counted := _OF_SEVERAL.fullmatch(name):
                start, number, total, end = counted.groups()
                numbers[start, total, end][int(number)] = name
        for (start, total, end), own in numbers.items():
            if len(own) < int(total):
                first = 0 if 0 in own or int(total) not in own else 1  # some tools count from 1
                missing = next(number for number in range(first, int(total) + first) if number not in own)
                raise DataError(
                    f"{self._location} contains {len(own):,} of the {int(total):,} files of {start}-*-of-{total}{end},"
                    f" and {start}-{missing:0{len(total)}}-of-{total}{end} is missing; copy the whole dataset, or take"
                    f" -of-{total} out of the names to use only these files."
                )

    def _all_files(self) -> Iterator[tuple[str, str]]:
        if self._store is not None:
            marked = MarkedFolders()
            for info in self._store.list(""):
                if not marked.contain(info.key) and not info.key.endswith("/"):
                    yield info.key, info.etag
            for folder in marked.names:
                self._notes["litter"].add(folder)
            return
        with disk_errors(self._location):
            for folder, subfolders, names in os.walk(self._location):
                for name in [each for each in subfolders if is_output(f"{folder}/{each}")]:
                    subfolders.remove(name)
                    self._notes["litter"].add(Path(folder, name).relative_to(self._location).as_posix())
                for name in names:
                    path = Path(folder, name)
                    relative = path.relative_to(self._location).as_posix()
                    try:
                        relative.encode()
                    except UnicodeEncodeError:
                        raise DataError(f"The name of {os.fsencode(relative)!r} is not UTF-8; rename it.") from None
                    try:
                        yield relative, file_etag(path.stat())
                    except FileNotFoundError:  # deleted since the folder was read
                        if path.is_symlink():
                            raise

    @contextmanager
    def _opened(self, file: str) -> Generator[Path]:
        """Provide a local copy of a file in a bucket, or the file itself if it is on disk."""
        if self._store is None:
            path = Path(self._location, file)
            if not path.exists():
                raise missing_file(path)
            with disk_errors(path):
                path.stat()
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="evernear-packed-") as scratch:
            yield self._store.fetch(file, Path(scratch, "file"))

    def file_of(self, name: str) -> str:
        """The file of an image: the shortest prefix of its name with a right suffix."""
        pattern = "|".join(map(re.escape, self.suffixes))
        match = re.match(rf"(?i)(.*?(?:{pattern}))/", name)
        if match is None:
            raise DataError(f"{name} is in no file of {self._location}.")
        return match[1]


def split_word(name: str, folders: Collection[str] = ()) -> str:
    """A name in the path that is one of ``folders``, and otherwise the split word in the deepest
    name that has one. Empty if there is none."""
    parts = name.split("/")
    if named := [part for part in (*parts[:-1], _stem(parts[-1])) if part in folders]:
        return named[0]
    position = split_position(parts)
    return "" if position is None else _words(parts[position]).pop()


def _stem(file: str) -> str:
    return re.sub(r"([-_.]?\d+(-of-\d+)?)?(\.[a-z]+)+$", "", file.lower())


def split_position(parts: Sequence[str]) -> int | None:
    """The last of ``parts`` with exactly one split word."""
    return next((place for place in reversed(range(len(parts))) if len(_words(parts[place])) == 1), None)


def _words(part: str) -> set[str]:
    return SPLIT_WORDS.keys() & re.findall("[a-z]+", part.lower())
