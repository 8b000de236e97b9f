"""Compare-and-swap in S3, by conditional writes.

AWS, MinIO and newer SeaweedFS support ``If-None-Match`` and ``If-Match``. Other servers reject these headers (OpenStack
Swift), ignore them (SeaweedFS before 3.97), or check and write in two steps, so that several concurrent writers succeed
(SeaweedFS 4.16, Swift). evernear tests the server before its first conditional write, with a race between its own
writers, and refuses a server unless exactly one of them wins: docs/decisions/0011-object-store.md.

A connection that breaks before the response arrives does not leave the outcome open: each write has an id, and reading
the object back shows whether that write succeeded. MinIO breaks such connections routinely: it rejects the loser of a
race before it has read the body, and resets.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from uuid import uuid4

import urllib3
from minio.error import InvalidResponseError, S3Error

from evernear.common.store.base import conflict
from evernear.common.store.s3_connection import (
    BACKOFF_S,
    MAX_ATTEMPTS,
    MISSING_OBJECT,
    S3Connection,
    required_etag,
    status_of,
)
from evernear.errors import StoreError, TransientStoreError

# Probes are below this prefix, which no key can start with.
OWN_PREFIX = ".swap/"

_RACERS = 8

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
            TransientStoreError: the server is unreachable.
            StoreError: the server rejects the request, or does not support atomic conditional writes.
        """
        if self.race_winners != (1, 1):
            raise StoreError(self._explain_unsupported(*self.race_winners))
        written = self._put(self._prefix + key, data, etag, headers)
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

    def _explain_unsupported(self, created: int, replaced: int) -> str:
        return (
            f"{self._connection.endpoint} does not support atomic conditional writes: {created} of {_RACERS} concurrent"
            f" writers created an object and {replaced} replaced it, instead of one each, so two runs could overwrite"
            " each other's champion; use AWS, MinIO, SeaweedFS 4.34 or another server that supports If-None-Match and"
            " If-Match."
        )

    def _race(self, name: str, etag: str | None) -> list[str]:
        """The etags of the writers that succeeded."""
        # Distinct contents: writing the current content again would leave the etag for the next writer to match.
        entries = [uuid4().bytes for _ in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            etags = racers.map(lambda data: self._put(name, data, etag, {}), entries)
            return [etag for etag in etags if etag is not None]

    def _put(self, name: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """Write conditionally; return the new etag, or None if the condition failed or is not supported.

        If the response is lost, the object is read back. If it is unchanged, the write is sent again: the condition
        admits at most one of the two.
        """
        write_id = uuid4().hex
        conditional = {
            **headers,
            **(_CREATE if etag is None else {"If-Match": f'"{etag}"'}),
            _WRITE_ID: write_id,
        }
        for attempt in range(MAX_ATTEMPTS):
            time.sleep(BACKOFF_S * attempt)
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
                return required_etag(self._connection.put(self._bucket, name, data, headers).headers.get("etag"))
            except (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError) as error:
                raise _ResponseLostError from error
            except (S3Error, InvalidResponseError) as error:
                status = status_of(error)
                if status in (500, 502, 504):
                    raise _ResponseLostError from error
                if status in (409, 412, 501) or (isinstance(error, S3Error) and error.code in MISSING_OBJECT):
                    return None
                raise

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

    def _remove(self, name: str) -> None:
        with self._connection.errors("s3:DeleteObject", self._bucket, name):
            self._connection.client.remove_object(self._bucket, name)
