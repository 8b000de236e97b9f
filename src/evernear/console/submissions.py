"""Images that users sent from the console to review. They appear in the queue immediately.

::

    review/submitted/<sha256 of the file>.json    a `Submission`
    review/originals/<sha256 of the file>         the file as it was sent

To list the images, only the small `Submission` objects are read. Like logged queries, submissions
are deleted after ``watch.query_retention_s`` or by `evernear forget`.
"""

import base64
from collections.abc import Collection
from datetime import datetime
from itertools import islice
from pathlib import PurePosixPath

from pydantic import AwareDatetime, Field

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.console.listing import Listing
from evernear.console.queue import Item
from evernear.console.thumbnails import thumbnail
from evernear.errors import DataError, IntegrityError
from evernear.serving.decoding import inspect_image
from evernear.serving.query_log_files import MAX_CHARACTERS, decode_embedding
from evernear.serving.responses import Prediction
from evernear.settings.section import MAX_PIXELS

SUBMITTED = "review/submitted/"
ORIGINALS = "review/originals/"
MAX_ITEMS = 1000
MAX_FILE_BYTES = 16 * 2**20


class Submission(Frozen, allow_inf_nan=False):
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
    """A `thumbnail` of the image file, in base64."""

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
        replaced.

        Raises:
            DataError: the file is larger than `MAX_FILE_BYTES` or is not an image.
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
            picture=base64.b64encode(thumbnail(image)).decode(),
        )
        digest = sha256_bytes(image)
        self._store.put(original_key(digest), image)
        self._store.put(_key(digest), submission.to_json())
        self._items.pop(digest, None)
        return digest

    def pending(self, answered: Collection[str], limit: int) -> list[Item]:
        """The newest ``limit`` items that are not in ``answered``, newest first. Damaged
        submissions are skipped."""
        listed = self._listing.now()
        infos = sorted(listed.values(), key=lambda info: info.modified, reverse=True)[:MAX_ITEMS]
        images = [info.key.removeprefix(SUBMITTED).removesuffix(".json") for info in infos]
        self._items = {image: item for image, item in self._items.items() if _key(image) in listed}
        found = (self._read(image) for image in images if image not in answered)
        return list(islice((item for item in found if item is not None), limit))

    def find(self, image: str) -> Item | None:
        """The item with the ID ``image``, or None if its submission does not exist or is
        damaged."""
        return self._read(image) if _key(image) in self._listing.recent() else None

    def original(self, image: str) -> bytes | None:
        stored = self._store.find(original_key(image))
        return stored[0] if stored else None

    def _read(self, image: str) -> Item | None:
        if image not in self._items:
            stored = self._store.find(_key(image))
            if stored is None:
                return None
            try:
                self._items[image] = Submission.from_json(stored[0], _key(image)).item(image)
            except (IntegrityError, ValueError):
                return None
        return self._items[image]


def remove_submissions(store: Store, before: datetime) -> int:
    """Remove all images that were sent before the time ``before``, and return their number."""
    sent = {PurePosixPath(info.key).stem: info.modified < before for info in store.list(SUBMITTED)}
    for info in store.list(ORIGINALS):
        if sent.get(PurePosixPath(info.key).name, info.modified < before):
            store.delete(info.key)
    old = [image for image, is_old in sent.items() if is_old]
    for image in old:
        store.delete(_key(image))
    return len(old)


def original_key(image: str) -> str:
    return f"{ORIGINALS}{image}"


def _key(image: str) -> str:
    return f"{SUBMITTED}{image}.json"
