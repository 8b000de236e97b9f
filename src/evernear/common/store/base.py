"""The `Store` protocol, and checks that both store implementations use."""

import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

from pydantic import Field

from evernear.common.disk import disk_errors, sha256_bytes, staged_file
from evernear.common.frozen import Document
from evernear.errors import ConflictError, IntegrityError, MissingObjectError

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing. ``modified`` is a time by the store's clock."""

    key: str
    size_bytes: int
    modified: datetime
    read_etag: Callable[[], str] = field(repr=False, compare=False)

    @cached_property
    def etag(self) -> str:
        """A directory store reads the object, and raises `MissingObjectError` if it is gone."""
        return self.read_etag()


class Store(Protocol):
    """Objects under keys. All methods raise `StoreError` if the store fails. Reads verify the
    sha256 that was recorded on writing, if any, and raise `IntegrityError`."""

    uri: str
    identity: str = ""
    """Whose keys sign the requests to S3. Empty: they are anonymous, or the store is a
    directory."""

    def put(self, key: str, data: bytes | Path) -> str:
        """Write bytes or a file's content atomically, and return the etag."""
        ...

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write if the object has ``etag`` or, without one, does not exist. Return the new etag.

        Raises:
            ConflictError: another writer was first, and this call changed nothing.
        """
        ...

    def get(self, key: str) -> bytes:
        stored = self.find(key)
        if stored is None:
            raise missing_object(self.uri, key)
        return stored[0]

    def reader(self) -> Callable[[str], bytes]:
        """`get`, or an equivalent function that is faster for many small objects."""
        return self.get

    def find(self, key: str) -> tuple[bytes, str] | None:
        """An object and its etag, or None."""
        ...

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        """Copy an object to ``path`` atomically.

        Raises:
            IntegrityError: the content does not match ``sha256``.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield objects by prefix, sorted in each folder, with one page of keys in memory."""
        ...

    def folders(self) -> Iterator[str]:
        """Yield the first segment of every key that has several."""
        return (name.removesuffix("/") for name in self.children("") if name.endswith("/"))

    def children(self, folder: str) -> Iterator[str]:
        """Yield the names in a folder (``""``: the top one). Those of folders end with a slash."""
        ...

    def delete(self, key: str) -> None:
        """Deleting a missing object is not an error."""
        ...


def write_chunks(chunks: Iterator[bytes], path: Path, sha256: str | None, name: str) -> None:
    """Write ``chunks`` to ``path`` atomically."""
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
    """Raise `IntegrityError` if the hashes differ. None accepts any."""
    if expected is not None and actual != expected:
        raise IntegrityError(f"{name} is damaged: its content does not have the sha256 {expected}.")


def check_key(key: str) -> None:
    """Reject a key that no object can have: with a segment that is empty or starts with a dot."""
    segments = key.split("/")
    # Leading dots are the store's own. This also excludes "." and "..".
    if not all(segments) or any(name.startswith(".") or "\\" in name or "\0" in name for name in segments):
        raise MissingObjectError(
            f"{key!r} is not a valid key: a segment is empty, starts with a dot, or contains a backslash."
        )


def conflict(uri: str, key: str) -> ConflictError:
    return ConflictError(f"Another writer changed {uri}/{key} in the meantime; nothing was overwritten, run again.")


def missing_object(uri: str, key: str) -> MissingObjectError:
    return MissingObjectError(f"{key} does not exist in {uri}.")


def put_folder(store: Store, folder: str, directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.put(f"{folder}/{path.relative_to(directory).as_posix()}", path)


def fetch_folder(store: Store, folder: str, directory: Path) -> None:
    for info in store.list(f"{folder}/"):
        store.fetch(info.key, directory / info.key.removeprefix(f"{folder}/"))


IDENTITY = "store.json"
_OWNER_DIGITS = 12


class StoreIdentity(Document):
    remedy = "delete it, so that the store gets another one"

    id: str = Field(pattern=r"^[0-9a-f]{32}$")


def owner_of(store: Store) -> str:
    """12 hexadecimal digits for this store at this location. A copied store has the original's id,
    but must not delete what the original needs. A copy cannot be distinguished from a moved store,
    so the digits also depend on the location."""
    stored = store.find(IDENTITY)
    if stored is None:
        with suppress(ConflictError):  # a different process was first
            store.put_if(IDENTITY, StoreIdentity(id=secrets.token_hex(16)).to_json(), None)
        identity = store.get(IDENTITY)
    else:
        identity = stored[0]
    own = StoreIdentity.from_json(identity, f"{store.uri}/{IDENTITY}").id
    return sha256_bytes(f"{own} {store.uri}".encode())[:_OWNER_DIGITS]
