"""Combine the results of an ingest's parts in one process. The order of the combined
images does not depend on how the files were divided into parts.

This step leaves out duplicate images, chooses a split for each new image, and writes
the shards. The choice depends on the earlier images. The step then compares the shards
with the files, because files may have been removed or relabeled.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from evernear.common.output import quantity
from evernear.data.batch import Batch
from evernear.data.decoding import DecodedImage, DecodeFailure, ImageForm
from evernear.data.groups import Grouping
from evernear.data.ledger import Ledger, NewImage
from evernear.data.manifest import SPLITS, Split
from evernear.data.placing import Placer
from evernear.data.sources import ArraySource
from evernear.data.sqlite import batched
from evernear.data.writer import ShardWriter
from evernear.errors import ConflictError
from evernear.settings import DataSettings


def array_batches(source: ArraySource, form: ImageForm, ledger: Ledger) -> Iterator[Batch]:
    """List a source of decoded images, and yield the images."""
    for block in source.blocks():
        batch = Batch.of_arrays(block, form)
        ledger.list_decoded(zip(batch.names, batch.labels, batch.explicit_splits, batch.digests, strict=True))
        yield batch
    ledger.forget_unlisted()


def file_batches(results: Iterator[DecodedImage | DecodeFailure], ledger: Ledger, size: int) -> Iterator[Batch]:
    """Record the results for files that are unchanged since they were decoded, and
    yield their images in batches of at most ``size`` images. ``size`` is at most 500.
    """
    for page in batched(results, size):
        listed = ledger.pending([result.entry.name for result in page])
        images, outcomes = list[DecodedImage](), list[tuple[str, bytes | None, str | None]]()
        for result in page:
            entry = listed.pop(result.entry.name, None)
            if entry is None or entry.etag != result.entry.etag:
                continue  # a different plan also had the file, or the file has changed since
            if isinstance(result, DecodedImage):
                # The label and the explicit split may have changed since the part was
                # planned.
                images.append(result if result.entry == entry else replace(result, entry=entry))
                outcomes.append((entry.name, result.digest, None))
            else:
                outcomes.append((entry.name, None, result.reason))
        former_splits = ledger.former_splits([image.entry.name for image in images])
        ledger.record_results(outcomes)
        if images:
            yield Batch.of_files(images, former_splits)


def combine(
    batches: Iterator[Batch],
    settings: DataSettings,
    candidates: tuple[Split, ...],
    group: Grouping,
    ledger: Ledger,
    writer: ShardWriter,
    on_images: Callable[[int], None],
) -> None:
    """Add the images in ``batches``, and update the shards with earlier images whose
    files have changed.

    ``candidates`` contains the splits that ingest may choose.

    Raises:
        ConflictError: a file is missing from the batches because a different ingest
            planned the parts.
    """
    _rewrite_changed(ledger, writer)  # excludes the images that were decoded again
    _refresh_groups(settings, group, ledger)
    placer = Placer(settings, candidates, ledger, group)
    numbers = {label: number for number, label in enumerate(ledger.labels())}
    for batch in batches:
        _add(batch, placer, numbers, ledger, writer)
        on_images(len(batch.names))
    writer.close()
    if changed := ledger.count_pending():
        raise ConflictError(f"{quantity(changed, 'file')} of the source changed during the ingest; run again.")
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
    """Set the group of every decoded image again, because names, labels or
    ``data.group`` may have changed.
    """
    if settings.group or not ledger.groups.is_empty():
        ledger.groups.refresh(group)


def _add(batch: Batch, placer: Placer, numbers: dict[str, int], ledger: Ledger, writer: ShardWriter) -> None:
    """Add each new image in a batch to a shard of the image's split."""
    splits = placer.place(batch.names, batch.labels, batch.digests, batch.explicit_splits, batch.former_splits)
    for split in SPLITS:
        rows = [row for row, chosen in splits.items() if chosen == split]
        if rows:
            labels = [numbers[batch.labels[row]] for row in rows]
            digests = [batch.digests[row] for row in rows]
            slots = writer.append(split, batch.pixels[rows], labels, digests)
            ledger.add_images(
                NewImage(digest, label, slot, *batch.sizes[row], batch.flaws[row])
                for row, digest, label, slot in zip(rows, digests, labels, slots, strict=True)
            )
