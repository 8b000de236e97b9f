"""The review queue: uncertain live queries that the servers logged with their images, without those
that people have already answered."""

import base64
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime

from evernear.common.disk import sha256_bytes
from evernear.common.store import ObjectInfo, Store
from evernear.console.listing import Listing
from evernear.data.image_file import inspect
from evernear.errors import DataError, IntegrityError
from evernear.serving.query_log_files import (
    MAX_FILE_BYTES,
    QUERIES,
    LoggedQuery,
    closed_at,
    decode_embedding,
    parse_file,
)

MAX_FILES = 200
"""Maximum number of log files to read, newest first. Files larger than `MAX_FILE_BYTES` are
skipped."""
CACHED_BYTES = 32 * 2**20
"""Maximum total size of logged images that are cached in memory."""
MAX_PIXELS = 2**20
"""Maximum number of pixels in a logged image, which has the size of the network's input."""


class Item(NamedTuple):
    """An image to label. ``id`` is the sha256 of the image file, so two logged queries with the
    same image are one item. ``image`` is the PNG file of the network's input, or a thumbnail of an
    image that a user submitted."""

    id: str
    image: bytes
    at: AwareDatetime
    unknown: bool
    dist: float
    candidates: tuple[str, ...]
    version: str = ""
    """The release that answered the query, or an empty string if it is unknown."""
    embedding: NDArray[np.float32] | None = None
    """The release's embedding (D,) of the image, or None if the log has none."""


class _LogFile(NamedTuple):
    """``items`` is None if they are not cached."""

    written: tuple[AwareDatetime, int]
    """The time of the last change and the size in bytes, which detect a change of the file.
    `evernear forget` rewrites log files."""
    ids: frozenset[str]
    items: tuple[Item, ...] | None

    @property
    def size_bytes(self) -> int:
        return sum(len(item.image) for item in self.items or ())


class Queue:
    """The queue of a store. It is thread-safe. Items from the newest log files are cached in
    memory, up to `CACHED_BYTES` of images."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listing = Listing(store, QUERIES)
        self._lock = threading.Lock()
        self._files: dict[str, _LogFile] = {}

    def pending(self, answered: Collection[str], limit: int) -> list[Item]:
        """The newest ``limit`` items that are not in ``answered``, newest first. Damaged files and
        images are skipped."""
        items: dict[str, Item] = {}
        answered = frozenset(answered)
        for info in self._infos(self._listing.now()):
            if self._ids(info, frozenset("?")) <= answered:
                continue
            for item in self._read(info):
                if item.id not in answered:
                    items.setdefault(item.id, item)
                if len(items) == limit:
                    return list(items.values())
        return list(items.values())

    def find(self, image: str) -> Item | None:
        """The item with the ID ``image``, or None if the log no longer contains it."""
        for info in self._infos(self._listing.recent()):
            if image in self._ids(info, frozenset([image])):
                for item in self._read(info):
                    if item.id == image:
                        return item
        return None

    def _infos(self, listed: Mapping[str, ObjectInfo]) -> list[ObjectInfo]:
        """The newest log files, newest first. Cached items from other files are dropped."""
        logs = [info for info in listed.values() if closed_at(info.key) and info.size_bytes <= MAX_FILE_BYTES]
        infos = sorted(logs, key=lambda info: info.key, reverse=True)[:MAX_FILES]
        written = {info.key: _written(info) for info in infos}
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if file.written == written.get(key)}
        return infos

    def _ids(self, info: ObjectInfo, unread: frozenset[str]) -> frozenset[str]:
        file = self._files.get(info.key)
        return file.ids if file else unread

    def _read(self, info: ObjectInfo) -> Sequence[Item]:
        file = self._files.get(info.key)
        if file is not None and file.items is not None:
            return file.items
        items = tuple(item for version, query in _queries(self._store, info.key) if (item := _item(version, query)))
        with self._lock:
            self._files[info.key] = _LogFile(_written(info), frozenset(item.id for item in items), items)
            self._drop_oldest()
        return items

    def _drop_oldest(self) -> None:
        total_bytes = sum(file.size_bytes for file in self._files.values())
        for key in sorted(self._files):  # oldest first
            if total_bytes <= CACHED_BYTES:
                break
            total_bytes -= self._files[key].size_bytes
            self._files[key] = self._files[key]._replace(items=None)


def _written(info: ObjectInfo) -> tuple[AwareDatetime, int]:
    return info.modified, info.size_bytes


def _queries(store: Store, key: str) -> list[tuple[str, LoggedQuery]]:
    """Each with the release that answered it."""
    try:
        stored = store.find(key)  # the watcher may have removed the file
        if stored is None:
            return []
        period, queries = parse_file(stored[0], key)
    except IntegrityError:  # the watcher reports the damage
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
    )
