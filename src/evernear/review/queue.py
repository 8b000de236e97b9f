"""The review queue: uncertain live queries that the servers logged with their images, minus those answered."""

import base64
import hashlib
from typing import NamedTuple

from pydantic import AwareDatetime

from evernear.data.image_file import inspect
from evernear.errors import DataError, IntegrityError
from evernear.serving.query_log import MAX_FILE_BYTES, QUERIES, LoggedQuery, closed_at, parse_file
from evernear.store import Store

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


def pending(store: Store, answered: set[str], limit: int) -> list[Item]:
    """The newest ``limit`` items whose id is not ``answered``, newest first. Damaged files and images are skipped.

    Raises:
        StoreError: the store is unavailable.
    """
    logs = [info for info in store.list(QUERIES) if closed_at(info.key) and info.size_bytes <= MAX_FILE_BYTES]
    items: dict[str, Item] = {}
    for info in sorted(logs, key=lambda info: info.key, reverse=True)[:MAX_FILES]:
        for query in _queries(store, info.key):
            item = _item(query)
            if item and item.id not in answered:
                items.setdefault(item.id, item)
            if len(items) == limit:
                return list(items.values())
    return list(items.values())


def _queries(store: Store, key: str) -> list[LoggedQuery]:
    try:
        found = store.find(key)  # the watcher may have removed it
        return parse_file(found[0], key)[1] if found else []
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
    return Item(hashlib.sha256(image).hexdigest(), image, query.at, query.unknown, query.dist, query.candidates)
