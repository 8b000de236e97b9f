"""The review queue: uncertain live queries that the servers logged with their images, and images
that users sent from the console, without those that people have already answered.

::

    review/submitted/<sha256 of the file>.json    a `Submission`
    review/originals/<sha256 of the file>         the file as it was sent

To list the submissions, only the small `Submission` objects are read. Like logged queries, they are
deleted after ``watch.query_retention_s`` or by `evernear forget`.
"""

import base64
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from io import BytesIO
from itertools import chain
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime, Field

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Document
from evernear.common.store import ObjectInfo, Store
from evernear.data.image_file import inspect
from evernear.data.preprocess import bit_depth_of, decode_inspected
from evernear.errors import DataError, IntegrityError
from evernear.serving.decoding import inspect_image
from evernear.serving.query_log_files import (
    MAX_CHARACTERS,
    QUERIES,
    LoggedQuery,
    closed_at,
    decode_embedding,
    is_log,
    read_log,
)
from evernear.serving.responses import Prediction
from evernear.settings.section import MAX_PIXELS

MAX_FILES = 200
"""Maximum number of log files to read, newest first."""
CACHED_BYTES = 32 * 2**20
"""Maximum total size of logged images that are cached in memory."""
LOGGED_MAX_PIXELS = 2**20
"""Maximum number of pixels in a logged image, which has the size of the network's input."""
SUBMITTED = "review/submitted/"
ORIGINALS = "review/originals/"
MAX_SUBMISSIONS = 1000
RECENT_S = 2.0
"""Maximum age, in seconds, of a listing that is used to check whether an object still exists."""
SIDE_PX = 192
READERS = 16
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


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
    embedding: NDArray[np.float32] | None = None


class _CachedFile(NamedTuple):
    """A log file. ``items`` is None if they are not cached."""

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
        self._files: dict[str, _CachedFile] = {}

    def pending(self, answered: Collection[str], limit: int) -> list[Item]:
        """The newest ``limit`` items that are not in ``answered``, newest first. Damaged files and
        images are skipped."""
        items: dict[str, Item] = {}
        answered = frozenset(answered)
        infos = self._infos(self._listing.now())
        for first in range(0, len(infos), READERS):
            unknown = [
                info for info in infos[first : first + READERS] if not self._ids(info, frozenset("?")) <= answered
            ]
            for item in chain.from_iterable(read_all(self._read, unknown)):
                if item.id not in answered:
                    items.setdefault(item.id, item)
            if len(items) >= limit:
                break
        return list(items.values())[:limit]

    def find(self, image: str) -> Item | None:
        for info in self._infos(self._listing.recent()):
            if image in self._ids(info, frozenset([image])):
                for item in self._read(info):
                    if item.id == image:
                        return item
        return None

    def _infos(self, listed: Mapping[str, ObjectInfo]) -> list[ObjectInfo]:
        """The newest log files, newest first. Cached items from other files are dropped."""
        infos = sorted(filter(is_log, listed.values()), key=lambda info: info.key, reverse=True)[:MAX_FILES]
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
        log = read_log(self._store, info.key)
        items = tuple(item for query in log.queries if (item := _item(log.period.version, query))) if log else ()
        with self._lock:
            self._files[info.key] = _CachedFile(_written(info), frozenset(item.id for item in items), items)
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


def _item(version: str, query: LoggedQuery) -> Item | None:
    if not query.image:
        return None
    try:
        image = base64.b64decode(query.image, validate=True)
        inspect(image, LOGGED_MAX_PIXELS)
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


class Submission(Document, allow_inf_nan=False):
    at: AwareDatetime
    who: str
    dist: float
    unknown: bool
    candidates: tuple[str, ...]
    version: str
    embedding: str = Field(default="", max_length=MAX_CHARACTERS)
    """The embedding from the release `version` (`evernear.serving.query_log_files`), or an empty
    string if the answer contained none."""
    picture: str = Field(repr=False)

    def item(self, image: str) -> Item:
        """As a queue item. ``image`` is the SHA-256 digest of the file."""
        return Item(
            id=image,
            image=base64.b64decode(self.picture),
            at=self.at,
            unknown=self.unknown,
            dist=self.dist,
            candidates=self.candidates,
            version=self.version,
            embedding=decode_embedding(self.embedding),
        )


