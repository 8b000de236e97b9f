"""Look up the gallery images for the row numbers in a prediction, without torch and FAISS.

An index contains no hashes of its images. Its rows are in the order of the images in the snapshot
from which the release was built (`evernear.data.gallery`), so a row number identifies a shard and a
row in it. Each call checks that the store still has the shard, even if it is cached, because
`evernear forget` deletes the shards of forgotten images.
"""

import threading
from typing import NamedTuple

from evernear.common.store import Store
from evernear.data.books import file_names, opened_books
from evernear.data.gallery import gallery_place, image_at
from evernear.data.manifest import find_manifest
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset, remove_cached
from evernear.data.writer import shard_key
from evernear.release.manifest import ReleaseManifest, is_version
from evernear.release.registry import Registry
from evernear.serving.decoding import encode_png

OPEN_SNAPSHOTS = 4
"""Each open snapshot has its manifest and the hashes of its verified shards in memory."""


class GalleryImage(NamedTuple):
    """A gallery image as the network receives it. ``pixels`` is a uint8 array of shape (H, W, C),
    in the size that the release's preprocessing specifies."""

    label: str
    digest: str
    """The hexadecimal hash that identifies the image in its snapshot."""
    pixels: Pixels

    def png(self) -> bytes:
        return encode_png(self.pixels)


class GalleryImages:
    """The gallery images of all releases in a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._registry = Registry(store)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[ReleaseManifest, Dataset]] = {}

    def find(self, version: str, row: int) -> GalleryImage | None:
        """The image at ``row`` in the gallery, or None if it was forgotten or its snapshot pruned.

        Raises:
            IntegrityError: the gallery has no such row, or a shard is damaged.
        """
        with self._lock:
            opened = self._opened(version)
        if opened is None:
            return None
        release, dataset = opened
        place = gallery_place(dataset, release.joined_gallery, row)
        key = shard_key(release.dataset_name, place.images.shard.sha256)
        if not any(info.key == key for info in self._store.list(key)):
            remove_cached(place.images.shard.sha256)
            return None
        block = image_at(dataset, place)
        return GalleryImage(dataset.labels[block.labels[0]], block.digests[0].tobytes().hex(), block.images[0])

    def names(self, version: str, digest: str) -> tuple[str, ...]:
        """The names of an image's source files. Empty if the store no longer has the snapshot.

        Each call reads the snapshot's table of files: about 100 bytes per file.

        Raises:
            IntegrityError: the table is damaged.
        """
        with self._lock:
            opened = self._opened(version)
        if opened is None:
            return ()
        release, _ = opened
        # `evernear forget` may have rewritten the snapshot's tables, so read the current manifest.
        manifest = find_manifest(self._store, release.dataset_name, release.dataset_digest)
        if manifest is None:
            return ()
        image = bytes.fromhex(digest)
        with opened_books(self._store, manifest, ("files",)) as books:
            return file_names(books, manifest.source, [image]).get(image, ())

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
