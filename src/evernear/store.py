"""Objects under keys, in a directory (``file:///path``) or in S3 (``s3://bucket/prefix``).

A write is whole or not there, and `Store.put_if` is a compare-and-swap: pointers such as a dataset's head or
the champion move by it, so that of two writers exactly one wins. Keys are ``/``-separated words, as in S3.
"""

import errno
import hashlib
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

import certifi
import urllib3
from filelock import FileLock
from minio import Minio
from minio.credentials.providers import EnvAWSProvider
from minio.error import MinioException, S3Error

from evernear.errors import Conflict, IntegrityError, SettingsError, StoreError

_CHUNK_BYTES = 2**20
_STALE_AFTER_S = 24 * 3600
_ABSENT = frozenset({"NoSuchKey", "NoSuchObject"})


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says of one object."""

    key: str
    size_bytes: int
    etag: str


class Store(Protocol):
    """Objects under keys. All methods raise `StoreError` where the store cannot be reached or refuses."""

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
        """Objects whose key starts with ``prefix``, by key, one page in memory at a time."""
        ...

    def folders(self) -> Iterator[str]:
        """The first words of all keys that have more than one."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        ...


def open_store(uri: str) -> Store:
    """The store at ``file:///absolute/path`` or ``s3://bucket/prefix``.

    S3 is set up as other tools do it: ``AWS_ENDPOINT_URL`` (MinIO, ...), ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN`` and ``AWS_REGION``; without keys requests are anonymous.

    Raises:
        SettingsError: the URI is neither.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        return S3Store(parts.netloc, parts.path.strip("/"))
    raise SettingsError(f"The store {uri!r} is neither file:///absolute/path nor s3://bucket/prefix.")


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, in flat memory."""
    with disk_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one and nothing between.

    Raises:
        StoreError: disk full, permission denied, ...
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _staged(path.parent, path.name) as (file, staged):
            file.write(data.encode() if isinstance(data, str) else data)
            _sync(file)
            staged.replace(path)


