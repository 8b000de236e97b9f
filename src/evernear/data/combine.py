"""Combine the results of an ingest's parts in one process. The order of the combined images does
not depend on how the files were divided into parts.

This step leaves out duplicate images, chooses a split for each new image, and writes the shards.
The choice depends on the earlier images. The step then compares the shards with the files, because
files may have been removed or relabeled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from evernear.common.output import quantity
from evernear.data.decode_part import Decoded
from evernear.data.decoding import ImageForm
from evernear.data.groups import Grouping
from evernear.data.ledger import Ledger
from evernear.data.manifest import SPLITS, Split
from evernear.data.preprocess import Pixels, pixels_digest, to_array
from evernear.data.sources import ArrayBlock, ArraySource
from evernear.data.splits import Placer
from evernear.data.sqlite import batched
from evernear.data.writer import ShardWriter
from evernear.errors import MissingObjectError
from evernear.settings import DataSettings


@dataclass(frozen=True)
class Batch:
    """Images that are ready for a shard: ``pixels`` is a uint8 array (N, H, W, C)."""

    names: Sequence[str]
    labels: Sequence[str]
    explicit_splits: Sequence[Split | None]
    digests: Sequence[bytes]
    widths_px: Sequence[int]
    heights_px: Sequence[int]
    flaws: Sequence[int]
    pixels: Pixels
    former_splits: Mapping[str, Split] = field(default_factory=dict[str, Split])
    """Maps file names to former splits, for unchanged files that are decoded again."""

    @classmethod
    def of_arrays(cls, block: ArrayBlock, form: ImageForm) -> "Batch":
        """Pillow is only used to resize the images."""
        shape, resize = form.shape, form.resize
        count, height, width = block.images.shape
        flat = block.images.reshape(count, -1)
        if (height, width) == shape[:2]:
            pixels = np.repeat(block.images[..., None], shape[2], axis=3)
        else:
            pixels = np.stack([to_array(Image.fromarray(image), *shape, resize) for image in block.images])
        return cls(
            names=block.names,
            labels=block.labels,
            explicit_splits=[block.explicit_split] * count,
            digests=[pixels_digest("L", width, height, row.tobytes()) for row in flat],
            widths_px=[width] * count,
            heights_px=[height] * count,
            flaws=(flat.min(axis=1) == flat.max(axis=1)).astype(int).tolist(),
            pixels=pixels,
        )


def array_batches(source: ArraySource, form: ImageForm, ledger: Ledger) -> Iterator[Batch]:
    for block in source.blocks():
        batch = Batch.of_arrays(block, form)
        ledger.list_decoded(zip(batch.names, batch.labels, batch.explicit_splits, batch.digests, strict=True))
        yield batch
    ledger.forget_unlisted()


def file_batches(decoded: Iterator[Decoded], ledger: Ledger, size: int) -> Iterator[Batch]:
    """Record results of files that are unchanged since, and yield their images in batches."""
    for page in batched(decoded, size):
        batch = _file_batch(page, ledger)
        if batch.names:
            yield batch


def _file_batch(page: list[Decoded], ledger: Ledger) -> Batch:
    """Record the results of at most 500 files, and return their images."""
    listed = ledger.pending([file.name for file, _ in page])
    # A different plan may also have the file, and the file may have changed since.
    etags = {name: etag for name, (etag, _, _) in listed.items()}
    current = [each for each in page if etags.get(each[0].name) == each[0].etag]
    files = [file for file, _ in current if file.digest]
    names, digests = [file.name for file in files], [bytes.fromhex(file.digest) for file in files]
    former_splits = ledger.former_splits(names)
    failures = ((file.name, file.fault) for file, _ in current if not file.digest)
    ledger.record_results(zip(names, digests, strict=True), failures)
    no_pixels = page[0][1][:0]
    return Batch(
        names=names,
        # The label and the explicit split may have changed since the part was planned.
        labels=[listed[name][1] for name in names],
        explicit_splits=[listed[name][2] for name in names],
        digests=digests,
        widths_px=[file.width_px for file in files],
        heights_px=[file.height_px for file in files],
        flaws=[file.flaws for file in files],
        pixels=np.concatenate([no_pixels, *(pixels for _, pixels in current)]),
        former_splits=former_splits,
    )


def combine(
    batches: Iterator[Batch],
    settings: DataSettings,
    candidates: tuple[Split, ...],
    group: Grouping,
    ledger: Ledger,
    writer: ShardWriter,
    on_images: Callable[[int], None],
) -> None:
    """Add the images in ``batches``, and update the shards with earlier images whose files have
    changed. ``candidates`` contains the splits that ingest may choose.

    Raises:
        MissingObjectError: a pending file has no result, because it has changed or vanished.
    """
    _rewrite_changed(ledger, writer)  # excludes the images that were decoded again
    _refresh_groups(settings, group, ledger)
    placer = Placer(settings, candidates, ledger, group)
    numbers = {label: number for number, label in enumerate(ledger.labels())}
    for batch in batches:
        _add(batch, placer, numbers, ledger, writer)
        on_images(len(batch.names))
    ledger.apply_results()
    writer.close()
    if changed := ledger.count_pending():
        raise MissingObjectError(f"{quantity(changed, 'file')} of the source changed or vanished during the ingest.")
    ledger.reconcile()
    _rewrite_changed(ledger, writer)
    ledger.reviewed.refresh()
    for slot, digests in ledger.reviewed.measured().items():
        ledger.reviewed.move(writer.move(slot, digests, "train"))
    _refresh_groups(settings, group, ledger)


def _rewrite_changed(ledger: Ledger, writer: ShardWriter) -> None:
    for slot in ledger.changed_slots():
        writer.rewrite(slot, ledger.changes(slot))


def _refresh_groups(settings: DataSettings, group: Grouping, ledger: Ledger) -> None:
    if settings.group or not ledger.groups.is_empty():
        ledger.groups.refresh(group)


def _add(batch: Batch, placer: Placer, numbers: dict[str, int], ledger: Ledger, writer: ShardWriter) -> None:
    splits = placer.place(batch.names, batch.labels, batch.digests, batch.explicit_splits, batch.former_splits)
    images = list[tuple[bytes, int, int, int, int, int]]()
    for split in SPLITS:
        rows = [row for row, chosen in splits.items() if chosen == split]
        if rows:
            labels = [numbers[batch.labels[row]] for row in rows]
            digests = [batch.digests[row] for row in rows]
            slots = writer.append(split, batch.pixels[rows], labels, digests)
            described = ([column[row] for row in rows] for column in (batch.widths_px, batch.heights_px, batch.flaws))
            images += zip(digests, labels, slots, *described, strict=True)
    ledger.add_images(images)
