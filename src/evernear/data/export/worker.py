"""Run the parts of an export: read shards and write files.
`evernear.release.export_part` embeds their images.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.parts import Parts, Worker
from evernear.common.store import Store
from evernear.data.export.formats import writer_of
from evernear.data.export.groups import SnapshotGroups
from evernear.data.export.plan import Export, ExportPart
from evernear.data.export.samples import Samples, samples_of
from evernear.data.shards import Block, Dataset
from evernear.errors import MissingObjectError

_BLOCK_BYTES = 2**23
"""Maximum size of the pixels that are read at a time.
They form one row group of a Parquet file."""
_MAX_BLOCK_IMAGES = 1000
Embedded = Iterator[tuple[Block, NDArray[np.float32] | None]]
ReadShards = Callable[[ExportPart], Embedded]
"""Yields the images of a part in order, with embeddings if a release was named."""


def export_worker(parts: Parts, dataset: Dataset, read: ReadShards) -> Worker:
    """A function that writes the files of a part, whose images ``read`` yields."""
    export = Export.model_validate(parts.plan.shared)
    write, groups = writer_of(export.format), SnapshotGroups(dataset) if export.groups else None

    def write_part(number: int, value: bytes) -> bytes:
        part = ExportPart.from_json(value, f"part {number} in {parts.store.uri}")
        with tempfile.TemporaryDirectory(prefix="evernear-") as scratch:
            write(parts.store, part, _samples(read(part), part, dataset.labels, groups), Path(scratch))
        return b"{}"

    return write_part


def open_snapshot(store: Store, name: str, digest: str) -> Dataset:
    """The snapshot ``digest`` of the dataset ``name``.

    Raises:
        MissingObjectError: the store does not contain the snapshot.
    """
    dataset = Dataset.find(store, name, digest)
    if dataset is None:
        raise MissingObjectError(f"{store.uri} no longer has the snapshot {digest[:12]} of the dataset {name}.")
    return dataset


def _samples(
    blocks: Embedded, part: ExportPart, labels: tuple[str, ...], groups: SnapshotGroups | None
) -> Iterator[Samples]:
    position = part.first
    for block, embeddings in blocks:
        yield samples_of(block, embeddings, part.split, position, labels, groups)
        position += len(block)


def block_rows(dataset: Dataset) -> int:
    """Number of images to read at a time."""
    return max(1, min(_MAX_BLOCK_IMAGES, _BLOCK_BYTES // int(np.prod(dataset.shape))))


def without_embeddings(dataset: Dataset) -> ReadShards:
    """Reads the images of a part."""
    rows = block_rows(dataset)

    def read(part: ExportPart) -> Embedded:
        for number in part.shards:
            for block in dataset.shard_blocks(dataset.manifest.shards[number], rows):
                yield block, None

    return read