@contextmanager
def disk_errors(place: Path | str) -> Generator[None]:
    """Turn an `OSError` on ``place`` into a `StoreError` of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            sentence = f"The disk that holds {place} is full; free some space and run again."
        elif error.errno == errno.EFBIG:
            sentence = f"{place} would be larger than this process may write (ulimit -f); raise the limit."
        else:
            sentence = f"{place} cannot be read or written: {error.strerror or error}."
        raise StoreError(sentence) from error


class FileStore:
    """A store in a directory. An etag is the sha256 of the content."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()
        self._staging = root / ".staging"

    def path(self, key: str) -> Path:
        """Where the object lies; the store's own files may be read in place."""
        words = key.split("/")
        # A leading dot is kept for the store's own files, and shuts out "." and ".." with them.
        if not all(words) or any(word.startswith(".") or "\\" in word for word in words):
            raise StoreError(f"{key!r} is no key of a store: it has an empty word or one that starts with a dot.")
        return self.root.joinpath(*words)

    def put(self, key: str, data: bytes | Path) -> str:
        """Write ``data`` whole, and return its etag."""
        return self._write(key, data, lambda _: None)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write only if the object still has ``etag`` (None: only if there is none)."""

        def check(path: Path) -> None:
            held = sha256_file(path) if path.exists() else None
            if held != etag:
                raise Conflict(_lost(self.uri, key))

        return self._write(key, data, check)

    def get(self, key: str) -> bytes:
        """The object; an absent one is a `StoreError`."""
        return _present(self.uri, key, self.find(key))

    def find(self, key: str) -> tuple[bytes, str] | None:
        """The object and its etag, or None where there is none."""
        path = self.path(key)
        with disk_errors(path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return data, sha256_bytes(data)

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        """Copy the object to ``path``, whole or not at all."""
        with disk_errors(self.path(key)):
            try:
                source = self.path(key).open("rb")
            except FileNotFoundError:
                raise StoreError(_missing(self.uri, key)) from None
        with source:
            _receive(iter(lambda: source.read(_CHUNK_BYTES), b""), path, sha256, f"{self.uri}/{key}")
        return path

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, by key; each is read once for its etag."""
        with disk_errors(self.root):
            yield from self._walk(self.root, "", prefix)

    def folders(self) -> Iterator[str]:
        """The first words of all keys that have more than one."""
        with disk_errors(self.root):
            if self.root.is_dir():
                yield from (p.name for p in self.root.iterdir() if p.is_dir() and p.name[0] != ".")

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        path = self.path(key)
        with disk_errors(path), self._lock():
            path.unlink(missing_ok=True)

    def _walk(self, directory: Path, base: str, prefix: str) -> Iterator[ObjectInfo]:
        if not directory.is_dir():
            return
        # "a/" sorts after "a.b" but before "ab", as whole keys do in S3.
        names = sorted(p.name + "/" * p.is_dir() for p in directory.iterdir() if not p.name.startswith("."))
        for name in names:
            key = base + name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(directory / name, key, prefix)
            elif key.startswith(prefix):
                path = directory / name
                yield ObjectInfo(key, path.stat().st_size, sha256_file(path))

    def _write(self, key: str, data: bytes | Path, check: "_Check") -> str:
        path = self.path(key)
        with disk_errors(path):
            self._staging.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with _staged(self._staging, path.name) as (file, staged):
                etag = _copy(data, file)
                _sync(file)
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._lock():
                    check(path)
                    staged.replace(path)
        return etag

    def _lock(self) -> FileLock:
        self._staging.mkdir(parents=True, exist_ok=True)
        return FileLock(self._staging / "lock")

    def _sweep(self) -> None:
        """Remove what writers left that were killed a day ago or earlier."""
        for path in self._staging.glob(".*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                    path.unlink()


class S3Store:
    """A store in S3 or in what speaks its protocol."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._http = urllib3.PoolManager(
            maxsize=64,
            timeout=urllib3.Timeout(connect=10, read=60),
            retries=urllib3.Retry(total=4, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
            ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
        )
        self._client = _client(self._http)

    def put(self, key: str, data: bytes | Path) -> str:
        """Write ``data`` whole, and return its etag."""
        name = self._prefix + key
        with self._errors():
            if isinstance(data, Path):
                with disk_errors(data):
                    written = self._client.fput_object(self.bucket, name, str(data))
            else:
                written = self._client.put_object(self.bucket, name, BytesIO(data), len(data))
        return str(written.etag)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write only if the object still has ``etag`` (None: only if there is none)."""
        condition = {"If-None-Match": "*"} if etag is None else {"If-Match": f'"{etag}"'}
        with self._errors():
            # The client's own put_object passes no conditional header on; its signed URL takes any.
            url = self._client.presigned_put_object(self.bucket, self._prefix + key, expires=timedelta(minutes=15))
            # No retry: one after a write whose answer was lost would take our own object for another's.
            answer = self._http.request("PUT", url, body=data, headers=condition, retries=False)
        if answer.status in (404, 409, 412):
            if b"NoSuchBucket" in answer.data:
                raise StoreError(f"There is no bucket {self.bucket!r}.")
            raise Conflict(_lost(self.uri, key))
        if answer.status != 200:
            raise StoreError(f"{self.uri} refused to write {key}: HTTP {answer.status}.")
        return answer.headers["etag"].strip('"')

    def get(self, key: str) -> bytes:
        """The object; an absent one is a `StoreError`."""
        return _present(self.uri, key, self.find(key))

    def find(self, key: str) -> tuple[bytes, str] | None:
        """The object and its etag, or None where there is none."""
        with self._errors():
            try:
                answer = self._client.get_object(self.bucket, self._prefix + key)
            except S3Error as error:
                if error.code in _ABSENT:
                    return None
                raise
            try:
                return answer.read(), answer.headers["etag"].strip('"')
            finally:
                answer.close()
                answer.release_conn()

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        """Copy the object to ``path``, whole or not at all."""
        with self._errors():
            try:
                answer = self._client.get_object(self.bucket, self._prefix + key)
            except S3Error as error:
                if error.code in _ABSENT:
                    raise StoreError(_missing(self.uri, key)) from None
                raise
            try:
                _receive(answer.stream(_CHUNK_BYTES), path, sha256, f"{self.uri}/{key}")
            finally:
                answer.close()
                answer.release_conn()
        return path

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, by key, a page of 1,000 at a time."""
        with self._errors():
            for found in self._client.list_objects(self.bucket, self._prefix + prefix, recursive=True):
                key = str(found.object_name).removeprefix(self._prefix)
                yield ObjectInfo(key, found.size or 0, str(found.etag).strip('"'))

    def folders(self) -> Iterator[str]:
        """The first words of all keys that have more than one."""
        with self._errors():
            for found in self._client.list_objects(self.bucket, self._prefix):
                if found.is_dir:
                    yield str(found.object_name).removeprefix(self._prefix).rstrip("/")

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        with self._errors():
            self._client.remove_object(self.bucket, self._prefix + key)

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except S3Error as error:
            if error.code == "NoSuchBucket":
                raise StoreError(f"There is no bucket {self.bucket!r}.") from error
            raise StoreError(f"{self.uri} refused: {error.message or error.code}.") from error
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            reason = getattr(error, "reason", None) or error
            raise StoreError(f"{self.uri} cannot be reached: {reason}.") from error


def _client(http: urllib3.PoolManager) -> Minio:
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
        raise SettingsError(f"AWS_ENDPOINT_URL={endpoint!r} is not of the form https://host:port.")
    return Minio(
        parts.netloc,
        secure=parts.scheme == "https",
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        credentials=EnvAWSProvider() if "AWS_ACCESS_KEY_ID" in os.environ else None,
        http_client=http,
    )


class _Check(Protocol):
    def __call__(self, path: Path, /) -> None: ...


def _lost(uri: str, key: str) -> str:
    return f"Somebody else changed {uri}/{key} meanwhile; nothing was overwritten, run again."


def _missing(uri: str, key: str) -> str:
    return f"There is no {key} in {uri}."


def _present(uri: str, key: str, found: tuple[bytes, str] | None) -> bytes:
    if found is None:
        raise StoreError(_missing(uri, key))
    return found[0]


def _copy(data: bytes | Path, file: BinaryIO) -> str:
    """Write ``data`` to ``file`` and return its sha256."""
    if isinstance(data, bytes):
        file.write(data)
        return sha256_bytes(data)
    sha256 = hashlib.sha256()
    with data.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            sha256.update(chunk)
            file.write(chunk)
    return sha256.hexdigest()


def _receive(chunks: Iterator[bytes], path: Path, sha256: str | None, name: str) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _staged(path.parent, path.name) as (file, staged):
            received = hashlib.sha256()
            for chunk in chunks:
                received.update(chunk)
                file.write(chunk)
            if sha256 is not None and received.hexdigest() != sha256:
                raise IntegrityError(f"{name} is damaged: its content does not have the sha256 {sha256}.")
            file.flush()
            staged.replace(path)


@contextmanager
def _staged(directory: Path, name: str) -> Generator[tuple[BinaryIO, Path]]:
    """A new file under a hidden name in ``directory``, removed unless the body renames it."""
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
    staged = Path(temporary)
    try:
        with os.fdopen(handle, "wb") as file:
            staged.chmod(0o644)
            yield file, staged
    finally:
        staged.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    """Bring the content to the disk before the name, so that power loss cannot leave an empty object."""
    file.flush()
    os.fsync(file.fileno())
