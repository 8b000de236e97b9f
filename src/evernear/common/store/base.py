"""The `Store` protocol, and checks that both store implementations use."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

from evernear.common.disk import disk_errors, staged_file
from evernear.errors import ConflictError, IntegrityError, MissingObjectError, StoreError

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing. ``modified`` is a time according to the store's clock."""

    key: str
    size_bytes: int
    modified: datetime
    read_etag: Callable[[], str] = field(repr=False, compare=False)

    @cached_property
    def etag(self) -> str:
        """The etag of the object.

        A directory store reads the object to compute the etag, and raises `MissingObjectError` if
        the object has been deleted.
        """
        return self.read_etag()


class Store(Protocol):
    """Objects under keys. All methods raise `StoreError` if the store is unreachable or rejects the
    request.

    If a sha256 was recorded when the object was written, reads verify it. A mismatch raises
    `IntegrityError`.
    """

    uri: str

    def put(self, key: str, data: bytes | Path) -> str:
        """Write ``data`` (bytes, or the content of a file) atomically and return the etag."""
        ...

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write only if the object still has ``etag`` or, if ``etag`` is None, does not exist.
        Return the new etag.

        Raises:
            ConflictError: a different writer was first, and this call changed nothing.
        """
        ...

    def get(self, key: str) -> bytes:
        """Read an object. A missing object raises `StoreError`."""
        stored = self.find(key)
        if stored is None:
            raise missing_object(self.uri, key)
        return stored[0]

    def reader(self) -> Callable[[str], bytes]:
        """Return `get`, or an equivalent function that is faster for many small objects."""
        return self.get

    def find(self, key: str) -> tuple[bytes, str] | None:
        """Read an object and its etag. Returns None if the object does not exist."""
        ...

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        """Copy an object to ``path`` atomically.

        Raises:
            MissingObjectError: the object does not exist.
            IntegrityError: the content does not match ``sha256``.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys start with ``prefix``.

        The keys in each folder are sorted. Only one page of keys is in memory at a time.
        """
        ...

    def folders(self) -> Iterator[str]:
        """Yield the first segment of every key that has several segments."""
        return (name.removesuffix("/") for name in self.children("") if name.endswith("/"))

    def children(self, folder: str) -> Iterator[str]:
        """Yield the names in a folder. Names of folders end with a slash. An empty ``folder``
        stands for the top folder."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. Deleting a missing object is not an error."""
        ...


def write_chunks(chunks: Iterator[bytes], path: Path, sha256: str | None, name: str) -> None:
    """Write ``chunks`` to ``path`` atomically.

    Raises:
        IntegrityError: the content does not match ``sha256``.
        StoreError: the disk is full or is not writable.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path.parent, path.name) as (file, staged):
            hasher = hashlib.sha256()
            for chunk in chunks:
                hasher.update(chunk)
                file.write(chunk)
            check_sha256(hasher.hexdigest(), sha256, name)
            file.flush()
            staged.replace(path)


def check_sha256(actual: str, expected: str | None, name: str) -> None:
    """Compare hashes. If ``expected`` is None, any hash is accepted.

    Raises:
        IntegrityError: the hashes differ.
    """
    if expected is not None and actual != expected:
        raise IntegrityError(f"{name} is damaged: its content does not have the sha256 {expected}.")


def check_key(key: str) -> None:
    """Reject an invalid key.

    Raises:
        StoreError: a segment is empty or starts with a dot.
    """
    segments = key.split("/")
    # Leading dots are reserved for internal objects of the store. This check also excludes "." and
    # "..".
    if not all(segments) or any(segment.startswith(".") or "\\" in segment for segment in segments):
        raise StoreError(f"{key!r} is not a valid key: a segment is empty or starts with a dot.")


def conflict(uri: str, key: str) -> ConflictError:
    """The error for a failed compare-and-swap."""
    return ConflictError(f"Another writer changed {uri}/{key} in the meantime; nothing was overwritten, run again.")


def missing_object(uri: str, key: str) -> MissingObjectError:
    """The error for an object that does not exist."""
    return MissingObjectError(f"{key} does not exist in {uri}.")
