"""Run the parts of an export: read shards, embed the images if a release is selected,
and write files."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.parts import Parts, Worker
from evernear.common.store import Store, open_store
from evernear.data.shards import Block, Dataset
from evernear.dataset_export.formats import writer_of
from evernear.dataset_export.plan import Export, ExportPart
from evernear.dataset_export.samples import Samples, samples_of
from evernear.errors import DataError, MissingObjectError

_BLOCK_BYTES = 2**23
"""Maximum size in bytes of the pixels in one block. One block forms one row group of a
Parquet file."""
_MAX_BLOCK_IMAGES = 1000
Embedded = Iterator[tuple[Block, NDArray[np.float32] | None]]
ReadShards = Callable[[ExportPart], Embedded]


def open_worker(parts: Parts) -> Worker:
    """Open the snapshot and the release's network,
    and return a function that writes the files of a part."""
    export = Export.model_validate(parts.plan.shared)
    store = open_store(export.store_uri)
    dataset = open_snapshot(store, export.dataset, export.digest)
    read = _embedded(dataset, store, export.release) if export.release else _plain(dataset)
    write = writer_of(export.format)

    def write_part(number: int, value: bytes) -> bytes:
        part = ExportPart.from_json(value, f"part {number} in {parts.store.uri}")
        with tempfile.TemporaryDirectory(prefix="evernear-") as scratch:
            write(parts.store, part, _samples(read(part), part, dataset.labels), Path(scratch))
        return b"{}"

    return write_part


def open_snapshot(store: Store, name: str, digest: str) -> Dataset:
    """Open the snapshot ``digest`` of the dataset ``name``.

    Raises:
        MissingObjectError: the store does not contain the snapshot.
    """
    dataset = Dataset.find(store, name, digest)
    if dataset is None:
        raise MissingObjectError(f"{store.uri} no longer has the snapshot {digest[:12]} of the dataset {name}.")
    return dataset


def _samples(blocks: Embedded, part: ExportPart, labels: tuple[str, ...]) -> Iterator[Samples]:
    position = part.first
    for block, embeddings in blocks:
        yield samples_of(block, embeddings, part.split, position, labels)
        position += len(block)


def _block_rows(dataset: Dataset) -> int:
    return max(1, min(_MAX_BLOCK_IMAGES, _BLOCK_BYTES // int(np.prod(dataset.shape))))


def _plain(dataset: Dataset) -> ReadShards:
    rows = _block_rows(dataset)

    def read(part: ExportPart) -> Embedded:
        for number in part.shards:
            for block in dataset.shard_blocks(dataset.manifest.shards[number], rows):
                yield block, None

    return read


def _embedded(dataset: Dataset, store: Store, version: str) -> ReadShards:
    """Return a function that reads shards and embeds their images with a release's
    network. Cached embeddings are used where available."""
    from evernear.embedding.embed import ExportedEmbedder
    from evernear.serving.release_source import ReleaseSource

    rows = _block_rows(dataset)
    with ReleaseSource(store.uri, version).unpacked() as release:
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
