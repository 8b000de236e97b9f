"""A lease for the process that deletes unneeded objects. While a process holds the lease, the steps
of runs wait.

A step first records that it is running. After that, the step waits until the lease is released. A
process that deletes objects first acquires the lease. After that, the process looks for running
steps. Therefore, at least one of the two processes always sees the other.

The object `KEY` contains the name of the process that holds the lease. A thread of this process
rewrites the object every `RENEW_S` seconds. If the object does not change for `EXPIRES_S` seconds,
the process that holds the lease was killed. A waiting process then takes over the lease. Each
process uses only its local clock, so the clocks of the machines may differ.
"""

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from evernear.common.frozen import Frozen
from evernear.common.store.base import Store
from evernear.errors import BusyError, ConflictError, EvernearError

KEY = "maintenance/prune.json"
RENEW_S = 10.0
EXPIRES_S = 60.0
_POLL_S = 0.5


class _Holder(Frozen):
    """The object at `KEY`."""

    by: str = ""
    """The process that holds the lease. Empty if no process does."""
    token: str
    """A value that is different each time the object is written, so that an earlier etag never
    recurs."""

    @classmethod
    def now(cls, by: str) -> "_Holder":
        return cls(by=by, token=uuid.uuid4().hex)


class Lease:
    """The lease, as a context manager.

    ``by`` is a command, such as "evernear store prune", and its process. Waiting processes show
    ``by`` in messages.
    """

    def __init__(self, store: Store, by: str) -> None:
        self._store, self._by = store, by
        self._etag: str | None = None
        self._renewed_s = 0.0
        self._lock, self._released = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        """Acquire the lease. If the holder was killed, wait until the lease expires.

        Raises:
            BusyError: a different process holds the lease.
        """
        _wait(self._store, lambda holder, changed: _refuse(holder) if changed else None)
        stored = self._store.find(KEY)
        self._etag = stored[1] if stored else None
        self._write(self._by)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease, unless a different process took it over."""
        self._released.set()
        self._thread.join()
        with suppress(EvernearError):  # it expires
            self._write("")

    def require(self) -> None:
        """Check that this process still holds the lease. Call this before each deletion.

        Raises:
            ConflictError: this process was suspended so long that a different process
                may have taken over the lease.
            StoreError: the store fails.
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
    """Wait until no process deletes objects. ``report`` is called once if a wait is necessary.

    Raises:
        StoreError: the store fails.
    """
    reported: list[str] = []

    def report_once(holder: str, changed: bool) -> None:
        if not reported:
            reported.append(holder)
            report(f"waiting for {holder}")

    _wait(store, report_once)


def _wait(store: Store, while_held: Callable[[str, bool], None]) -> None:
    """Call ``while_held`` repeatedly until the lease is released.

    The arguments are the name of the holder, and whether the holder has renewed the lease.
    """
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
