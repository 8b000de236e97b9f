"""What a store is, and what both kinds of store share: hashes, whole writes, sentences."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evernear.disk import disk_errors, staged_file
from evernear.errors import IntegrityError, StoreError

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says of one object."""

    key: str
    size_bytes: int
    etag: str


class Store(Protocol):
    """Objects under keys. All methods raise `StoreError` where the store cannot be reached or refuses.

    Whatever is read is checked against the sha256 that was kept when it was written, as far as one was kept;
    content that does not match is an `IntegrityError`.
    """

    uri: str

    def put(self, key: str, data: bytes | Path) -> str:
        """Write ``data`` (bytes, or the content of a file) whole, and return its etag."""
        ...

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write only if the object still has ``etag`` (None: only if there is none), and return the new etag.

        Raises:
            ConflictError: somebody else wrote first; nothing was changed.
        """
        ...

    def get(self, key: str) -> bytes:
        """The object; an absent one is a `StoreError`."""
        ...

    def find(self, key: str) -> tuple[bytes, str] | None:
        """The object and its etag, or None where there is none."""
        ...

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        """Copy the object to ``path``, whole or not at all.

        Raises:
            IntegrityError: the content's sha256 is not ``sha256``.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, each folder by name, one page in memory at a time."""
        ...

    def folders(self) -> Iterator[str]:
        """The first words of all keys that have more than one."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        ...


def receive(chunks: Iterator[bytes], path: Path, sha256: str | None, name: str) -> None:
    """Write ``chunks`` to ``path``, whole or not at all.

    Raises:
        IntegrityError: their sha256 is not ``sha256``.
        StoreError: the disk is full, ...
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path.parent, path.name) as (file, staged):
            received = hashlib.sha256()
            for chunk in chunks:
                received.update(chunk)
                file.write(chunk)
            check_sha256(received.hexdigest(), sha256, name)
            file.flush()
            staged.replace(path)


def check_sha256(found: str, expected: str | None, name: str) -> None:
    """Refuse content whose sha256 is not the expected one; None expects nothing.

    Raises:
        IntegrityError: it is not.
    """
    if expected is not None and found != expected:
        raise IntegrityError(f"{name} is damaged: its content does not have the sha256 {expected}.")


def check_key(key: str) -> None:
    """Refuse a key that cannot be written.

    Raises:
        StoreError: it has an empty word, or one that starts with a dot.
    """
    words = key.split("/")
    # A leading dot is kept for the store's own objects, and shuts out "." and ".." with them.
    if not all(words) or any(word.startswith(".") or "\\" in word for word in words):
        raise StoreError(f"{key!r} is no key of a store: it has an empty word or one that starts with a dot.")


def lost(uri: str, key: str) -> str:
    """The sentence of a lost compare-and-swap."""
    return f"Somebody else changed {uri}/{key} meanwhile; nothing was overwritten, run again."


def missing(uri: str, key: str) -> str:
    """The sentence of an absent object."""
    return f"There is no {key} in {uri}."


def present(uri: str, key: str, found: tuple[bytes, str] | None) -> bytes:
    """The content of what was found.

    Raises:
        StoreError: nothing was.
    """
    if found is None:
        raise StoreError(missing(uri, key))
    return found[0]
