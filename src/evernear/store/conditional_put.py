"""Compare-and-swap in S3, whether or not the server supports atomic conditional writes.

AWS, MinIO and newer SeaweedFS support ``If-None-Match`` and ``If-Match``. Other servers reject these headers (OpenStack
Swift), ignore them (SeaweedFS before 3.97), or check and write in two steps, so that several concurrent writers succeed
(SeaweedFS 4.16, Swift). evernear therefore tests the server first, with a race between its own writers; unless exactly
one of them wins, writers take a lease. docs/decisions/0011-object-store.md describes the guarantees of both.

A connection that breaks before the response arrives does not leave the outcome open: each write has an id, and reading
the object back shows whether that write succeeded. MinIO breaks such connections routinely: it rejects the loser of a
race before it has read the body, and resets.
"""

import math
import random
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from io import BytesIO
from uuid import uuid4

import urllib3
from minio.error import InvalidResponseError, S3Error

from evernear.errors import StoreError, TransientStoreError
from evernear.store.base import conflict
from evernear.store.s3_connection import BACKOFF_S, MAX_ATTEMPTS, MISSING_OBJECT, S3Connection, required_etag

# Probes and leases are below this prefix, which no key can start with.
OWN_PREFIX = ".swap/"

_RACERS = 8
# A writer with a lease starts its write within this time or not at all, and the server rejects its signature after 15
# minutes (S3's limit): a writer that was suspended cannot overwrite the next owner of its stale lease.
_LEASE_WRITE_WINDOW_S = 30.0
_STALE_AFTER = timedelta(minutes=20)
_LEASE_TIMEOUT_S = 20.0
_LEASE_RETRY_PAUSE_S = (0.05, 0.4)

_CREATE = {"If-None-Match": "*"}
# The content would not identify a write: two writers may write the same, and only one of them wins.
_WRITE_ID = "x-amz-meta-write-id"


class _ResponseLostError(Exception):
    """A conditional PUT was sent, and whether the server executed it is unknown."""


