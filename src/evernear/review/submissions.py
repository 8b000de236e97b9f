"""Images that a person sent to review from the console: in the queue at once, with the original file.

::

    review/submitted/<sha256 of the file>.json    a `Submission`

They are deleted like logged queries: at the age ``watch.query_retention_s``, and by `evernear forget`.
"""

import base64
from collections.abc import Collection
from datetime import datetime

from pydantic import AwareDatetime, Field

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.errors import DataError, IntegrityError
from evernear.review.queue import Item
from evernear.serving.decoding import inspect_image
from evernear.serving.embedding_codec import MAX_CHARACTERS, decode_embedding
from evernear.serving.responses import Prediction
from evernear.settings.section import MAX_PIXELS

SUBMITTED = "review/submitted/"
MAX_ITEMS = 1000
"""Newest submissions that are read."""
MAX_FILE_BYTES = 16 * 2**20
"""Largest file that is stored."""


class Submission(Frozen, allow_inf_nan=False):
    """An image and the answer to it."""

    at: AwareDatetime
    who: str
    dist: float
    unknown: bool
    candidates: tuple[str, ...]
    version: str
    embedding: str = Field(default="", max_length=MAX_CHARACTERS)
    """The embedding of `version` (`evernear.serving.embedding_codec`), if the answer had one."""
    file: str = Field(repr=False)
    """The original file, in base64."""

    def item(self) -> Item:
        """The submission as an item of the queue."""
        image = base64.b64decode(self.file)
        return Item(
            id=sha256_bytes(image),
            image=image,
            at=self.at,
            unknown=self.unknown,
            dist=self.dist,
            candidates=self.candidates,
            version=self.version,
            embedding=decode_embedding(self.embedding),
        )


class Submissions:
    """The submissions of a store. They never change, so each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._items: dict[str, Item] = {}

    def add(self, image: bytes, prediction: Prediction, who: str, now: datetime) -> str:
        """Store an image for review; returns its id. Adding it again changes only the answer.

        ``prediction`` is the answer of a server, which decoded the image. Here only its structure is checked.

        Raises:
            DataError: the file is larger than `MAX_FILE_BYTES`, or not an image.
            StoreError: the store is unavailable.
        """
        if len(image) > MAX_FILE_BYTES:
            raise DataError(f"The image has {len(image):,} bytes; at most {MAX_FILE_BYTES:,} can be sent to review.")
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
            file=base64.b64encode(image).decode(),
        )
        digest = sha256_bytes(image)
        self._store.put(_key(digest), submission.to_json())
        self._items.pop(digest, None)
        return digest

    def pending(self, answered: Collection[str], limit: int) -> list[Item]:
        """The newest ``limit`` items that are not ``answered``, newest first. A damaged one is skipped.

        Raises:
            StoreError: the store is unavailable.
        """
        infos = sorted(self._store.list(SUBMITTED), key=lambda info: info.modified, reverse=True)[:MAX_ITEMS]
        images = [info.key.removeprefix(SUBMITTED).removesuffix(".json") for info in infos]
        found = (self.find(image) for image in images if image not in answered)
        items: list[Item] = []
        for item in found:
            if item is not None:
                items.append(item)
            if len(items) == limit:
                break
        return items

    def find(self, image: str) -> Item | None:
        """The item with the id ``image``; None if it was not sent to review, or is damaged."""
        if image not in self._items:
            stored = self._store.find(_key(image))
            if stored is None:
                return None
            try:
                self._items[image] = Submission.from_json(stored[0], _key(image)).item()
            except (IntegrityError, ValueError):
                return None
        return self._items[image]


def remove_submissions(store: Store, before: datetime) -> int:
    """Remove images that were sent before ``before``, answered or not, and return their number.

    Raises:
        StoreError: the store rejects the request.
    """
    old = [info.key for info in store.list(SUBMITTED) if info.modified < before]
    for key in old:
        store.delete(key)
    return len(old)


def _key(image: str) -> str:
    return f"{SUBMITTED}{image}.json"
