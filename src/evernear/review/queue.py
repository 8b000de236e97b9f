"""The review queue: uncertain live queries that the servers logged with their images, minus those answered."""

import base64
from collections.abc import Collection
from typing import NamedTuple

from pydantic import AwareDatetime

from evernear.common.disk import sha256_bytes
from evernear.common.store import Store
from evernear.data.image_file import inspect
from evernear.errors import DataError, IntegrityError
from evernear.serving.query_log import MAX_FILE_BYTES, QUERIES, LoggedQuery, closed_at, parse_file

MAX_FILES = 200
"""Number of log files to read, newest first: at most `MAX_FILES` times `MAX_FILE_BYTES`."""
MAX_PIXELS = 2**20
"""Largest width times height of a logged image, which has the size of the network's input."""


class Item(NamedTuple):
    """A query to label. ``id`` is the sha256 of its PNG file, so a query logged twice is one item."""

    id: str
    image: bytes
    at: AwareDatetime
    unknown: bool
    dist: float
    candidates: tuple[str, ...]


class Queue:
    """The queue of a store. It caches the ids in each log file, since log files never change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids: dict[str, frozenset[str]] = {}

    def pending(self, answered: Collection[str], limit: int) -> list[Item]:
        """The newest ``limit`` items that are not ``answered``, newest first. Damaged files and images are skipped.

        Raises:
            StoreError: the store is unavailable.
        """
        items: dict[str, Item] = {}
        for key in self._keys():
            if self._ids.get(key, frozenset("?")) <= set(answered):
                continue
            for item in self._read(key):
                if item.id not in answered:
                    items.setdefault(item.id, item)
                if len(items) == limit:
                    return list(items.values())
        return list(items.values())

    def find(self, image: str) -> Item | None:
        """The item with the id ``image``; None if it is no longer in the log."""
        for key in self._keys():
            if key not in self._ids or image in self._ids[key]:
                for item in self._read(key):
                    if item.id == image:
                        return item
        return None

    def _keys(self) -> list[str]:
        logs = [info for info in self._store.list(QUERIES) if closed_at(info.key) and info.size_bytes <= MAX_FILE_BYTES]
        keys = sorted((info.key for info in logs), reverse=True)[:MAX_FILES]
        self._ids = {key: ids for key, ids in self._ids.items() if key in keys}
        return keys

    def _read(self, key: str) -> list[Item]:
        items = [item for query in _queries(self._store, key) if (item := _item(query))]
        self._ids[key] = frozenset(item.id for item in items)
        return items


def _queries(store: Store, key: str) -> list[LoggedQuery]:
    try:
        stored = store.find(key)  # the watcher may have removed it
        return parse_file(stored[0], key)[1] if stored else []
    except IntegrityError:  # the watcher reports it
        return []


def _item(query: LoggedQuery) -> Item | None:
    if not query.image:
        return None
    try:
        image = base64.b64decode(query.image, validate=True)
        inspect(image, MAX_PIXELS)
    except (ValueError, DataError):
        return None
    return Item(sha256_bytes(image), image, query.at, query.unknown, query.dist, query.candidates)
