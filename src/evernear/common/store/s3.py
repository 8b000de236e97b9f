"""A store in S3, or in a server with the same API.

Compare-and-swap uses conditional writes. AWS, MinIO and newer SeaweedFS support ``If-None-Match``
and ``If-Match``. Others reject these headers (OpenStack Swift), ignore them (SeaweedFS before
3.97), or check and write in two steps, so several concurrent writers succeed (SeaweedFS 4.16,
Swift). Before the first conditional write, evernear races several writers, and rejects the server
unless exactly one wins (docs/decisions/0011-object-store.md).

If a connection breaks before the response arrives, reading the object back shows by the write's id
whether it succeeded. MinIO breaks connections routinely: it rejects the loser of a race before it
has read the body, and resets the connection.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property, partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from uuid import uuid4

import urllib3
from minio.error import InvalidResponseError, S3Error
from minio.helpers import check_bucket_name

from evernear.common.disk import disk_errors, open_regular, sha256_bytes, sha256_file
from evernear.common.retry import backoff_s, doubling, retry
from evernear.common.store.base import (
    CHUNK_BYTES,
    ObjectInfo,
    Store,
    check_key,
    check_sha256,
    conflict,
    missing_object,
    write_chunks,
)
from evernear.common.store.patience import patiently
from evernear.common.store.s3_connection import (
    BACKOFF_S,
    CONNECT_TIMEOUT_S,
    LONGEST_BACKOFF_S,
    MAX_ATTEMPTS,
    MISSING_OBJECT,
    READ_TIMEOUT_S,
    S3Connection,
    required_etag,
    status_of,
)
from evernear.errors import IntegrityError, SettingsError, StoreError, TransientStoreError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

SHA256 = "sha256"
_SHA256 = f"x-amz-meta-{SHA256}"  # a multipart ETag is not a hash of the content
# Test objects have this prefix, because no key can start with it.
OWN_PREFIX = ".swap/"
_RACERS = 8
_CREATE = {"If-None-Match": "*"}
# The content does not identify a write, because two writers may write equal content.
_WRITE_ID = "x-amz-meta-write-id"
_AWS = "https://s3.amazonaws.com"
_BROKEN_OFF = (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError)

_T = TypeVar("_T")


def object_reader(connection: S3Connection, bucket: str) -> Callable[[str], bytes | None]:
    """Return a function that reads an object by name, or returns None after one failed attempt. The
    caller repeats that with the MinIO client, which explains errors."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    # The global AWS endpoint redirects requests for other regions.
    endpoint = f"https://s3.{connection.region}.amazonaws.com" if connection.endpoint == _AWS else connection.endpoint
    config: S3Config = {
        "bucket": bucket,
        "endpoint": endpoint,
        "region": connection.region,
        "virtual_hosted_style_request": False,
    }
    keys = connection.credentials
    if keys is None:
        config["skip_signature"] = True
        config["access_key_id"] = config["secret_access_key"] = ""  # only one of them is an error
    client_options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "root_certificate": connection.certificates.read_bytes(),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        "timeout": timedelta(days=1),
    }
    store = S3Store(
        config=config,
        client_options=client_options,
        retry_config={"max_retries": 0},
        credential_provider=keys.for_obstore if keys else None,
    )

    def read(name: str) -> bytes | None:
        if name.startswith("/") or name.endswith("/"):
            return None  # obstore removes the slash
        try:
            result = obstore.get(store, name)
            data = bytes(result.bytes())
        except (BaseError, OSError, ValueError):
            return None
        if result.meta["e_tag"] is None:  # not an S3 server, which the MinIO client explains
            return None
        return data if result.attributes.get(SHA256) in (None, sha256_bytes(data)) else None

    return read


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
        self.identity = self._connection.credentials.source if self._connection.credentials else ""

    def put(self, key: str, data: bytes | Path) -> str:
        check_key(key)
        if isinstance(data, bytes):
            return self._put(key, BytesIO(data), len(data), sha256_bytes(data))
        with disk_errors(data), open_regular(data) as file:
            return self._put(key, file, data.stat().st_size, sha256_file(data))

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        check_key(key)
        if self.race_winners != (1, 1):
            raise StoreError(self._explain_unsupported(*self.race_winners))
        written = self._put_conditionally(key, data, etag, {_SHA256: sha256_bytes(data)})
        if written is None:
            raise conflict(self.uri, key)
        return written

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
            for listed in self._connection.children(self.bucket, prefix):
                name = listed.removeprefix(prefix)
                if name and not name.startswith("."):
                    yield name

    def delete(self, key: str) -> None:
        name = self._prefix + key
        self._connection.request(
            lambda: self._client.remove_object(self.bucket, name), "s3:DeleteObject", self.bucket, name
        )

    def _put(self, key: str, stream: BinaryIO, size_bytes: int, sha256: str) -> str:
        name = self._prefix + key

        def send() -> str:
            stream.seek(0)
            written = self._client.put_object(self.bucket, name, stream, size_bytes, metadata={_SHA256: sha256})
            return required_etag(written.etag, self._connection.endpoint)

        return self._connection.request(send, "s3:PutObject", self.bucket, name)

    def _get(self, key: str, read: Callable[[urllib3.BaseHTTPResponse], _T]) -> _T | None:
        """The result of ``read``, called again if a transfer breaks, or None without the object."""

        def get() -> _T | None:
            pauses_s = islice(doubling(BACKOFF_S, LONGEST_BACKOFF_S), MAX_ATTEMPTS - 1)
            try:
                return retry(lambda: self._get_intact(key, read), on=_BROKEN_OFF, pauses_s=pauses_s)
            except S3Error as error:
                if error.code in MISSING_OBJECT:
                    return None
                raise

        return self._connection.request(get, "s3:GetObject", self.bucket, self._prefix + key)

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

    @cached_property
    def race_winners(self) -> tuple[int, int]:
        """How many of eight concurrent writers create an object, and how many replace it. Both are
        1 if compare-and-swap works, and 0 if the server rejects the condition. If it ignores the
        condition, or checks it before the write, at least one is above 1."""
        key = f"{OWN_PREFIX}probe-{uuid4().hex}"
        created = self._race(key, None)
        if not created:
            return 0, 0
        try:
            return len(created), len(self._race(key, created[0]))
        finally:
            with suppress(TransientStoreError):  # 16 bytes remain that are never listed
                self.delete(key)

    def _explain_unsupported(self, created: int, replaced: int) -> str:
        return (
            f"{self._connection.endpoint} does not support atomic conditional writes: {created} of {_RACERS} concurrent"
            f" writers created an object and {replaced} replaced it, instead of one each, so two runs could overwrite"
            " each other's champion; use AWS, MinIO, SeaweedFS 4.34 or another server that supports If-None-Match and"
            " If-Match."
        )

    def _race(self, key: str, etag: str | None) -> Sequence[str]:
        # The content differs, because rewriting the current content would keep the etag, and the
        # next writer's condition would also hold.
        entries = [uuid4().bytes for _ in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            etags = racers.map(lambda data: self._put_conditionally(key, data, etag, {}), entries)
            return [etag for etag in etags if etag is not None]

    def _put_conditionally(self, key: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """Return the new etag, or None if the condition failed or is not supported. If the response
        is lost and the object is unchanged, the write is sent again. The condition lets at most one
        of the two succeed."""
        write_id = uuid4().hex
        conditional = {
            **headers,
            **(_CREATE if etag is None else {"If-Match": f'"{etag}"'}),
            _WRITE_ID: write_id,
        }
        sent = 0

        def write() -> str | None:
            nonlocal sent
            for failures in range(MAX_ATTEMPTS):
                time.sleep(backoff_s(failures, BACKOFF_S, LONGEST_BACKOFF_S))
                if sent:
                    current, current_id = self._read_back(key)
                    if current_id == write_id:
                        return current
                    if current != etag:
                        return None
                sent += 1
                written, is_answered = self._send(key, data, conditional)
                if written or (is_answered and sent == 1):
                    return written
            current, current_id = self._read_back(key)
            if current_id == write_id:
                return current
            if current != etag:
                return None
            raise TransientStoreError(
                f"{self._connection.endpoint} broke off whenever {self.uri}/{key} was written, and the object is"
                " unchanged; run again."
            )

        return patiently(write)

    def _send(self, key: str, data: bytes, headers: dict[str, str]) -> tuple[str | None, bool]:
        """Send one conditional PUT. Return the new etag, or None if the condition failed or is not
        supported, and whether the server answered. If not, it may still execute the write."""
        with self._connection.errors("s3:PutObject", self.bucket, self._prefix + key):
            try:
                response = self._connection.put(self.bucket, self._prefix + key, data, headers)
                return required_etag(response.headers.get("etag"), self._connection.endpoint), True
            except _BROKEN_OFF:
                return None, False
            except (S3Error, InvalidResponseError) as error:
                status = status_of(error)
                if status in (500, 502, 504):
                    return None, False
                if status in (409, 412, 501) or (isinstance(error, S3Error) and error.code in MISSING_OBJECT):
                    return None, True
                raise

    def _read_back(self, key: str) -> tuple[str | None, str | None]:
        try:
            return self._stat(key)
        except StoreError as error:
            raise TransientStoreError(
                f"{self._connection.endpoint} broke off while {self.uri}/{key} was written, and it is not"
                f" known whether it was, since it cannot be read either: {error}"
            ) from error

    def _stat(self, key: str) -> tuple[str | None, str | None]:
        """The etag of an object and the id of its write, or two Nones."""
        with self._connection.errors("s3:GetObject", self.bucket, self._prefix + key):
            try:
                info = self._client.stat_object(self.bucket, self._prefix + key)
            except S3Error as error:
                if error.code in MISSING_OBJECT:
                    return None, None
                raise
        return str(info.etag), info.metadata.get(_WRITE_ID) if info.metadata else None
