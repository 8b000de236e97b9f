"""Rebuild lost objects of a dataset in a store, from the images of the dataset's
source.

The name of a shard is the hash of its content, so the shard is rebuilt byte for byte or
not at all. The rows of a shard are in ingest order: the images of each ingest, in
decoding order, follow the images of earlier ingests. The order of the rows is recorded
in the ledgers of the snapshot and its ancestors.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from evernear.common.disk import sha256_bytes
from evernear.common.output import quantity
from evernear.common.threads import available_cpus
from evernear.data.batch import Batch
from evernear.data.decoding import DecodedImage, Decoder, ImageForm
from evernear.data.ledger import Ledger
from evernear.data.manifest import Manifest, Shard
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry, FileSource, open_source
from evernear.data.stored_ledger import decoders, find_slot, read_slot
from evernear.data.writer import row_dtype, shard_content, shard_key
from evernear.errors import IntegrityError
from evernear.settings import DataSettings

_NAMED = 5
Files = dict[bytes, list[tuple[str, FileEntry]]]
"""Maps the digest of an image to its files. Each file is listed with the URI of its
source.
"""


def rebuild_shard(snapshots: Snapshots, manifest: Manifest, shard: Shard, settings: DataSettings, moved: bool) -> None:
    """Rebuild a shard of the snapshot ``manifest``, and store it again.

    If ``moved`` is set, ``settings.source`` is read instead of the sources in the
    ledger.

    Raises:
        IntegrityError: the source no longer contains the images in the shard, or the
            ledger is missing.
        DataError, StoreError: the source cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch:
        orders, labels, files = _rows(snapshots, manifest, shard, Path(scratch))
    if moved:
        files = {digest: [(settings.source, entry) for _, entry in found] for digest, found in files.items()}
    pixels = _pixels(files, manifest, settings)
    if missing := [files[digest][0][1].name for digest in files if digest not in pixels]:
        shown = ", ".join(sorted(missing)[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise IntegrityError(
            f"The source has no longer {quantity(len(missing), 'image')} of {len(files):,}, or has other content in "
            f"their files: {shown}."
        )
    for order in (*orders, list(pixels)):
        rows = np.empty(len(order), row_dtype(manifest.shape))
        for row, digest in enumerate(order):
            rows[row] = pixels[digest], labels[digest], np.frombuffer(digest, np.uint8)
        content = shard_content(rows)
        if sha256_bytes(content) == shard.sha256:
            snapshots.store.put(shard_key(manifest.name, shard.sha256), content)
            return
    raise IntegrityError(
        "The source has all its images, but their order, or the pixels that this version of evernear and Pillow "
        "decodes, are others."
    )


def drop_shards(snapshots: Snapshots, lost: Iterable[str]) -> Manifest:
    """Publish a copy of the newest snapshot from which the shards in ``lost`` are
    removed.

    The next ingest reads the images of these shards again, and puts them into the same
    splits.

    Raises:
        IntegrityError: the newest snapshot cannot be read, or its ledger cannot be
            read.
        ConflictError: an ingest finished in the meantime.
    """
    head, lost = snapshots.head(), set(lost)
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    with tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch:
        path = Path(scratch) / "ledger.sqlite"
        snapshots.fetch_ledger(head, path)
        with closing(Ledger(path, head.source)) as ledger:
            ledger.lose_shards(lost)
            changes = {
                "shards": tuple(shard for shard in head.shards if shard.sha256 not in lost),
                "parent": head.digest,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            return snapshots.publish(head.model_copy(update=changes), ledger, Path(scratch))


def rebuild_ledger(snapshots: Snapshots) -> None:
    """Replace the newest snapshot's ledger with a ledger that contains only the splits
    of the images. The splits are read from the snapshot's shards.

    The next ingest reads all images again, and puts them into the same splits.

    Raises:
        IntegrityError: a shard cannot be read.
        ConflictError: an ingest finished in the meantime.
    """
    head = snapshots.head()
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    dataset = Dataset(head, snapshots.store)
    with (
        tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch,
        closing(Ledger(Path(scratch) / "ledger.sqlite", head.source)) as ledger,
    ):
        ledger.add_labels(head.labels)
        for shard in head.shards:
            for block in dataset.shard_blocks(shard):
                ledger.remember_splits((digest.tobytes() for digest in block.digests), shard.split)
        snapshots.publish(head, ledger, Path(scratch))


def _rows(
    snapshots: Snapshots, manifest: Manifest, shard: Shard, scratch: Path
) -> tuple[list[list[bytes]], dict[bytes, int], Files]:
    """Return the possible row orders for a shard, and the label and the files of each
    image in the shard.
    """
    own = scratch / "own.sqlite"
    snapshots.fetch_ledger(manifest, own)
    slot = find_slot(own, shard.sha256)
    if slot is None:
        raise IntegrityError("The ledger of the snapshot does not name it.")
    order: list[bytes] = []
    decoded_by: list[tuple[str, str]] = []
    for path in snapshots.generations(manifest, scratch):
        present = read_slot(path, slot)
        if (decoder := decoders(path)) != decoded_by:  # all images were decoded again, in a new order
            order, decoded_by = [], decoder
        order = [digest for digest in order if digest in present]
        order += [digest for digest in present if digest not in set(order)]
    images = read_slot(own, slot)
    labels = {digest: label for digest, (label, _) in images.items()}
    return [order, [*images]], labels, {digest: files for digest, (_, files) in images.items()}


def _pixels(files: Files, manifest: Manifest, settings: DataSettings) -> dict[bytes, Pixels]:
    """The pixels of the images that the sources still contain. If a source provides
    decoded arrays, its images are in the order of that source.
    """
    found: dict[bytes, Pixels] = {}
    form = ImageForm(manifest.shape, manifest.resize, manifest.bit_depth)
    for uri in dict.fromkeys(uri for candidates in files.values() for uri, _ in candidates):
        source = open_source(uri, settings)
        if isinstance(source, FileSource):
            decoder = Decoder(source, form, settings.max_pixels)
            known = {entry.name for candidates in files.values() for _, entry in candidates}
            # A file may have been renamed, so files with unknown names are tried last.
            for is_known in (True, False):
                entries = (entry for entry in source.entries() if (entry.name in known) == is_known)
                for image in _decode(decoder, entries, settings):
                    if image.digest in files:
                        found[image.digest] = image.pixels
                    if len(found) == len(files):
                        return found
        else:
            for block in source.blocks():
                batch = Batch.of_arrays(block, form)
                for digest, pixels in zip(batch.digests, batch.pixels, strict=True):
                    if digest in files:
                        found.setdefault(digest, pixels)
    return found


def _decode(decoder: Decoder, entries: Iterator[FileEntry], settings: DataSettings) -> Iterator[DecodedImage]:
    requests, threads = settings.requests_in_flight, settings.decode_threads or available_cpus()
    with closing(decoder.decode_all(entries, requests, threads, lookahead=requests)) as results:
        for result in results:
            if isinstance(result, DecodedImage):
                yield result
