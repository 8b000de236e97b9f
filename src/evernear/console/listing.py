"""A listing of a store prefix that several readers share for a short time."""

import threading
import time

from evernear.common.store import ObjectInfo, Store

RECENT_S = 2.0
"""Maximum age, in seconds, of a listing that is used to check whether an object still exists."""


class Listing:
    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._listed: tuple[float, dict[str, ObjectInfo]] = (float("-inf"), {})

    def now(self) -> dict[str, ObjectInfo]:
        found = {info.key: info for info in self._store.list(self._prefix)}
        self._listed = (time.monotonic(), found)
        return found

    def recent(self) -> dict[str, ObjectInfo]:
        """Like `now`, but return the last listing if it is younger than `RECENT_S`."""
        with self._lock:
            listed_s, found = self._listed
            return found if time.monotonic() - listed_s < RECENT_S else self.now()
