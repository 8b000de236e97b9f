"""The interface of image sources. A source provides either encoded image files or decoded
arrays."""

import errno
import json
import math
import os
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from evernear.common.disk import disk_errors
from evernear.common.retry import retry
from evernear.data.manifest import SPLITS, Split
from evernear.data.preprocess import Pixels
from evernear.errors import DataError, MissingObjectError

_MAX_NAMES = 20
_MAX_SHOWN = 60
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRANSIENT = {errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of disks and file servers that another attempt may not have."""
_RETRY_AFTER_S = (0.1, 1.0)
_JSON_KINDS: dict[type, str] = {dict: "object", float: "number"}


class FileEntry(NamedTuple):
    """An image in the listing of a source. ``etag`` changes if the content may have changed."""

    name: str
    etag: str
    label: str
    explicit_split: Split | None
    size_bytes: int
    group: str = ""
    """The group that the source itself specifies (``data.group=column``), or empty."""
    modified_us: int = 0
    """When the source says that it was changed, in microseconds since 1970, or 0."""


def file_etag(stat: os.stat_result) -> str:
    """From size, modification time, change time and inode. ``cp -p``, ``mv`` and ``touch -r``
    preserve the modification time. The device number may change with each mount, so it is left
    out."""
    return f"{stat.st_size}-{stat.st_mtime_ns} {stat.st_ctime_ns}-{stat.st_ino}"


@dataclass
class NameSample:
    """The number of names, and the first ones in sort order."""

    count: int = 0
    names: list[str] = field(default_factory=list[str])

    def add(self, name: str) -> None:
        self.count += 1
        insort(self.names, name)
        del self.names[_MAX_NAMES:]


@dataclass(frozen=True)
class ArrayBlock:
    """Decoded grayscale images of one split, as a uint8 array (N, H, W)."""

    names: list[str]
    labels: list[str]
    explicit_split: Split | None
    images: Pixels


class Source(Protocol):
    """The base class for both kinds of sources. ``name`` is the default name of the dataset. Images
    without an explicit split are assigned to one of the splits in ``chosen_splits``
    (`evernear.data.splits`)."""

    name: str
    chosen_splits: tuple[Split, ...] = SPLITS

    def entries(self) -> Iterator[FileEntry]: ...


class ArraySource(Source, Protocol):
    """For formats in which one file contains many decoded images. Their etags are empty."""

    def blocks(self) -> Iterator[ArrayBlock]:
        """Yield images of one size in a stable order, held-out splits first."""
        ...


@runtime_checkable
class FileSource(Source, Protocol):
    """A source of encoded image files. Once `entries` is exhausted, ``chosen_splits`` is final, and
    ``notes`` maps rules of `evernear.settings.ValidationSettings` to the names of the affected
    files and folders. ``empty_folder`` lists class folders without an image, and ``hidden_folder``
    lists class folders that are ignored because their names begin with a dot."""

    notes: Mapping[str, NameSample] = MappingProxyType({})
    only_images: bool = False
    """Whether every listed file is meant to be an image, regardless of its name and content."""

    def read(self, name: str) -> bytes:
        """This method is called from many threads at the same time.

        Raises:
            MissingObjectError: the file no longer exists.
            StoreError: it cannot be read.
        """
        ...


def read_file(path: Path) -> bytes:
    """As `FileSource.read` does."""

    def may_succeed(error: Exception) -> bool:
        return isinstance(error, OSError) and error.errno in _TRANSIENT

    with disk_errors(path):
        try:
            return retry(path.read_bytes, on=OSError, pauses_s=_RETRY_AFTER_S, when=may_succeed)
        except _GONE:
            raise missing_file(path) from None


def missing_file(path: Path) -> MissingObjectError:
    return MissingObjectError(f"{path} was deleted or moved after it was listed.")


def field_text(value: object, what: str, kind: str = "") -> str:
    """The text of a value that is a label, a split or a group.

    A value is text, text in UTF-8 as bytes, a whole number, or a list of one such value. pandas
    stores the whole numbers of a column with missing values as floating-point numbers, so 3.0
    becomes 3. Booleans become true and false, as in JSON. A missing value (null, NaN or an empty
    list) becomes an empty string.

    Args:
        value: The value in Python.
        what: The field and its place, for messages.
        kind: The type of the field in its file. By default, the type is that of a JSON
            value.
    """
    match value:
        case str() if _is_utf8(value):
            return value
        case None | []:
            return ""
        case [single]:
            return field_text(single, what, kind)
        case bool():
            return json.dumps(value)
        case int():
            return str(value)
        case float() | Decimal() if math.isnan(value):
            return ""
        case float() | Decimal() if value % 1 == 0:
            return str(int(value))
        case bytes():
            try:
                return value.rstrip(b"\0").decode()  # NumPy pads texts of different lengths
            except UnicodeDecodeError:
                pass
        case _:
            pass
    shown = repr(value) if len(repr(value)) <= _MAX_SHOWN else f"{repr(value)[:_MAX_SHOWN]}..."
    kind = kind or _JSON_KINDS.get(type(value), type(value).__name__)
    raise DataError(
        f"{what} contains {shown}, which is neither one text nor a whole number (its type is {kind}); write one text"
        " for each image."
    )


def _is_utf8(text: str) -> bool:
    """Whether text is free of lone surrogates, which JSON allows."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