class Submissions:
    """The submissions in a store. A submission never changes, so it is read only once. Original
    files are read on demand."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listing = Listing(store, SUBMITTED)
        self._items: dict[str, Item] = {}

    def add(self, image: bytes, prediction: Prediction, who: str, now: datetime) -> str:
        """Store an image for review, and return its ID. If it is already stored, only the answer is
        replaced."""
        inspect_image(image, MAX_PIXELS)
        labels = dict.fromkeys([prediction.pred, *(neighbor.label for neighbor in prediction.neighbors)])
        submission = Submission(
            at=now,
            who=who,
            dist=prediction.dist,
            unknown=prediction.unknown,
            candidates=tuple(labels),
            version=prediction.version,
            embedding=prediction.embedding,
            picture=base64.b64encode(thumbnail(image)).decode(),
        )
        digest = sha256_bytes(image)
        self._store.put(original_key(digest), image)
        self._store.put(_submission_key(digest), submission.to_json())
        self._items.pop(digest, None)
        return digest

    def pending(self, answered: Collection[str], limit: int) -> list[Item]:
        """The newest ``limit`` items that are not in ``answered``, newest first. Damaged
        submissions are skipped."""
        listed = self._listing.now()
        infos = sorted(listed.values(), key=lambda info: info.modified, reverse=True)[:MAX_SUBMISSIONS]
        images = [info.key.removeprefix(SUBMITTED).removesuffix(".json") for info in infos]
        self._items = {image: item for image, item in self._items.items() if _submission_key(image) in listed}
        unanswered = [image for image in images if image not in answered][:limit]
        return [item for item in read_all(self._read, unanswered) if item is not None]

    def find(self, image: str) -> Item | None:
        """The item with the ID ``image``, or None if its submission does not exist or is
        damaged."""
        return self._read(image) if _submission_key(image) in self._listing.recent() else None

    def original(self, image: str) -> bytes | None:
        stored = self._store.find(original_key(image))
        return stored[0] if stored else None

    def _read(self, image: str) -> Item | None:
        if image not in self._items:
            stored = self._store.find(_submission_key(image))
            if stored is None:
                return None
            try:
                self._items[image] = Submission.from_json(stored[0], _submission_key(image)).item(image)
            except (IntegrityError, ValueError):
                return None
        return self._items[image]


def remove_submissions(store: Store, before: datetime) -> int:
    sent = {PurePosixPath(info.key).stem: info.modified < before for info in store.list(SUBMITTED)}
    for info in store.list(ORIGINALS):
        if sent.get(PurePosixPath(info.key).name, info.modified < before):
            store.delete(info.key)
    old = [image for image, is_old in sent.items() if is_old]
    for image in old:
        store.delete(_submission_key(image))
    return len(old)


def original_key(image: str) -> str:
    return f"{ORIGINALS}{image}"


def _submission_key(image: str) -> str:
    return f"{SUBMITTED}{image}.json"


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


def logged_picture(store: Store, key: str, query: str, side_px: int = SIDE_PX) -> bytes:
    """A PNG version of the image of a query in the log file ``key``.

    Raises:
        DataError: the log no longer has the image, or the image is damaged.
    """
    log = read_log(store, key) if key.startswith(QUERIES) and closed_at(key) else None
    row = next((row for row in log.queries if row.id == query), None) if log else None
    if row is None:
        raise DataError("The query log no longer has the image.")
    try:
        return thumbnail(base64.b64decode(row.file or row.image, validate=True), side_px)
    except ValueError:  # includes binascii.Error
        raise DataError("The image in the query log is damaged.") from None


def thumbnail(image: bytes, side_px: int = SIDE_PX) -> bytes:
    """A PNG file of at most ``side_px`` x ``side_px`` pixels."""
    file = inspect(image, MAX_PIXELS)
    picture = decode_inspected(file, bit_depth_of(file) or 16).image
    picture.thumbnail((side_px, side_px))
    buffer = BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def read_all(read: Callable[[_Key], _Value], keys: Sequence[_Key]) -> Iterator[_Value]:
    """Read objects concurrently to hide the store's latency, about 20 ms per read in a cluster.
    Yield the results of ``read``, in the order of ``keys``. Raises the errors of ``read``."""
    if len(keys) < 2:
        yield from map(read, keys)
        return
    with ThreadPoolExecutor(min(READERS, len(keys)), "review-reader") as pool:
        yield from pool.map(read, keys)
