"""The interface of image sources. A source provides either encoded files or decoded
arrays.
"""

import os
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from evernear.data.manifest import SPLITS, Split
from evernear.data.preprocess import Pixels

_MAX_NAMES = 20


class FileEntry(NamedTuple):
    """One image in the listing of a source.
    ``etag`` changes when the content may have changed.
    """

    name: str
    etag: str
    label: str
    explicit_split: Split | None
    size_bytes: int


def file_etag(stat: os.stat_result) -> str:
    """The etag of a file on disk, from its size, modification time, change time and
    inode.

    ``cp -p``, ``mv`` and ``touch -r`` preserve the modification time, and two files of
    the same size may share a modification time. The device is left out, because its
    number may change with each mount.
    """
    return f"{stat.st_size}-{stat.st_mtime_ns} {stat.st_ctime_ns}-{stat.st_ino}"


def without_change_time(etag: str) -> str:
    """The part of an etag that is unchanged when a file is copied or restored with its
    times, or when its mode or owner changes.

    For an object in a bucket, this part is the whole etag, which cannot contain a space
    (RFC 9110). The same holds for a file in a ledger that predates `file_etag`.
    """
    return etag.partition(" ")[0]


@dataclass
class NameSample:
    """A count of names, and the first names in sort order, so that memory does not grow
    with the listing.
    """

    count: int = 0
    names: list[str] = field(default_factory=list[str])

    def add(self, name: str) -> None:
        """Count ``name``."""
        self.count += 1
        insort(self.names, name)
        del self.names[_MAX_NAMES:]


@dataclass(frozen=True)
class ArrayBlock:
    """A block of decoded grayscale images of one split. ``images`` is uint8 (N, H,
    W).
    """

    names: list[str]
    labels: list[str]
    explicit_split: Split | None
    images: Pixels


class Source(Protocol):
    """Base class of both kinds of sources.

    ``name`` is the dataset's default name. Images without an explicit split are
    assigned to one of ``chosen_splits`` (`evernear.data.splits`).
    """

    name: str
    chosen_splits: tuple[Split, ...] = SPLITS

    def entries(self) -> Iterator[FileEntry]:
        """List the images without reading their pixels."""
        ...

    def group(self, name: str) -> str:
        """The group that the source itself names for an image (``data.group=column``),
        or an empty string. Call this after `entries`.
        """
        return ""


class ArraySource(Source, Protocol):
    """A source of decoded images, for formats that pack many images into one file. The
    images have empty etags.
    """

    def blocks(self) -> Iterator[ArrayBlock]:
        """Yield the images in a stable order, held-out splits first. All images have
        the same size, and no block is empty.
        """
        ...


@runtime_checkable
class FileSource(Source, Protocol):
    """A source of encoded image files.

    Once `entries` is exhausted, ``chosen_splits`` is final, ``empty_folders`` lists the
    class folders without an image, and ``hidden_folders`` lists the class folders that
    are ignored because their names begin with a dot. ``notes`` maps rules of
    `evernear.settings.ValidationSettings` to the files and folders that they report.
    """

    empty_folders: Sequence[str] = ()
    hidden_folders: Sequence[str] = ()
    notes: Mapping[str, NameSample] = MappingProxyType({})
    only_images: bool = False
    """Whether every listed file is meant to be an image, regardless of name and
    content.
    """

    def read(self, name: str) -> bytes:
        """Return the content of a file. This method is called from many threads."""
        ...
