"""A store in S3 or in what speaks its protocol."""

import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import urllib3
from minio.error import S3Error
from minio.helpers import check_bucket_name

from evernear.disk import disk_errors, open_regular, sha256_bytes, sha256_file
from evernear.errors import IntegrityError, SettingsError, StoreError
from evernear.store.base import CHUNK_BYTES, ObjectInfo, check_key, check_sha256, missing, present, receive
from evernear.store.connection import ABSENT, BACKOFF_S, TRIES, Connection
from evernear.store.swap import OWN, Swapper

# A multipart ETag is no hash of the content, so each object carries its own.
_SHA256 = "x-amz-meta-sha256"
_BROKEN_OFF = (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError, IntegrityError)

_T = TypeVar("_T")


class S3Store:
    """A store in S3 or in what speaks its protocol."""

    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            check_bucket_name(bucket)
        except ValueError as error:
            raise SettingsError(f"{bucket!r} cannot be the name of a bucket: {error}.") from None
        self.bucket = bucket
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._connection = Connection.from_environment()
        self._client = self._connection.client
        self._swapper = Swapper(self._connection, bucket, self._prefix)

    def put(self, key: str, data: bytes | Path) -> str:
        """Write ``data`` whole, and return its etag."""
        check_key(key)
        if isinstance(data, bytes):
            return self._put(key, BytesIO(data), len(data), sha256_bytes(data))
        with disk_errors(data), open_regular(data) as file:
            return self._put(key, file, data.stat().st_size, sha256_file(data))

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write only if the object still has ``etag`` (None: only if there is none)."""
        check_key(key)
        return self._swapper.put_if(key, data, etag, {_SHA256: sha256_bytes(data)})

    def get(self, key: str) -> bytes:
        """The object; an absent one is a `StoreError`."""
        return present(self.uri, key, self.find(key))

    def find(self, key: str) -> tuple[bytes, str] | None:
        """The object and its etag, or None where there is none."""

        def take(answer: urllib3.BaseHTTPResponse) -> tuple[bytes, str]:
            data = answer.read()
            check_sha256(sha256_bytes(data), answer.headers.get(_SHA256), f"{self.uri}/{key}")
            return data, answer.headers["etag"].strip('"')

        return self._read(key, take)

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        """Copy the object to ``path``, whole or not at all."""

        def take(answer: urllib3.BaseHTTPResponse) -> Path:
            expected = sha256 or answer.headers.get(_SHA256)
            receive(answer.stream(CHUNK_BYTES), path, expected, f"{self.uri}/{key}")
            return path

        taken = self._read(key, take)
        if taken is None:
            raise StoreError(missing(self.uri, key))
        return taken

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, each folder by name, a page of 1,000 at a time.

        S3 sorts whole keys; SeaweedFS lists folder by folder, so that ``a/b`` comes before ``a.b``.
        """
        with self._connection.errors("s3:ListBucket", self.bucket, self._prefix + prefix):
            for found in self._client.list_objects(self.bucket, self._prefix + prefix, recursive=True):
                key = str(found.object_name).removeprefix(self._prefix)
                if not key.startswith(OWN):
                    yield ObjectInfo(key, found.size or 0, str(found.etag).strip('"'))

    def folders(self) -> Iterator[str]:
        """The first words of all keys that have more than one."""
        with self._connection.errors("s3:ListBucket", self.bucket, self._prefix):
            for found in self._client.list_objects(self.bucket, self._prefix):
                word = str(found.object_name).removeprefix(self._prefix).rstrip("/")
                if found.is_dir and not word.startswith("."):
                    yield word

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is no error."""
        with self._connection.errors("s3:DeleteObject", self.bucket, self._prefix + key):
            self._client.remove_object(self.bucket, self._prefix + key)

    def _put(self, key: str, stream: BinaryIO, size_bytes: int, sha256: str) -> str:
        with self._connection.errors("s3:PutObject", self.bucket, self._prefix + key):
            written = self._client.put_object(
                self.bucket, self._prefix + key, stream, size_bytes, metadata={_SHA256: sha256}
            )
            return str(written.etag)

    def _read(self, key: str, take: Callable[[urllib3.BaseHTTPResponse], _T]) -> _T | None:
        """What ``take`` makes of the object, None where there is none; from the start again if a transfer breaks."""
        with self._connection.errors("s3:GetObject", self.bucket, self._prefix + key):
            for attempt in range(1, TRIES + 1):
                try:
                    return self._read_once(key, take)
                except S3Error as error:
                    if error.code in ABSENT:
                        return None
                    raise
                except _BROKEN_OFF as error:
                    # Wrong content is read once more: bytes may turn on the way, but rarely do so twice.
                    if attempt == TRIES or (isinstance(error, IntegrityError) and attempt > 1):
                        raise
                time.sleep(BACKOFF_S * (attempt - 1))
        return None

    def _read_once(self, key: str, take: Callable[[urllib3.BaseHTTPResponse], _T]) -> _T:
        answer = self._client.get_object(self.bucket, self._prefix + key)
        try:
            return take(answer)
        finally:
            answer.close()
            answer.release_conn()
