"""Storage for objects by kind, namespace and name, and for the history that watches read."""

import json
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from tests.loopback.kubernetes.kinds import Kind

Object = dict[str, Any]
Key = tuple[str, str]
_HISTORY = 1000  # events; requests for older ones get a 410


@dataclass(frozen=True)
class Change:
    """One write: the object before (None on creation) and after (None on deletion), as JSON."""

    version: int
    kind: Kind
    before: str | None
    after: str | None


class Store:
    """Objects and their history, guarded by one lock; ``changed`` is notified of every write.

    Objects are stored as text, so callers never share mutable state.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1
        self.oldest = 0  # changes up to this version are discarded
        self._objects: defaultdict[Kind, dict[Key, str]] = defaultdict(dict)
        self._history: deque[Change] = deque()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return an object, or None."""
        with self.changed:
            text = self._objects[kind].get((namespace, name))
            return None if text is None else json.loads(text)

    def all(self, kind: Kind, namespace: str = "") -> list[Object]:
        """Return the objects of a kind in one namespace or in all, sorted by namespace and name."""
        with self.changed:
            return [json.loads(text) for key, text in sorted(self._objects[kind].items()) if namespace in ("", key[0])]

    def everything(self) -> list[tuple[Kind, Object]]:
        """Return every object."""
        with self.changed:
            return [(kind, json.loads(text)) for kind, texts in self._objects.items() for text in texts.values()]

    def put(self, kind: Kind, subject: Object) -> Object:
        """Store an object under a new resourceVersion and return it."""
        with self.changed:
            key = _key(kind, subject)
            self.version += 1
            subject = {**subject, "metadata": {**subject["metadata"], "resourceVersion": str(self.version)}}
            text = json.dumps(subject)
            self._record(Change(self.version, kind, self._objects[kind].get(key), text))
            self._objects[kind][key] = text
            return json.loads(text)

    def remove(self, kind: Kind, subject: Object) -> Object:
        """Delete an object and return its last state."""
        with self.changed:
            before = self._objects[kind].pop(_key(kind, subject))
            self.version += 1
            self._record(Change(self.version, kind, before, None))
            return json.loads(before)

    def changes(self, kind: Kind, after: int) -> list[Change]:
        """Return the writes to objects of a kind after a version, oldest first."""
        with self.changed:
            return [change for change in self._history if change.version > after and change.kind == kind]

    def expire(self) -> None:
        """Discard the history, as a compaction does."""
        with self.changed:
            self._history.clear()
            self.version += 1
            self.oldest = self.version
            self.changed.notify_all()

    def _record(self, change: Change) -> None:
        self._history.append(change)
        while len(self._history) > _HISTORY:
            self.oldest = self._history.popleft().version
        self.changed.notify_all()


def deep_copy(subject: Object) -> Object:
    """Return a deep copy of an object."""
    return json.loads(json.dumps(subject))


def _key(kind: Kind, subject: Object) -> Key:
    metadata = subject["metadata"]
    return (metadata.get("namespace", "") if kind.namespaced else "", metadata["name"])
