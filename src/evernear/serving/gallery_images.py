"""The gallery images of the rows in an answer.
This module imports neither torch nor FAISS.

An index has no hashes of its images. Its rows follow the order of the snapshot from
which the release was built (`evernear.data.gallery`), so a row leads to a shard and to
a row in it. Each call looks for the shard in the store and not only in a cache, because
`evernear forget` deletes the shards of forgotten images.
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
"""Maximum number of open snapshots.
Each has its manifest and the hashes of checked shards.
"""


class GalleryImage(NamedTuple):
    """A gallery image as the network receives it: uint8 (H, W, C),
    in the size of the release's preprocessing.
    """

    label: str
    digest: str
    """The hash of the image in its snapshot, in hexadecimal."""
    pixels: Pixels

    def png(self) -> bytes:
        """The image as a PNG file."""
        return encode_png(self.pixels)


class GalleryImages:
    """The gallery images of the releases in a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._registry = Registry(store)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[ReleaseManifest, Dataset]] = {}

    def find(self, version: str, row: int) -> GalleryImage | None:
        """The image in ``row`` of a release's gallery,
        or None if the store no longer has the image.

        The store no longer has forgotten images and images of pruned snapshots.

        Raises:
            IntegrityError: the gallery has no such row, a shard is damaged, or an
                earlier version of evernear built the release, so that it does not say
                which train images joined its gallery.
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
        """The source files of the image ``digest``.
        Empty if the store no longer has the snapshot.

        This copies the snapshot's ledger,
        which has about 100 bytes for each image in the dataset.

        Raises:
            IntegrityError: the ledger is damaged.
            StoreError: the store cannot be reached.
        """
        with self._lock:
            opened = self._opened(version)
        if opened is None:
            return ()
        release, dataset = opened
        # `evernear forget` rewrites the ledgers of the remaining snapshots.
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
