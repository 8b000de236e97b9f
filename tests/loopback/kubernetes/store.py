"""What the server keeps: objects by kind, namespace and name, and the history that watches read."""

import json
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from loopback.kubernetes.kinds import Kind

Object = dict[str, Any]
Key = tuple[Kind, str, str]
_HISTORY = 1000  # events; who asks for older ones is told 410


@dataclass(frozen=True)
class Change:
    """One write: the object before (None: it is new) and after (None: it is gone), as JSON."""

    version: int
    kind: Kind
    before: str | None
    after: str | None


class Store:
    """Objects and their history, behind one lock; ``changed`` is notified of every write.

    Objects are kept as text, so nobody holds what somebody else changes.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1
        self.oldest = 0  # changes up to this version are forgotten
        self._objects: dict[Key, str] = {}
        self._history: deque[Change] = deque()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """An object, or None."""
        with self.changed:
            found = self._objects.get((kind, namespace, name))
            return None if found is None else json.loads(found)

    def all(self, kind: Kind, namespace: str = "") -> list[Object]:
        """The objects of a kind by namespace and name, of one namespace or of all."""
        with self.changed:
            keys = sorted(key[1:] for key in self._objects if key[0] == kind and namespace in ("", key[1]))
            return [json.loads(self._objects[kind, *key]) for key in keys]

    def everything(self) -> list[tuple[Kind, Object]]:
        """Every object there is."""
        with self.changed:
            return [(key[0], json.loads(text)) for key, text in self._objects.items()]

    def put(self, kind: Kind, subject: Object) -> Object:
        """Keep an object under a new resourceVersion, and return it."""
        with self.changed:
            key = _key(kind, subject)
            self.version += 1
            subject = {**subject, "metadata": {**subject["metadata"], "resourceVersion": str(self.version)}}
            text = json.dumps(subject)
            self._record(Change(self.version, kind, self._objects.get(key), text))
            self._objects[key] = text
            return json.loads(text)

    def remove(self, kind: Kind, subject: Object) -> Object:
        """Forget an object, and return its last state."""
        with self.changed:
            before = self._objects.pop(_key(kind, subject))
            self.version += 1
            self._record(Change(self.version, kind, before, None))
            return json.loads(before)

    def changes(self, kind: Kind, after: int) -> list[Change]:
        """The writes to objects of a kind after a version, oldest first."""
        with self.changed:
            return [change for change in self._history if change.version > after and change.kind == kind]

    def expire(self) -> None:
        """Forget the history, as a compaction does."""
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


def copied(subject: Object) -> Object:
    """An object that may be changed without changing this one."""
    return json.loads(json.dumps(subject))


def _key(kind: Kind, subject: Object) -> Key:
    metadata = subject["metadata"]
    return (kind, metadata.get("namespace", "") if kind.namespaced else "", metadata["name"])
