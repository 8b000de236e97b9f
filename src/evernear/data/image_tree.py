"""Find image files at any depth in a folder or a bucket, regardless of class, for batch
prediction."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from evernear.common.disk import missing_directory
from evernear.common.outputs import MarkedFolders, is_output
from evernear.common.store import open_store
from evernear.data.image_file import SIGNATURE_SIZE_BYTES
from evernear.data.sources import FileSource, NameSample, open_source
from evernear.data.sources.names import has_image_suffix, is_image_file, is_skipped, names_other_kind, skipped_path
from evernear.errors import DataError, MissingObjectError, SettingsError, StoreError, TransientStoreError


class ImageFile(NamedTuple):
    name: str
    size_bytes: int


class ImageTree(Protocol):
    """A tree of image files. ``skipped`` is complete when `files` is exhausted."""

    skipped: NameSample

    def files(self) -> Iterator[ImageFile]:
        """List the files in a stable order, without reading them."""
        ...

    def read(self, name: str) -> bytes:
        """Return the content of one file. This method is called from many threads at the same time.

        Raises:
            DataError: the file cannot be read. Any other error means that no file of the tree can
                be read.
        """
        ...


def open_tree(source: str) -> ImageTree:
    """Open ``folder:DIRECTORY``, ``s3://bucket/prefix``, or another source of files."""
    kind, _, location = source.partition(":")
    if kind == "folder" and location:
        return FolderTree(Path(location))
    if kind == "s3":
        return BucketTree(source)
    opened = open_source(source)
    if not isinstance(opened, FileSource):
        raise SettingsError(f"The source {source} has no image files; name folder:DIRECTORY or s3://bucket/prefix.")
    return LabeledTree(opened)


def walk_images(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file below ``folder``, and whether the file is an image according to the rule for
    sources.

    Skipped folders, such as hidden folders and outputs of evernear, are yielded as files that are
    not images. Links are followed unless they form a loop. If a folder or a file cannot be read, it
    counts as an image, so that the error is shown. The listing of only one folder is in memory at a
    time.
    """
    seen: set[tuple[int, int]] = set()
    pending = [folder]
    while pending:
        directory = pending.pop()
        try:
            status = directory.stat()
            entries = sorted(directory.iterdir())
        except OSError:
            yield directory, True
            continue
        if (status.st_dev, status.st_ino) in seen:  # a loop of links
            continue
        seen.add((status.st_dev, status.st_ino))
        folders: list[Path] = []
        for path in entries:
            try:
                if is_skipped(path.name):
                    yield path, False
                elif path.is_dir():
                    if is_output(str(path)):
                        yield path, False
                    else:
                        folders.append(path)
                else:
                    yield path, is_image_file(path) if path.is_file() else path.is_symlink()  # a broken link
            except (StoreError, OSError):
                yield path, True
        pending += reversed(folders)


class FolderTree(ImageTree):
    def __init__(self, directory: Path) -> None:
        self.skipped = NameSample()
        self._directory = directory
        if not directory.is_dir():
            raise missing_directory("image directory", directory)

    def files(self) -> Iterator[ImageFile]:
        for path, is_image in walk_images(self._directory):
            name = str(path.relative_to(self._directory))
            if not is_image:
                self.skipped.add(os.fsencode(name).decode(errors="backslashreplace"))
                continue
            try:
                name.encode()
            except UnicodeEncodeError:
                raise DataError(f"The name of {os.fsencode(name)!r} is not UTF-8; rename it.") from None
            try:
                size_bytes = path.stat().st_size
            except OSError:
                size_bytes = 0
            yield ImageFile(name, size_bytes)

    def read(self, name: str) -> bytes:
        try:
            return (self._directory / name).read_bytes()
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror}.") from None


class BucketTree(ImageTree):
    def __init__(self, uri: str) -> None:
        self.skipped = NameSample()
        self._store = open_store(uri)
        self._get = self._store.reader()

    def files(self) -> Iterator[ImageFile]:
        marked = MarkedFolders()
        for info in self._store.list(""):
            if marked.contain(info.key) or not info.key or info.key.endswith("/"):
                continue  # evernear wrote the object, or it marks a folder
            may_be_image = info.size_bytes >= SIGNATURE_SIZE_BYTES and not names_other_kind(info.key)
            if skipped_path(info.key) or not (has_image_suffix(info.key) or may_be_image):
                self.skipped.add(info.key)
            else:
                yield ImageFile(info.key, info.size_bytes)
        for folder in marked.names:
            self.skipped.add(folder)

    def read(self, name: str) -> bytes:
        return _read_object(self._get, name)


class LabeledTree(ImageTree):
    """The images in a source of labeled files. The labels are not used."""

    def __init__(self, source: FileSource) -> None:
        self.skipped = NameSample()
        self._source = source

    def files(self) -> Iterator[ImageFile]:
        return (ImageFile(entry.name, entry.size_bytes) for entry in self._source.entries())

    def read(self, name: str) -> bytes:
        return _read_object(self._source.read, name)


def _read_object(read: Callable[[str], bytes], name: str) -> bytes:
    try:
        return read(name)
    except MissingObjectError:
        raise DataError(f"{name} was deleted after it was listed.") from None
    except TransientStoreError:
        raise
    except StoreError as error:
        raise DataError(str(error)) from None
