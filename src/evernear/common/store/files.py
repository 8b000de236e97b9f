import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from evernear.common.disk import disk_errors, file_lock, open_regular, sha256_bytes, sha256_file, staged_file, sync
from evernear.common.store.base import CHUNK_BYTES, ObjectInfo, Store, check_key, conflict, missing_object, write_chunks

_STALE_AFTER_S = 24 * 3600


class FileStore(Store):
    """A store in a directory. An etag is the sha256 of the content."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()
        self._staging = root / ".staging"

    def path(self, key: str) -> Path:
        """The path of an object, which may be read in place."""
        check_key(key)
        return self.root.joinpath(*key.split("/"))

    def put(self, key: str, data: bytes | Path) -> str:
        return self._write(key, data, lambda _: None)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        def check(path: Path) -> None:
            current = sha256_file(path) if path.exists() else None
            if current != etag:
                raise conflict(self.uri, key)

        return self._write(key, data, check)

    def find(self, key: str) -> tuple[bytes, str] | None:
        path = self.path(key)
        with disk_errors(path):
            try:
                with open_regular(path) as file:
                    data = file.read()
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:  # no object can have this name
                    return None
                raise
        return data, sha256_bytes(data)

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        with disk_errors(self.path(key)):
            try:
                source = open_regular(self.path(key))
            except FileNotFoundError:
                raise missing_object(self.uri, key) from None
        with source:
            write_chunks(iter(lambda: source.read(CHUNK_BYTES), b""), path, sha256, f"{self.uri}/{key}")
        return path

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with disk_errors(self.root):
            yield from self._walk(self.root, "", prefix)

    def children(self, folder: str) -> Iterator[str]:
        directory = self.path(folder) if folder else self.root
        with disk_errors(directory):
            if directory.is_dir():
                yield from (p.name + "/" * p.is_dir() for p in directory.iterdir() if p.name[0] != ".")

    def delete(self, key: str) -> None:
        """Also delete the folders that become empty."""
        path = self.path(key)
        with disk_errors(path), self._lock():
            path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder may contain files
                for folder in path.relative_to(self.root).parents[:-1]:
                    (self.root / folder).rmdir()

    def _walk(self, directory: Path, base: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            # "a/" sorts after "a.b" but before "ab", as when S3 sorts whole keys.
            with os.scandir(directory) as entries:  # knows without a stat which of them are folders
                names = sorted(each.name + "/" * each.is_dir() for each in entries if not each.name.startswith("."))
        except FileNotFoundError:
            return
        for name in names:
            key = base + name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(directory / name, key, prefix)
            elif key.startswith(prefix):
                with suppress(FileNotFoundError):  # deleted in the meantime
                    status = (directory / name).stat()
                    modified = datetime.fromtimestamp(status.st_mtime, UTC)
                    yield ObjectInfo(key, status.st_size, modified, partial(self._etag, key))

    def _etag(self, key: str) -> str:
        path = self.path(key)
        with disk_errors(path):
            try:
                return sha256_file(path)
            except FileNotFoundError:
                raise missing_object(self.uri, key) from None

    def _write(self, key: str, data: bytes | Path, check: Callable[[Path], None]) -> str:
        path = self.path(key)
        with disk_errors(path):
            self._staging.mkdir(parents=True, exist_ok=True)
            self._delete_stale_files()
            with staged_file(self._staging, path.name) as (file, staged):
                etag = _copy(data, file)
                sync(file)
                with self._lock():
                    path.parent.mkdir(parents=True, exist_ok=True)  # `delete` removes empty folders
                    check(path)
                    staged.replace(path)
        return etag

    def _lock(self) -> AbstractContextManager[None]:
        return file_lock(self._staging / "lock")

    def _delete_stale_files(self) -> None:
        """Delete temporary files of writers that were killed at least a day ago."""
        for path in self._staging.glob(".*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                    path.unlink()


def _copy(data: bytes | Path, file: BinaryIO) -> str:
    if isinstance(data, bytes):
        file.write(data)
        return sha256_bytes(data)
    sha256 = hashlib.sha256()
    with open_regular(data) as source:
        while chunk := source.read(CHUNK_BYTES):
            sha256.update(chunk)
            file.write(chunk)
    return sha256.hexdigest()
