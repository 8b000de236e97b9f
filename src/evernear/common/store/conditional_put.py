"""Compare-and-swap in S3, by conditional writes.

AWS, MinIO and newer SeaweedFS support ``If-None-Match`` and ``If-Match``. Others reject these
headers (OpenStack Swift), ignore them (SeaweedFS before 3.97), or check and write in two steps, so
several concurrent writers succeed (SeaweedFS 4.16, Swift). Before the first conditional write,
evernear races several writers, and rejects the server unless exactly one wins
(docs/decisions/0011-object-store.md).

If a connection breaks before the response arrives, reading the object back shows by the write's id
whether it succeeded. MinIO breaks connections routinely: it rejects the loser of a race before it
has read the body, and resets the connection.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from uuid import uuid4

import urllib3
from minio.error import InvalidResponseError, S3Error

from evernear.common.retry import backoff_s
from evernear.common.store.base import conflict
from evernear.common.store.s3_connection import (
    BACKOFF_S,
    LONGEST_BACKOFF_S,
    MAX_ATTEMPTS,
    MISSING_OBJECT,
    S3Connection,
    required_etag,
    status_of,
)
from evernear.errors import StoreError, TransientStoreError

# Test objects have this prefix, because no key can start with it.
OWN_PREFIX = ".swap/"

_RACERS = 8

_CREATE = {"If-None-Match": "*"}
# The content does not identify a write, because two writers may write equal content.
_WRITE_ID = "x-amz-meta-write-id"


class ConditionalWriter:
    """Writes objects conditionally under ``prefix``, which is empty or ends with a slash."""

    def __init__(self, connection: S3Connection, bucket: str, prefix: str) -> None:
        self._connection, self._bucket, self._prefix = connection, bucket, prefix
        self._uri = f"s3://{bucket}/{prefix}".rstrip("/")

    def put_if(self, key: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str:
        """Write if the object has ``etag`` or, without one, does not exist. Return the new etag.

        Raises:
            ConflictError: another writer was first and this call changed nothing, or the response
                was lost and another writer has written since.
        """
        if self.race_winners != (1, 1):
            raise StoreError(self._explain_unsupported(*self.race_winners))
        written = self._put(self._prefix + key, data, etag, headers)
        if written is None:
            raise conflict(self._uri, key)
        return written

    @cached_property
    def race_winners(self) -> tuple[int, int]:
        """How many of eight concurrent writers create an object, and how many replace it.

        Both are 1 if compare-and-swap works, and 0 if the server rejects the condition. If it
        ignores the condition, or checks it before the write, at least one is above 1.
        """
        name = f"{self._prefix}{OWN_PREFIX}probe-{uuid4().hex}"
        created = self._race(name, None)
        if not created:
            return 0, 0
        try:
            return len(created), len(self._race(name, created[0]))
        finally:
            with suppress(TransientStoreError):  # 16 bytes remain that are never listed
                self._remove(name)

    def _explain_unsupported(self, created: int, replaced: int) -> str:
        return (
            f"{self._connection.endpoint} does not support atomic conditional writes: {created} of {_RACERS} concurrent"
            f" writers created an object and {replaced} replaced it, instead of one each, so two runs could overwrite"
            " each other's champion; use AWS, MinIO, SeaweedFS 4.34 or another server that supports If-None-Match and"
            " If-Match."
        )

    def _race(self, name: str, etag: str | None) -> list[str]:
        # The content differs, because rewriting the current content would keep the etag, and the
        # next writer's condition would also hold.
        entries = [uuid4().bytes for _ in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            etags = racers.map(lambda data: self._put(name, data, etag, {}), entries)
            return [etag for etag in etags if etag is not None]

    def _put(self, name: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """Return the new etag, or None if the condition failed or is not supported.

        If the response is lost and the object is unchanged, the write is sent again. The condition
        lets at most one of the two succeed.
        """
        write_id = uuid4().hex
        conditional = {
            **headers,
            **(_CREATE if etag is None else {"If-Match": f'"{etag}"'}),
            _WRITE_ID: write_id,
        }
        for attempt in range(MAX_ATTEMPTS):
            time.sleep(backoff_s(attempt, BACKOFF_S, LONGEST_BACKOFF_S))
            written, is_answered = self._send(name, data, conditional)
            if written or (is_answered and attempt == 0):
                return written
            current, current_id = self._read_back(name)
            if current_id == write_id:
                return current
            if current != etag:
                return None
        raise TransientStoreError(
            f"{self._connection.endpoint} broke off whenever s3://{self._bucket}/{name} was written, and the object is"
            " unchanged; run again."
        )

    def _send(self, name: str, data: bytes, headers: dict[str, str]) -> tuple[str | None, bool]:
        """Send one conditional PUT. Return the new etag, or None if the condition failed or is not
        supported, and whether the server answered. If not, it may still execute the write."""
        with self._connection.errors("s3:PutObject", self._bucket, name):
            try:
                response = self._connection.put(self._bucket, name, data, headers)
                return required_etag(response.headers.get("etag"), self._connection.endpoint), True
            except (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError):
                return None, False
            except (S3Error, InvalidResponseError) as error:
                status = status_of(error)
                if status in (500, 502, 504):
                    return None, False
                if status in (409, 412, 501) or (isinstance(error, S3Error) and error.code in MISSING_OBJECT):
                    return None, True
                raise

    def _read_back(self, name: str) -> tuple[str | None, str | None]:
        try:
            return self._stat(name)
        except StoreError as error:
            raise TransientStoreError(
                f"{self._connection.endpoint} broke off while s3://{self._bucket}/{name} was written, and it is not"
                f" known whether it was, since it cannot be read either: {error}"
            ) from error

    def _stat(self, name: str) -> tuple[str | None, str | None]:
        """The etag of an object and the id of its write, or two Nones."""
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
