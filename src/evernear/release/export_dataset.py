"""Export a dataset (`evernear.data.export`), with a release's embeddings if named."""

import tempfile
from pathlib import Path

from evernear.common.parts import Parts, Worker
from evernear.common.store import Store, open_store
from evernear.data.export.plan import Export, ExportPart
from evernear.data.export.select import choose_snapshot, require_snapshot
from evernear.data.export.worker import (
    Embedded,
    ReadShards,
    block_rows,
    export_worker,
    open_snapshot,
    without_embeddings,
)
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.errors import DataError
from evernear.release.archive_reader import ARCHIVE_FILE, open_release
from evernear.release.registry import Registry


def select_snapshot(store: Store, dataset: str, snapshot: str | None, release: str | None) -> Manifest:
    """The snapshot whose digest begins with ``snapshot``, otherwise the snapshot of
    ``release``, otherwise the newest snapshot of ``dataset``.

    Raises:
        DataError, SettingsError: like `choose_snapshot`.
        StoreError: the release does not exist.
    """
    released = Registry(store).get(release).manifest if release else None
    if snapshot is None and released is not None:
        return require_snapshot(store, released.dataset_name, released.dataset_digest)
    return choose_snapshot(store, dataset, snapshot)


def open_worker(parts: Parts, store_uri: str = "") -> Worker:
    """Open the snapshot and the release's network,
    and return a function that writes the files of a part.

    ``store_uri`` is the current location of the store, in case it has moved since the
    export was planned."""
    export = Export.model_validate(parts.plan.shared)
    store = open_store(store_uri or export.store_uri)
    dataset = open_snapshot(store, export.dataset, export.digest)
    read = _with_embeddings(dataset, store, export.release) if export.release else without_embeddings(dataset)
    return export_worker(parts, dataset, read)


def _with_embeddings(dataset: Dataset, store: Store, version: str) -> ReadShards:
    """Read shards with embeddings by a release's network.
    Cached embeddings are used where available."""
    from evernear.embedding.embed import ExportedEmbedder  # an export without embeddings needs no torch

    rows = block_rows(dataset)
    with tempfile.TemporaryDirectory(prefix="evernear-") as directory:
        archive = Path(directory) / ARCHIVE_FILE
        Registry(store).fetch(version, archive)
        release = open_release(archive, Path(directory) / "parts")
        preprocessing = release.manifest.preprocessing
        if preprocessing.shape != dataset.shape:
            raise DataError(
                f"Release {version} takes images of {preprocessing.shape}, and those of the snapshot "
                f"{dataset.digest[:12]} are {dataset.shape}; leave out --release or --snapshot."
            )
        embedder = ExportedEmbedder(release.directory, store, read_only=True)
        embedder.load()

    def read(part: ExportPart) -> Embedded:
        shards = (dataset.manifest.shards[number] for number in part.shards)
        return embedder.embed((dataset.shard_blocks(shard, rows), shard.count) for shard in shards)

    return read
