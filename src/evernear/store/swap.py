"""Compare-and-swap in S3, on servers that know conditional writes and on those that do not.

AWS, MinIO and newer SeaweedFS write under ``If-None-Match`` and ``If-Match``. Others refuse these headers
(OpenStack Swift), ignore them and overwrite (SeaweedFS before 3.97), or look and write in two steps, so that
several writers win at once (SeaweedFS 4.16, Swift). So the server is tried first, by a race of our own; where
it lets more than one writer win, writers take a lease. docs/decisions/0011-object-store.md says what either
way guarantees.

A connection that breaks before the answer arrives does not leave the outcome open: each write carries an id, and
reading the object back shows whether that write made it. MinIO breaks such connections by itself: it refuses the
loser of a race before it has read the body, and resets.
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
from minio.error import S3Error

from evernear.errors import ConflictError, StoreError, TransientStoreError
from evernear.store.base import lost
from evernear.store.connection import ABSENT, BACKOFF_S, TRIES, Connection

# Probes and leases lie under this word, which no key of a store can start with.
OWN = ".swap/"

_RACERS = 8
# A holder begins to write within _HOLD_S or not at all, and what it signed the server refuses 15 minutes later
# (S3's limit): a writer that was frozen cannot overwrite the one who took its stale lease over.
_HOLD_S = 30.0
_STALE_AFTER = timedelta(minutes=20)
_PATIENCE_S = 20.0
_PAUSE_S = (0.05, 0.4)

_CREATE = {"If-None-Match": "*"}
# Not the content: two writers may write the same, and only one of them wins.
_WRITE_ID = "x-amz-meta-write-id"


class _AnswerLostError(Exception):
    """A conditional PUT was sent, and whether the server executed it is unknown."""


class Swapper:
    """Conditional writes below ``prefix`` (empty, or ending in a slash) of a bucket."""

    def __init__(self, connection: Connection, bucket: str, prefix: str) -> None:
        self._connection, self._bucket, self._prefix = connection, bucket, prefix
        self._uri = f"s3://{bucket}/{prefix}".rstrip("/")

    def put_if(self, key: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str:
        """Write ``data`` with ``headers`` only if the object has ``etag`` (None: there is none); its new etag.

        Raises:
            ConflictError: another writer was first and nothing was changed; or the answer was lost and another writer
                has written since.
            TransientStoreError: the server cannot be reached, or another writer's lease does not end.
            StoreError: the server refuses.
        """
        write = self._conditional if self.winners == (1, 1) else self._leased
        written = write(self._prefix + key, data, etag, headers)
        if written is None:
            raise ConflictError(lost(self._uri, key))
        return written

    @cached_property
    def winners(self) -> tuple[int, int]:
        """How many of eight writers at once the server tells that they created an object, and that they replaced it.

        1 and 1 is compare-and-swap; 0 is a server that refuses the condition, more one that ignores it or looks
        and writes in two steps.
        """
        name = f"{self._prefix}{OWN}probe-{uuid4().hex}"
        created = self._race(name, None)
        if not created:
            return 0, 0
        try:
            return len(created), len(self._race(name, created[0]))
        finally:
            with suppress(TransientStoreError):  # the answer counts; 16 bytes that are never listed stay
                self._remove(name)

    def _race(self, name: str, etag: str | None) -> list[str]:
        """The etags of those who were told that they won."""
        # No content twice: who writes what is there already leaves the etag as it was, for the next one to win too.
        entries = [uuid4().bytes for _ in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            told = racers.map(lambda data: self._conditional(name, data, etag, {}), entries)
            return [etag for etag in told if etag is not None]

    def _conditional(
        self, name: str, data: bytes, etag: str | None, headers: dict[str, str], send_before: float = math.inf
    ) -> str | None:
        """The etag of what the server wrote; None where the condition did not hold or is not known to it.

        Where the answer is lost the object is read back. If it is still unchanged, the write is sent again, but not
        after ``send_before`` (`time.monotonic`): the condition lets at most one of both through.
        """
        write_id = uuid4().hex
        conditional = {
            **headers,
            **(_CREATE if etag is None else {"If-Match": f'"{etag}"'}),
            _WRITE_ID: write_id,
        }
        for attempt in range(TRIES):
            time.sleep(BACKOFF_S * attempt)
            if attempt and time.monotonic() > send_before:
                break
            try:
                written = self._send(name, data, conditional)
                if written or attempt == 0:
                    return written
            except _AnswerLostError:
                pass
            current, made_by = self._read_back(name)
            if made_by == write_id:
                return current
            if current != etag:
                return None
        raise TransientStoreError(
            f"{self._connection.endpoint} broke off whenever s3://{self._bucket}/{name} was written, and the object is"
            " unchanged; run again."
        )

    def _send(self, name: str, data: bytes, headers: dict[str, str]) -> str | None:
        """One conditional PUT: the new etag; None where the condition did not hold or is not known to the server.

        Raises:
            _AnswerLostError: the server may have executed it, or may still do so.
        """
        with self._connection.errors("s3:PutObject", self._bucket, name):
            try:
                answer = self._connection.put(self._bucket, name, data, headers)
            except (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError) as error:
                raise _AnswerLostError from error
            if answer.status == 200:
                return answer.headers["etag"].strip('"')
            if answer.status in (409, 412, 501):
                return None
            if answer.status in (500, 502, 504):
                raise _AnswerLostError
            refusal = S3Error.fromxml(answer)
            if refusal.code in ABSENT:
                return None
            raise refusal

    def _read_back(self, name: str) -> tuple[str | None, str | None]:
        """`_stat` after a lost answer."""
        try:
            return self._stat(name)
        except StoreError as error:
            raise TransientStoreError(
                f"{self._connection.endpoint} broke off while s3://{self._bucket}/{name} was written, and it is not"
                f" known whether it was, since it cannot be read either: {error}"
            ) from error

    def _stat(self, name: str) -> tuple[str | None, str | None]:
        """The etag of an object and the id of the write that made it; None and None where there is none."""
        with self._connection.errors("s3:GetObject", self._bucket, name):
            try:
                found = self._connection.client.stat_object(self._bucket, name)
            except S3Error as error:
                if error.code in ABSENT:
                    return None, None
                raise
        return str(found.etag), found.metadata.get(_WRITE_ID) if found.metadata else None

    def _leased(self, name: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """The etag of what was written while no other writer held a lease; None where ``etag`` is not the held one."""
        client = self._connection.client
        with self._lease(name) as since:
            if self._stat(name)[0] != etag:
                return None
            if time.monotonic() - since > _HOLD_S:
                raise TransientStoreError(
                    f"{self._connection.endpoint} is too slow to hold a lease there; nothing was written."
                )
            if all(self.winners):
                # Where the condition is at least looked at, it stops a writer that takes the server for atomic.
                return self._conditional(name, data, etag, headers, since + _HOLD_S)
            write_id = uuid4().hex
            with self._connection.errors("s3:PutObject", self._bucket, name):
                try:
                    written = client.put_object(
                        self._bucket, name, BytesIO(data), len(data), metadata={**headers, _WRITE_ID: write_id}
                    )
                except urllib3.exceptions.HTTPError:
                    current, made_by = self._read_back(name)
                    if made_by != write_id:
                        raise
                    return current
                return str(written.etag)

    @contextmanager
    def _lease(self, name: str) -> Generator[float]:
        """Wait until no other writer is about to write ``name``; gives `time.monotonic` from before that was seen.

        Raises:
            StoreError: the others do not come to an end.
        """
        folder = f"{self._prefix}{OWN}leases/{name.removeprefix(self._prefix).replace('/', '--')}/"
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            since = time.monotonic()
            with self._flag(folder) as others:
                if not others:
                    yield since
                    return
            # All who see each other step back; chance decides who is alone the next time.
            if time.monotonic() > deadline:
                raise TransientStoreError(
                    f"Another writer holds s3://{self._bucket}/{min(others)}; run again. If none is running, one was"
                    f" killed: its lease ends by itself after {_STALE_AFTER.seconds // 60} minutes."
                )
            time.sleep(random.uniform(*_PAUSE_S))  # noqa: S311 (no secret)

    @contextmanager
    def _flag(self, folder: str) -> Generator[list[str]]:
        """Show a flag of our own in ``folder``, and give the other flags there that are not stale.

        Each writer shows its flag before it looks, so of two at least one sees the other, and who sees none is
        alone. That rests on the server listing at once what was written.
        """
        client, mine = self._connection.client, folder + uuid4().hex
        with self._connection.errors("s3:PutObject", self._bucket, mine):
            written = client.put_object(self._bucket, mine, BytesIO(b""), 0)
        try:
            said = written.http_headers.get("date") if written.http_headers else None
            now = parsedate_to_datetime(said) if said else datetime.now(UTC)
            with self._connection.errors("s3:ListBucket", self._bucket, folder):
                flags = {str(flag.object_name): flag for flag in client.list_objects(self._bucket, folder)}
            if flags.pop(mine, None) is None:
                raise StoreError(
                    f"{self._connection.endpoint} does not list what was just written; no pointer can move."
                )
            stale = [
                name for name, flag in flags.items() if flag.last_modified and now - flag.last_modified > _STALE_AFTER
            ]
            for name in stale:
                self._remove(name)
            yield [name for name in flags if name not in stale]
        finally:
            with suppress(TransientStoreError):  # a lease ends by itself, and the write is done
                self._remove(mine)

    def _remove(self, name: str) -> None:
        with self._connection.errors("s3:DeleteObject", self._bucket, name):
            self._connection.client.remove_object(self._bucket, name)
