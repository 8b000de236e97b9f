"""One process at a time, in one working directory."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from evernear.disk import disk_errors
from evernear.errors import BusyError

TIMEOUT_S = 300  # longer than a server or a release takes to come up


@contextmanager
def exclusively(path: Path, busy: str) -> Generator[None]:
    """Hold the lock file ``path``, which the system lets go of when the process dies.

    Raises:
        BusyError: another process holds it for too long; ``busy`` is the sentence.
        StoreError: it cannot be written.
    """
    lock = FileLock(path, timeout=TIMEOUT_S)
    with disk_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:  # an OSError itself
            raise BusyError(busy) from None
    try:
        yield
    finally:
        lock.release()
