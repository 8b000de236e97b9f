"""The review queue: uncertain live queries that the servers logged with their images, minus those answered."""

import base64
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime

from evernear.common.disk import sha256_bytes
from evernear.common.store import Store
from evernear.data.image_file import inspect
from evernear.errors import DataError, IntegrityError
from evernear.serving.embedding_codec import decode_embedding
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
    version: str = ""
    """The release that answered; empty if it is unknown."""
    embedding: NDArray[np.float32] | None = None
    """The image's embedding (D,) by that release; None if the log has none."""
    coordinates: tuple[float, ...] = ()
    """The projected embedding (`evernear.release.drift_baseline`), which logs of earlier versions have as well."""


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
        items = [item for version, query in _queries(self._store, key) if (item := _item(version, query))]
        self._ids[key] = frozenset(item.id for item in items)
        return items


def _queries(store: Store, key: str) -> list[tuple[str, LoggedQuery]]:
    """The queries in a file of the log, each with the release that answered it."""
    try:
        stored = store.find(key)  # the watcher may have removed it
        if stored is None:
            return []
        period, queries = parse_file(stored[0], key)
    except IntegrityError:  # the watcher reports it
        return []
    return [(period.version, query) for query in queries]


def _item(version: str, query: LoggedQuery) -> Item | None:
    if not query.image:
        return None
    try:
        image = base64.b64decode(query.image, validate=True)
        inspect(image, MAX_PIXELS)
    except (ValueError, DataError):
        return None
    return Item(
        id=sha256_bytes(image),
        image=image,
        at=query.at,
        unknown=query.unknown,
        dist=query.dist,
        candidates=query.candidates,
        version=version,
        embedding=decode_embedding(query.embedding),
        coordinates=query.coordinates,
    )
