"""Compare-and-swap in S3, on servers that know conditional writes and on those that do not.

AWS, MinIO and newer SeaweedFS write under ``If-None-Match`` and ``If-Match``. Others refuse these headers
(OpenStack Swift), ignore them and overwrite (SeaweedFS before 3.97), or look and write in two steps, so that
several writers win at once (SeaweedFS 4.16, Swift). So the server is tried first, by a race of our own; where
it lets more than one writer win, writers take a lease. docs/decisions/0011-object-store.md says what either
way guarantees.
"""

import random
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from io import BytesIO
from uuid import uuid4

import urllib3
from minio.error import S3Error

from evernear.errors import Conflict, StoreError
from evernear.store.base import lost
from evernear.store.connection import ABSENT, Connection

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


class Swapper:
    """Conditional writes below ``prefix`` (empty, or ending in a slash) of a bucket."""

    def __init__(self, connection: Connection, bucket: str, prefix: str) -> None:
        self._connection, self._bucket, self._prefix = connection, bucket, prefix
        self._uri = f"s3://{bucket}/{prefix}".rstrip("/")

    def put_if(self, key: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str:
        """Write ``data`` with ``headers`` only if the object has ``etag`` (None: there is none); its new etag.

        Raises:
            Conflict: somebody else wrote first; nothing was changed.
            StoreError: the server cannot be reached or refuses, another writer's lease does not end, or the answer
                was lost, and with it whether the object was written.
        """
        write = self._conditional if self.winners == (1, 1) else self._leased
        written = write(self._prefix + key, data, etag, headers)
        if written is None:
            raise Conflict(lost(self._uri, key))
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
            self._remove(name)

    def _race(self, name: str, etag: str | None) -> list[str]:
        """The etags of those who were told that they won."""
        # No content twice: who writes what is there already leaves the etag as it was, for the next one to win too.
        entries = [uuid4().bytes for _ in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            told = racers.map(lambda data: self._conditional(name, data, etag, {}), entries)
            return [etag for etag in told if etag is not None]

    def _conditional(self, name: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """The etag of what the server wrote; None where the condition did not hold or is not known to it."""
        condition = _CREATE if etag is None else {"If-Match": f'"{etag}"'}
        with self._connection.errors("s3:PutObject", self._bucket, name):
            try:
                answer = self._connection.put(self._bucket, name, data, {**headers, **condition})
            except (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError) as error:
                raise StoreError(self._unknown(name)) from error
            if answer.status == 200:
                return answer.headers["etag"].strip('"')
            if answer.status in (409, 412, 501):
                return None
            if answer.status in (500, 502, 504):
                raise StoreError(self._unknown(name))
            refusal = S3Error.fromxml(answer)
            if refusal.code in ABSENT:
                return None
            raise refusal

    def _unknown(self, name: str) -> str:
        return (
            f"{self._connection.endpoint} broke off while s3://{self._bucket}/{name} was written, so it is not known"
            " whether it was; run again."
        )

    def _leased(self, name: str, data: bytes, etag: str | None, headers: dict[str, str]) -> str | None:
        """The etag of what was written while no other writer held a lease; None where ``etag`` is not the held one."""
        client = self._connection.client
        with self._lease(name) as since:
            with self._connection.errors("s3:GetObject", self._bucket, name):
                try:
                    held = str(client.stat_object(self._bucket, name).etag)
                except S3Error as error:
                    if error.code not in ABSENT:
                        raise
                    held = None
            if held != etag:
                return None
            if time.monotonic() - since > _HOLD_S:
                raise StoreError(f"{self._connection.endpoint} is too slow to hold a lease there; nothing was written.")
            if all(self.winners):
                # Where the condition is at least looked at, it stops a writer that takes the server for atomic.
                return self._conditional(name, data, etag, headers)
            with self._connection.errors("s3:PutObject", self._bucket, name):
                written = client.put_object(self._bucket, name, BytesIO(data), len(data), metadata=dict(headers))
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
                raise StoreError(
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
            self._remove(mine)

    def _remove(self, name: str) -> None:
        with self._connection.errors("s3:DeleteObject", self._bucket, name):
            self._connection.client.remove_object(self._bucket, name)
