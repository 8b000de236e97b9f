"""A store in S3, or in a server with the same API."""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

import urllib3
from minio.error import S3Error
from minio.helpers import check_bucket_name

from evernear.common.disk import disk_errors, open_regular, sha256_bytes, sha256_file
from evernear.common.retry import doubling, retry
from evernear.common.store.base import (
    CHUNK_BYTES,
    ObjectInfo,
    Store,
    check_key,
    check_sha256,
    missing_object,
    write_chunks,
)
from evernear.common.store.conditional_put import OWN_PREFIX, ConditionalWriter
from evernear.common.store.s3_connection import (
    BACKOFF_S,
    LONGEST_BACKOFF_S,
    MAX_ATTEMPTS,
    MISSING_OBJECT,
    S3Connection,
    required_etag,
)
from evernear.common.store.s3_reader import SHA256, object_reader
from evernear.errors import IntegrityError, SettingsError

# A multipart ETag is not a hash of the content, so the metadata has its sha256.
_SHA256 = f"x-amz-meta-{SHA256}"
_BROKEN_OFF = (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError)

_T = TypeVar("_T")


class S3Store(Store):
    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            check_bucket_name(bucket)
        except ValueError as error:
            raise SettingsError(f"{bucket!r} cannot be the name of a bucket: {error}.") from None
        self.bucket = bucket
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._connection = S3Connection.from_environment()
        self._client = self._connection.client
        self._conditional_writer = ConditionalWriter(self._connection, bucket, self._prefix)

    def put(self, key: str, data: bytes | Path) -> str:
        check_key(key)
        if isinstance(data, bytes):
            return self._put(key, BytesIO(data), len(data), sha256_bytes(data))
        with disk_errors(data), open_regular(data) as file:
            return self._put(key, file, data.stat().st_size, sha256_file(data))

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        check_key(key)
        return self._conditional_writer.put_if(key, data, etag, {_SHA256: sha256_bytes(data)})

    def find(self, key: str) -> tuple[bytes, str] | None:
        def read(response: urllib3.BaseHTTPResponse) -> tuple[bytes, str]:
            data = response.read()
            check_sha256(sha256_bytes(data), response.headers.get(_SHA256), f"{self.uri}/{key}")
            return data, required_etag(response.headers.get("etag"), self._connection.endpoint)

        return self._get(key, read)

    def reader(self) -> Callable[[str], bytes]:
        """A function that reads many small objects faster than `get`, in any number of threads."""
        read = object_reader(self._connection, self.bucket)

        def get(key: str) -> bytes:
            data = read(self._prefix + key)
            return self.get(key) if data is None else data

        return get

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        def save(response: urllib3.BaseHTTPResponse) -> Path:
            expected = sha256 or response.headers.get(_SHA256)
            write_chunks(response.stream(CHUNK_BYTES), path, expected, f"{self.uri}/{key}")
            return path

        if self._get(key, save) is None:
            raise missing_object(self.uri, key)
        return path

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """S3 sorts whole keys. SeaweedFS lists folder by folder: ``a/b`` comes before ``a.b``."""
        with self._connection.errors("s3:ListBucket", self.bucket, self._prefix + prefix):
            for listed in self._connection.list(self.bucket, self._prefix + prefix):
                key = listed.name.removeprefix(self._prefix)
                if not key.startswith(OWN_PREFIX):
                    modified = datetime.fromisoformat(listed.modified)
                    yield ObjectInfo(key, listed.size_bytes, modified, partial(str, listed.etag))

    def children(self, folder: str) -> Iterator[str]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        with self._connection.errors("s3:ListBucket", self.bucket, prefix):
            for info in self._client.list_objects(self.bucket, prefix):
                name = str(info.object_name).removeprefix(prefix)
                if name and not name.startswith("."):
                    yield name

    def delete(self, key: str) -> None:
        with self._connection.errors("s3:DeleteObject", self.bucket, self._prefix + key):
            self._client.remove_object(self.bucket, self._prefix + key)

    def _put(self, key: str, stream: BinaryIO, size_bytes: int, sha256: str) -> str:
        with self._connection.errors("s3:PutObject", self.bucket, self._prefix + key):
            written = self._client.put_object(
                self.bucket, self._prefix + key, stream, size_bytes, metadata={_SHA256: sha256}
            )
            return required_etag(written.etag, self._connection.endpoint)

    def _get(self, key: str, read: Callable[[urllib3.BaseHTTPResponse], _T]) -> _T | None:
        """The result of ``read``, called again if a transfer breaks, or None without the object."""
        with self._connection.errors("s3:GetObject", self.bucket, self._prefix + key):
            pauses_s = islice(doubling(BACKOFF_S, LONGEST_BACKOFF_S), MAX_ATTEMPTS - 1)
            try:
                return retry(lambda: self._get_intact(key, read), on=_BROKEN_OFF, pauses_s=pauses_s)
            except S3Error as error:
                if error.code in MISSING_OBJECT:
                    return None
                raise

    def _get_intact(self, key: str, read: Callable[[urllib3.BaseHTTPResponse], _T]) -> _T:
        # A transfer may corrupt content, but rarely twice, so a wrong hash is read once more.
        return retry(lambda: self._get_once(key, read), on=IntegrityError, pauses_s=[0.0])

    def _get_once(self, key: str, read: Callable[[urllib3.BaseHTTPResponse], _T]) -> _T:
        response = self._client.get_object(self.bucket, self._prefix + key)
        try:
            required_etag(response.headers.get("etag"), self._connection.endpoint)
            return read(response)
        finally:
            response.close()
            response.release_conn()
