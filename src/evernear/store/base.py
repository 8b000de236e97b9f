"""What a store is, and what both kinds of store share: hashes, whole writes, sentences."""

import hashlib
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from evernear.disk import open_regular
from evernear.errors import IntegrityError, StoreError, no_space

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
            Conflict: somebody else wrote first; nothing was changed.
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


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, in flat memory."""
    with disk_errors(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one and nothing between.

    Raises:
        StoreError: disk full, permission denied, ...
    """
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """A new file to write, which replaces ``path`` when the body ends, and is removed if it fails.

    Raises:
        StoreError: disk full, permission denied, ...
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path.parent, path.name) as (file, staged):
            yield file
            sync(file)
            staged.replace(path)


@contextmanager
def disk_errors(place: Path | str) -> Generator[None]:
    """Turn an `OSError` on ``place`` into a `StoreError` of one sentence."""
    try:
        yield
    except OSError as error:
        sentence = no_space(error, place) or f"{place} cannot be read or written: {error.strerror or error}."
        raise StoreError(sentence) from error


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


@contextmanager
def staged_file(directory: Path, name: str) -> Generator[tuple[BinaryIO, Path]]:
    """A new file under a hidden name in ``directory``, removed unless the body renames it."""
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
    staged = Path(temporary)
    try:
        with os.fdopen(handle, "wb") as file:
            staged.chmod(0o644)
            yield file, staged
    finally:
        staged.unlink(missing_ok=True)


def sync(file: BinaryIO) -> None:
    """Bring the content to the disk before the name, so that power loss cannot leave an empty object."""
    file.flush()
    os.fsync(file.fileno())


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