class ConditionalWriter:
    """Conditional writes below ``prefix`` (empty, or ending in a slash) of a bucket."""

    def __init__(self, connection: S3Connection, bucket: str, prefix: str) -> None:
        self._connection, self._bucket, self._prefix = connection, bucket, prefix
        self._uri = f"s3://{bucket}/{prefix}".rstrip("/")

    def put_if(self, key: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str:
        """Write only if the object has ``etag`` (None: only if it does not exist), and return the new etag.

        Raises:
            ConflictError: another writer was first and nothing was changed; or the response was lost and another writer
                has written since.
            TransientStoreError: the server is unreachable, or another writer does not release its lease.
            StoreError: the server rejects the request.
        """
        write = self._put if self.race_winners == (1, 1) else self._put_under_lease
        written = write(self._prefix + key, data, etag, headers)
        if written is None:
            raise conflict(self._uri, key)
        return written

    @cached_property
    def race_winners(self) -> tuple[int, int]:
        """How many of eight concurrent writers succeed in creating an object, and in replacing it.

        1 and 1 is compare-and-swap. 0 is a server that rejects the condition, more than 1 is one that ignores it, or
        that checks and writes in two steps.
        """
        name = f"{self._prefix}{OWN_PREFIX}probe-{uuid4().hex}"
        created = self._race(name, None)
        if not created:
            return 0, 0
        try:
            return len(created), len(self._race(name, created[0]))
        finally:
            with suppress(TransientStoreError):  # leaves 16 bytes that are never listed
                self._remove(name)

    def _race(self, name: str, etag: str | None) -> list[str]:
        """The etags of the writers that succeeded."""
        # Distinct contents: writing the current content again would leave the etag for the next writer to match.
        entries = [uuid4().bytes for _ in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            etags = racers.map(lambda data: self._put(name, data, etag, {}), entries)
            return [etag for etag in etags if etag is not None]

    def _put(
        self, name: str, data: bytes, etag: str | None, headers: dict[str, str], send_before: float = math.inf
    ) -> str | None:
        """Write conditionally; return the new etag, or None if the condition failed or is not supported.

        If the response is lost, the object is read back. If it is unchanged, the write is sent again, but not after
        ``send_before`` (`time.monotonic`): the condition admits at most one of the two.
        """
        write_id = uuid4().hex
        conditional = {
            **headers,
            **(_CREATE if etag is None else {"If-Match": f'"{etag}"'}),
            _WRITE_ID: write_id,
        }
        for attempt in range(MAX_ATTEMPTS):
            time.sleep(BACKOFF_S * attempt)
            if attempt and time.monotonic() > send_before:
                break
            try:
                written = self._send(name, data, conditional)
                if written or attempt == 0:
                    return written
            except _ResponseLostError:
                pass
            current, current_id = self._read_back(name)
            if current_id == write_id:
                return current
            if current != etag:
                return None
        raise TransientStoreError(
            f"{self._connection.endpoint} broke off whenever s3://{self._bucket}/{name} was written, and the object is"
            " unchanged; run again."
        )

    def _send(self, name: str, data: bytes, headers: dict[str, str]) -> str | None:
        """Send one conditional PUT; return the new etag, or None if the condition failed or is not supported.

        Raises:
            _ResponseLostError: the server may have executed it, or may still execute it.
        """
        with self._connection.errors("s3:PutObject", self._bucket, name):
            try:
                response = self._connection.put(self._bucket, name, data, headers)
            except (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError) as error:
                raise _ResponseLostError from error
            if response.status == 200:
                return required_etag(response.headers.get("etag"))
            if response.status in (409, 412, 501):
                return None
            if response.status in (500, 502, 504):
                raise _ResponseLostError
            if "xml" not in (kind := response.headers.get("content-type", "")):
                raise InvalidResponseError(response.status, kind, response.data.decode(errors="replace"))
            error = S3Error.fromxml(response)
            if error.code in MISSING_OBJECT:
                return None
            raise error

    def _read_back(self, name: str) -> tuple[str | None, str | None]:
        """`_stat` after a lost response."""
        try:
            return self._stat(name)
        except StoreError as error:
            raise TransientStoreError(
                f"{self._connection.endpoint} broke off while s3://{self._bucket}/{name} was written, and it is not"
                f" known whether it was, since it cannot be read either: {error}"
            ) from error

    def _stat(self, name: str) -> tuple[str | None, str | None]:
        """The etag of an object and the id of its write; None and None if it does not exist."""
        with self._connection.errors("s3:GetObject", self._bucket, name):
            try:
                info = self._connection.client.stat_object(self._bucket, name)
            except S3Error as error:
                if error.code in MISSING_OBJECT:
                    return None, None
                raise
        return str(info.etag), info.metadata.get(_WRITE_ID) if info.metadata else None

    def _put_under_lease(self, name: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """Write under a lease; return the new etag, or None if the current one is not ``etag``."""
        client = self._connection.client
        with self._lease(name) as since:
            if self._stat(name)[0] != etag:
                return None
            if time.monotonic() - since > _LEASE_WRITE_WINDOW_S:
                raise TransientStoreError(
                    f"{self._connection.endpoint} is too slow to hold a lease; nothing was written."
                )
            if all(self.race_winners):
                # A server that at least checks the condition rejects writers that consider it atomic.
                return self._put(name, data, etag, headers, since + _LEASE_WRITE_WINDOW_S)
            write_id = uuid4().hex
            with self._connection.errors("s3:PutObject", self._bucket, name):
                try:
                    written = client.put_object(
                        self._bucket, name, BytesIO(data), len(data), metadata={**headers, _WRITE_ID: write_id}
                    )
                except urllib3.exceptions.HTTPError:
                    current, current_id = self._read_back(name)
                    if current_id != write_id:
                        raise
                    return current
                return str(written.etag)

    @contextmanager
    def _lease(self, name: str) -> Generator[float]:
        """Hold the lease of ``name``; yields the time (`time.monotonic`) from which it is certainly held.

        Raises:
            StoreError: other writers do not release the lease.
        """
        folder = f"{self._prefix}{OWN_PREFIX}leases/{name.removeprefix(self._prefix).replace('/', '--')}/"
        deadline = time.monotonic() + _LEASE_TIMEOUT_S
        while True:
            since = time.monotonic()
            with self._flag(folder) as others:
                if not others:
                    yield since
                    return
            # Writers that see each other withdraw, and retry after random pauses.
            if time.monotonic() > deadline:
                raise TransientStoreError(
                    f"Another writer holds s3://{self._bucket}/{min(others)}; run again. If none is running, one was"
                    f" killed: its lease expires after {_STALE_AFTER.seconds // 60} minutes."
                )
            time.sleep(random.uniform(*_LEASE_RETRY_PAUSE_S))  # noqa: S311 (no secret)

    @contextmanager
    def _flag(self, folder: str) -> Generator[list[str]]:
        """Create a flag in ``folder``, and yield the other flags there that are not stale.

        Each writer creates its flag before it lists, so at least one of two sees the other, and a writer that sees none
        is alone. This requires that a listing shows all earlier writes.
        """
        client, own_flag = self._connection.client, folder + uuid4().hex
        with self._connection.errors("s3:PutObject", self._bucket, own_flag):
            written = client.put_object(self._bucket, own_flag, BytesIO(b""), 0)
        try:
            date = written.http_headers.get("date") if written.http_headers else None
            now = parsedate_to_datetime(date) if date else datetime.now(UTC)
            with self._connection.errors("s3:ListBucket", self._bucket, folder):
                flags = {str(flag.object_name): flag for flag in client.list_objects(self._bucket, folder)}
            if flags.pop(own_flag, None) is None:
                raise StoreError(
                    f"{self._connection.endpoint} does not list an object right after its write; no pointer can move."
                )
            stale = [
                name for name, flag in flags.items() if flag.last_modified and now - flag.last_modified > _STALE_AFTER
            ]
            for name in stale:
                self._remove(name)
            yield [name for name in flags if name not in stale]
        finally:
            with suppress(TransientStoreError):  # the write is done, and the lease expires
                self._remove(own_flag)

    def _remove(self, name: str) -> None:
        with self._connection.errors("s3:DeleteObject", self._bucket, name):
            self._connection.client.remove_object(self._bucket, name)
