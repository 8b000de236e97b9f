"""A lease that one process holds and renews until it releases it or is killed.

A `LeaseRecord` says where the lease is stored: `StoreRecord` in a store, and
`evernear.deployment.kubernetes.lease` in a cluster. Both replace it only if nobody else changed it,
so a conflict tells a holder that it was replaced. As in client-go's leader election, a process
takes over from a holder whose record it saw unchanged for the whole duration, and compares no
clocks of two machines.

The lease in the store is for processes that delete unneeded objects. The steps of runs wait for it:
a step first records that it is running, then waits. A process that deletes first acquires the
lease, then looks for running steps, so one always sees the other.
"""

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, Self

from evernear.common.frozen import Document
from evernear.common.store import Store
from evernear.errors import BusyError, ConflictError, EvernearError

KEY = "maintenance/prune.json"
DURATION_S = 60.0


class Held(NamedTuple):
    """A lease as a process read or wrote it. ``holder`` is empty after a release."""

    holder: str
    written: object
    """Differs after each renewal."""
    duration_s: float
    unchanged: Any
    """What `LeaseRecord.write` compares with the stored lease."""


class Pace(NamedTuple):
    renew_s: float
    """Seconds between two renewals of the holder."""
    poll_s: float
    """Seconds between two reads of a process that waits."""


class LeaseRecord(Protocol):
    """Where a lease is stored. ``identity`` names this process and differs for each lease."""

    identity: str
    pace: Pace

    def read(self) -> Held | None: ...

    def write(self, holder: str, held: Held | None) -> Held:
        """Create the lease, or replace ``held``.

        Raises:
            ConflictError: a different process changed it, or the response to an earlier attempt was
                lost.
        """
        ...

    def busy(self, held: Held) -> BusyError: ...

    def lost(self, holder: str) -> EvernearError:
        """The error of a process that was replaced by ``holder``."""
        ...


class Lease:
    """A context manager that holds and renews the lease of ``record``."""

    def __init__(self, record: LeaseRecord) -> None:
        self._record = record
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Acquire the lease. If its holder was killed, wait until it expires.

        Raises:
            BusyError: another process holds and renews the lease.
        """
        self._held, self._renewed_s = _write_when_free(self._record, self._record.identity, self._refuse)
        self._lost: str | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._thread.join()
        with suppress(EvernearError):  # it expires, or was lost
            self._record.write("", self._held)

    def require(self) -> None:
        """Check that this process still holds the lease. Call this before each change.

        Raises:
            EvernearError: another process replaced this one, which was suspended or disconnected,
                or renewals are overdue and the next one failed.
        """
        with self._lock:
            if self._lost is None and time.monotonic() - self._renewed_s > 2 * self._record.pace.renew_s:
                self._renew()
            if self._lost is not None:
                raise self._record.lost(self._lost)

    def _refuse(self, held: Held, renewed: bool) -> None:
        if renewed:
            raise self._record.busy(held)

    def _renew_until_released(self) -> None:
        while self._lost is None and not self._released.wait(self._record.pace.renew_s):
            with suppress(EvernearError), self._lock:  # the next renewal or `require` repeats it
                self._renew()

    def _renew(self) -> None:
        started_s = time.monotonic()
        try:
            self._held = self._record.write(self._record.identity, self._held)
        except ConflictError:
            held = self._record.read()
            if held is None or held.holder != self._record.identity:
                self._lost = held.holder if held else ""
                return
            self._held = held
        self._renewed_s = started_s


def _write_when_free(
    record: LeaseRecord, holder: str, while_held: Callable[[Held, bool], None]
) -> tuple[Held | None, float]:
    """Write ``holder`` when the lease is free or expired, and return the lease with the time before
    the write. If ``holder`` is empty, a free lease stays as it is. ``while_held`` is called with
    another's lease when it is first read, and again after each renewal."""
    seen, since_s = None, 0.0
    while True:
        now_s = time.monotonic()
        held = record.read()
        if (held.holder if held else "") == holder:  # it is free, or the response to an earlier attempt was lost
            return held, now_s
        if held is None or not held.holder or (seen == held.written and now_s - since_s > held.duration_s):
            with suppress(ConflictError):  # a different process was first
                return record.write(holder, held), now_s
        elif seen != held.written:
            while_held(held, seen is not None)
            seen, since_s = held.written, time.monotonic()
        time.sleep(record.pace.poll_s)


class _Holder(Document):
    by: str = ""
    token: str
    """Begins with a part that is the same for the whole lease, and differs in each write, so that
    an earlier etag never recurs."""


class StoreRecord:
    """The lease in a store. ``by`` is a command, such as "`evernear store prune`", and its process,
    for messages."""

    def __init__(self, store: Store, by: str = "", duration_s: float = DURATION_S) -> None:
        self._store, self._by, self._duration_s = store, by, duration_s
        self.identity = f"{by} {uuid.uuid4().hex}"
        self.pace = Pace(renew_s=duration_s / 6, poll_s=duration_s / 120)

    def read(self) -> Held | None:
        stored = self._store.find(KEY)
        if stored is None:
            return None
        holder = _Holder.from_json(stored[0], f"{self._store.uri}/{KEY}", "remove it")
        return self._held(holder, stored[1])

    def write(self, holder: str, held: Held | None) -> Held:
        by, _, own = holder.rpartition(" ")
        written = _Holder(by=by, token=f"{own}-{uuid.uuid4().hex}")
        return self._held(written, self._store.put_if(KEY, written.to_json(), held.unchanged if held else None))

    def busy(self, held: Held) -> BusyError:
        return BusyError(f"{_command(held.holder)} deletes objects at the moment; wait until it has ended.")

    def lost(self, holder: str) -> ConflictError:
        return ConflictError(
            f"Another process changed {KEY} in {self._store.uri} in the meantime, so {self._by} stopped; run again."
        )

    def _held(self, holder: _Holder, etag: str) -> Held:
        identity = f"{holder.by} {holder.token.partition('-')[0]}" if holder.by else ""
        return Held(identity, etag, self._duration_s, etag)


def wait_for_release(store: Store, report: Callable[[str], None]) -> None:
    """Wait until no process deletes objects. ``report`` is called once if it has to wait."""

    def report_once(held: Held, renewed: bool) -> None:
        if not renewed:
            report(f"waiting for {_command(held.holder)}")

    _write_when_free(StoreRecord(store), "", report_once)


def _command(holder: str) -> str:
    return holder.rpartition(" ")[0]
