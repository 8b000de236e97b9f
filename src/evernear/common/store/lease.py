"""A lease for the process that deletes unneeded objects, on which the steps of runs wait.

A step first records that it is running, then waits until the lease is released. A process that
deletes first acquires the lease, then looks for running steps, so one always sees the other.

The object `KEY` names the holder, which rewrites it every `RENEW_S` seconds in a thread. If it does
not change for `EXPIRES_S` seconds, the holder was killed, and a waiting process takes over. Each
process uses only its own clock, so the machines' clocks may differ.
"""

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from evernear.common.frozen import Document
from evernear.common.store.base import Store
from evernear.errors import BusyError, ConflictError, EvernearError

KEY = "maintenance/prune.json"
RENEW_S = 10.0
EXPIRES_S = 60.0
_POLL_S = 0.5


class _Holder(Document):
    by: str = ""
    token: str
    """Differs in each write, so that an earlier etag never recurs."""

    @classmethod
    def now(cls, by: str) -> "_Holder":
        return cls(by=by, token=uuid.uuid4().hex)


class Lease:
    """``by`` is a command, such as "evernear store prune", and its process, for messages."""

    def __init__(self, store: Store, by: str) -> None:
        self._store, self._by = store, by
        self._etag: str | None = None
        self._renewed_s = 0.0
        self._lock, self._released = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        """Acquire the lease. If the holder was killed, wait until it expires.

        Raises:
            BusyError: another process holds the lease.
        """
        _wait(self._store, lambda holder, changed: _refuse(holder) if changed else None)
        stored = self._store.find(KEY)
        self._etag = stored[1] if stored else None
        self._write(self._by)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._thread.join()
        with suppress(EvernearError):  # it expires
            self._write("")

    def require(self) -> None:
        """Check that this process still holds the lease. Call this before each deletion.

        Raises:
            ConflictError: this process was suspended so long that another may have taken over.
        """
        with self._lock:
            if time.monotonic() - self._renewed_s > 2 * RENEW_S:
                self._write(self._by)

    def _renew_until_released(self) -> None:
        while not self._released.wait(RENEW_S):
            with suppress(EvernearError), self._lock:  # `require` repeats it
                self._write(self._by)

    def _write(self, by: str) -> None:
        now_s = time.monotonic()
        try:
            self._etag = self._store.put_if(KEY, _Holder.now(by).to_json(), self._etag)
        except ConflictError:
            raise ConflictError(
                f"Another process changed {KEY} in {self._store.uri} in the meantime, so {self._by} stopped; run again."
            ) from None
        self._renewed_s = now_s


def wait_for_release(store: Store, report: Callable[[str], None]) -> None:
    """Wait until no process deletes objects. ``report`` is called once if it has to wait."""
    reported: list[str] = []

    def report_once(holder: str, changed: bool) -> None:
        if not reported:
            reported.append(holder)
            report(f"waiting for {holder}")

    _wait(store, report_once)


def _wait(store: Store, while_held: Callable[[str, bool], None]) -> None:
    """Call ``while_held(holder, renewed)`` until the lease is released."""
    seen, since_s = "", time.monotonic()
    while stored := store.find(KEY):
        data, etag = stored
        holder = _Holder.from_json(data, f"{store.uri}/{KEY}", "remove it").by
        if not holder:
            return
        if etag != seen:
            changed, seen, since_s = bool(seen), etag, time.monotonic()
            while_held(holder, changed)
        elif time.monotonic() - since_s > EXPIRES_S:
            try:
                store.put_if(KEY, _Holder.now("").to_json(), etag)
            except ConflictError:
                continue
            return
        time.sleep(_POLL_S)


def _refuse(holder: str) -> None:
    raise BusyError(f"{holder} deletes objects at the moment; wait until it has ended.")
