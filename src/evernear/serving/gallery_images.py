"""The gallery images behind the rows in an answer. Imports neither torch nor FAISS.

An index has no hashes of its images. Its rows follow the order of the snapshot that the release was built from
(`evernear.data.gallery`), so a row leads to a shard and to a row in it. The shard is looked for in the store at each
call, not only in a cache: `evernear forget` deletes the shards of images that it deletes.
"""

import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from evernear.common.store import Store
from evernear.data.gallery import gallery_place, image_at
from evernear.data.ledger import PublishedLedger
from evernear.data.manifest import find_manifest
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset, remove_cached
from evernear.data.snapshots import Snapshots
from evernear.data.writer import shard_key
from evernear.errors import IntegrityError
from evernear.release.manifest import ReleaseManifest, is_version
from evernear.release.registry import Registry
from evernear.serving.decoding import encode_png

OPEN_SNAPSHOTS = 4
"""Snapshots that stay open. Each has the manifest and the hashes of the shards that were checked."""


class GalleryImage(NamedTuple):
    """An image of the gallery as the network sees it: uint8 (H, W, C), the size of the release's preprocessing."""

    label: str
    digest: str
    """The hash of the image in its snapshot, in hexadecimal."""
    pixels: Pixels

    def png(self) -> bytes:
        """The image as a PNG file."""
        return encode_png(self.pixels)


class GalleryImages:
    """The gallery images of the releases in a store, for any number of threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._registry = Registry(store)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[ReleaseManifest, Dataset]] = {}

    def find(self, version: str, row: int) -> GalleryImage | None:
        """The image in ``row`` of the gallery of a release; None if the store no longer has it.

        It does not have images that were forgotten, nor snapshots that were pruned.

        Raises:
            IntegrityError: the gallery has no such row, a shard is damaged, or the release does not say which train
                images joined its gallery, because an earlier version of evernear made it.
            StoreError: the store cannot be reached.
        """
        with self._lock:
            opened = self._opened(version)
        if opened is None:
            return None
        release, dataset = opened
        if release.joined_gallery is None:
            raise IntegrityError(
                f"Release {version} was made by an earlier version of evernear and does not lead to its images; run "
                "`evernear reindex`."
            )
        place = gallery_place(dataset, release.joined_gallery, row)
        key = shard_key(release.dataset_name, place.images.shard.sha256)
        if not any(info.key == key for info in self._store.list(key)):
            remove_cached(place.images.shard.sha256)
            return None
        block = image_at(dataset, place)
        return GalleryImage(dataset.labels[block.labels[0]], block.digests[0].tobytes().hex(), block.images[0])

    def names(self, version: str, digest: str) -> tuple[str, ...]:
        """The files in the source that have the image ``digest``; empty if the store no longer has the snapshot.

        This copies the ledger of the snapshot, about 100 bytes for each image in the dataset.

        Raises:
            IntegrityError: the ledger is damaged.
            StoreError: the store cannot be reached.
        """
        with self._lock:
            opened = self._opened(version)
        if opened is None:
            return ()
        release, dataset = opened
        # `evernear forget` writes the ledgers of the remaining snapshots again.
        manifest = find_manifest(self._store, release.dataset_name, release.dataset_digest)
        if manifest is None:
            return ()
        with tempfile.TemporaryDirectory(prefix="evernear-ledger-") as scratch:
            path = Path(scratch) / "ledger.sqlite"
            Snapshots(self._store, release.dataset_name).fetch_ledger(manifest, path)
            ledger = PublishedLedger(path, dataset.manifest.source)
            try:
                return ledger.names([bytes.fromhex(digest)]).get(bytes.fromhex(digest), ())
            finally:
                ledger.close()

    def _opened(self, version: str) -> tuple[ReleaseManifest, Dataset] | None:
        if version not in self._open:
            record = self._registry.find(version) if is_version(version) else None
            if record is None:
                return None
            dataset = Dataset.find(self._store, record.manifest.dataset_name, record.manifest.dataset_digest)
            if dataset is None:
                return None
            while len(self._open) >= OPEN_SNAPSHOTS:
                self._open.pop(next(iter(self._open)))
            self._open[version] = (record.manifest, dataset)
        return self._open[version]
