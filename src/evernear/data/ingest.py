"""Ingest a source into a dataset snapshot, in the order list -> plan -> parts -> combine ->
publish.

- **list** the source (`evernear.data.list`);
- **plan** which files must be read, by comparison with the previous snapshot
  (`evernear.data.plan`);
- **parts** decode and hash these files, on any number of machines (`evernear.data.parts`);
- **combine** the decoded images, in a fixed order, into splits and shards
  (`evernear.data.combine`);
- **publish** the tables and the snapshot (`evernear.data.publish`).

A dataset mirrors its sources. Images of new files are added, and images of deleted files are
removed. A file that was moved to a different class folder gets the new label. Images are identified
by a hash of their content. An image never moves to another split, even if the image is removed and
restored. A model may already have been trained on the image.
"""

import csv
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from evernear.common.disk import disk_errors
from evernear.common.masking import mask
from evernear.common.output import quantity
from evernear.common.outputs import mark
from evernear.common.parts import run_parts
from evernear.common.step_results import code_digest
from evernear.common.store import open_store
from evernear.data.combine import (
    StoredPixels,
    combine,
    count_decoded_again,
    list_arrays,
    many_gone,
    most_are_larger,
    swapped_classes,
)
from evernear.data.database import Database
from evernear.data.decoding import ImageForm
from evernear.data.form import choose_form
from evernear.data.list import (
    ANY_NUMBER,
    ClassMinimum,
    Listing,
    dataset_name,
    labels_of,
    list_source,
    require_groups,
    require_moved,
    require_one_source,
)
from evernear.data.manifest import SPLITS, Manifest, is_photographic
from evernear.data.parts import RunParts, decode_in_parts, load_results, parts_folder, planned_form, stored_pixels
from evernear.data.plan import Draft, earlier_shards, open_draft, open_working, plan
from evernear.data.problems import list_left_out, list_problems
from evernear.data.publish import describe, write_tables
from evernear.data.snapshots import Snapshots
from evernear.data.sources import ArraySource, FileSource, open_source
from evernear.data.sources.packed import PackedFiles
from evernear.data.writer import ShardWriter
from evernear.errors import MissingObjectError, SettingsError, StoreError
from evernear.settings import DataSettings
from evernear.settings.data import LARGEST_SIZE_PX, MAX_SIZE_PX

SHARD_SIZE_BYTES = 32 * 2**20
"""Ingest holds one open shard per split, and a reader downloads whole shards."""
_REPORT_INTERVAL_S = 1.0
DECODING_CODE = tuple(
    f"data/{name}.py" for name in ("decoding", "encoded_image", "heic", "image_file", "preprocess", "reduction")
)
"""The files that determine the decoded pixels."""
DECODING_LIBRARIES = ("numpy", "pillow", "pillow-heif")
"""Libraries whose versions may affect the decoded pixels."""


def ingest_source(
    settings: DataSettings,
    store_uri: str,
    report: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
    run: RunParts = run_parts,
    minimum: ClassMinimum = ANY_NUMBER,
    max_size_px: int = MAX_SIZE_PX,
    photo_size_px: int = MAX_SIZE_PX,
    *,
    reread: bool = False,
    moved_from: str = "",
    left_out: Path | None = None,
) -> Manifest:
    """Update a dataset in the store from ``settings.source``, and return the new snapshot.

    If nothing has changed, return the previous snapshot. The last write updates ``head.json``.
    Readers do not see any changes before this write. ``run`` runs the parts. If an ingest of files
    is killed and run again, the second run skips the finished parts and produces the same digest as
    an uninterrupted ingest. Memory use does not grow with the number of images. ``report`` is
    called with progress messages about once a second. ``warn`` is called with one sentence for each
    change that may be a mistake. ``minimum`` decides which classes wait for more images from
    review. ``max_size_px`` limits the longer side of a new dataset's images if ``data.size_px`` is
    not set, and ``photo_size_px`` the shorter side of photographs, if a pretrained network sees
    them.
    ``reread`` and ``moved_from`` are those of `evernear.settings.OneRun`. ``left_out`` becomes a
    CSV file of all files that were left out, or empty.

    Raises:
        DataError: the source has no images or only one class, or the images do not match the
            dataset's earlier images.
        StoreError: the store or the disk fails.
        ConflictError: a different ingest of this dataset finished in the meantime.
    """
    if settings.test_fraction + settings.gallery_fraction + settings.query_fraction >= 1:
        raise SettingsError("data.test_fraction, gallery_fraction and query_fraction leave nothing to train on.")
    sizes_px = max_size_px, photo_size_px
    asked = _Asked(settings, store_uri, report, warn, run, minimum, sizes_px, reread, moved_from, left_out)
    afresh = uuid4().hex
    # Finished parts are used again, unless one may be damaged.
    for attempt in (afresh if reread else "", afresh if reread else "", afresh):
        try:
            return _ingest(asked, attempt)
        except MissingObjectError as lost:  # a file vanished, or a different ingest deleted the parts when it published
            report(f"{lost} Listing the source again.")
    return _ingest(asked, afresh)


class _Asked(NamedTuple):
    """The arguments of `ingest_source`. ``sizes_px`` are ``max_size_px`` and ``photo_size_px``."""

    settings: DataSettings
    store_uri: str
    report: Callable[[str], None]
    warn: Callable[[str], None]
    run: RunParts
    minimum: ClassMinimum
    sizes_px: tuple[int, int]
    reread: bool
    moved_from: str
    left_out: Path | None


class _Work(NamedTuple):
    """What the stages of an ingest share. ``decoder`` is a hash of the code that decodes images."""

    asked: _Asked
    source: ArraySource | FileSource
    snapshots: Snapshots
    parent: Manifest | None
    db: Database
    draft: Draft
    decoder: str
    scratch: Path


class _Listed(NamedTuple):
    listing: Listing
    labels: list[str]


class _Planned(NamedTuple):
    """``pending`` is the number of files to decode, or 0 if it is unknown. ``folder`` is that of
    the parts."""

    pending: int
    decode_again: bool
    folder: str


class _Decoded(NamedTuple):
    form: ImageForm
    pixels: StoredPixels


def _ingest(asked: _Asked, attempt: str) -> Manifest:
    """Run `ingest_source`. The parts of earlier calls with the same ``attempt`` are reused."""
    with _open_work(asked) as work:
        listed = _list(work)
        planned = _plan(work, listed, attempt)
        decoded = _decode_parts(work, planned)
        writer = _combine(work, listed, planned, decoded)
        manifest = _publish(work, listed, decoded, writer)
        # The parts of other ingests that started from the newest snapshot may still be useful.
        useful = work.snapshots.parts_folder(manifest)
        with suppress(StoreError):  # the pipeline's keys may lack permission to delete, and prune deletes later
            work.snapshots.delete_parts(lambda key: key.startswith(f"{planned.folder}/") or not key.startswith(useful))
        return manifest


@contextmanager
def _open_work(asked: _Asked) -> Generator[_Work]:
    settings = asked.settings
    source = open_source(settings.source, settings)
    store = open_store(asked.store_uri)
    mark(store, "a store of datasets and releases")
    snapshots = Snapshots(store, dataset_name(settings, source, asked.moved_from))
    with (
        disk_errors(tempfile.gettempdir()),
        tempfile.TemporaryDirectory(prefix="evernear-ingest-") as directory,
    ):
        scratch, parent = Path(directory), snapshots.head()
        require_moved(parent, snapshots.name, settings.source, asked.moved_from)
        with closing(open_working(scratch, store, snapshots.name)) as db:
            draft = open_draft(db, store, parent, settings.source, asked.moved_from, scratch)
            decoder = code_digest(DECODING_CODE, DECODING_LIBRARIES)
            yield _Work(asked, source, snapshots, parent, db, draft, decoder, scratch)


def _list(work: _Work) -> _Listed:
    asked, source, db, draft = work.asked, work.source, work.db, work.draft
    settings = asked.settings
    if not settings.dataset:
        require_one_source(draft.other_sources, work.snapshots.name, settings.source)
    if isinstance(source, PackedFiles) and not asked.reread:
        source.remembered = draft.members
    listing = list_source(source, db, settings.source, settings.group, asked.minimum)
    labels = labels_of(db, draft.labels, settings.source, draft.source, listing.admission)
    require_groups(source, settings, db, draft.is_new)
    if not settings.group and listing.names_groups:
        asked.warn(
            f"the groups that {settings.source} names are not used: the images of a group stay in one split"
            " only with --set data.group=column, from the first ingest on"
        )
    return _Listed(listing, labels)


def _plan(work: _Work, listed: _Listed, attempt: str) -> _Planned:
    asked, draft, parent = work.asked, work.draft, work.parent
    decode_again = draft.decoders.get(draft.source) != work.decoder
    if decode_again and parent and count_decoded_again(work.db, draft.source):
        asked.report("decoding all images again: evernear or Pillow decodes them in another way than before")
    read_all = asked.reread or decode_again or not isinstance(work.source, FileSource)
    pending = plan(draft, listed.listing, reread=read_all)
    decoding = f"{work.decoder} {asked.moved_from}"
    folder = parts_folder(work.snapshots, asked.settings, parent, decoding, asked.sizes_px, attempt)
    return _Planned(pending, decode_again, folder)


def _decode_parts(work: _Work, planned: _Planned) -> _Decoded:
    asked, source, db = work.asked, work.source, work.db
    store, folder = work.snapshots.store, planned.folder
    form = planned_form(store, folder) or choose_form(asked.settings, source, db, work.parent, *asked.sizes_px)
    if not isinstance(source, FileSource):
        return _Decoded(form, list_arrays(source, form, db))
    progress = _Progress(asked.report, planned.pending)
    plans = decode_in_parts(source, asked.settings, form, db, planned.pending, store, folder, asked.run, progress.add)
    load_results(plans, db)
    return _Decoded(form, partial(stored_pixels, plans, scratch=work.scratch))


def _combine(work: _Work, listed: _Listed, planned: _Planned, decoded: _Decoded) -> ShardWriter:
    asked, db, form = work.asked, work.db, decoded.form
    shards = earlier_shards(work.draft, work.parent)
    snapshots = work.snapshots
    writer = ShardWriter(
        snapshots.store, snapshots.name, form.shape, SHARD_SIZE_BYTES, shards, listed.labels, work.scratch
    )
    combine(
        work.draft,
        asked.settings,
        work.source.chosen_splits,
        listed.labels,
        decoded.pixels,
        writer,
        _Progress(asked.report, planned.pending, " combined").add,
        decode_again=planned.decode_again,
    )
    for sentence in [*swapped_classes(db), *many_gone(db)]:
        asked.warn(sentence)
    if work.parent is not None and asked.settings.size_px is None:
        for sentence in _small_photographs(form.shape, db, max(asked.sizes_px)):
            asked.warn(sentence)
    return writer


def _publish(work: _Work, listed: _Listed, decoded: _Decoded, writer: ShardWriter) -> Manifest:
    asked, db, draft, snapshots = work.asked, work.db, work.draft, work.snapshots
    settings, parent, form = asked.settings, work.parent, decoded.form
    asked.report("writing the manifest")
    problems, counts = list_problems(db, draft.source, work.source.chosen_splits, *form.shape[:2], form.resize)
    if asked.left_out is not None:
        _write_left_out(db, asked.left_out)
    manifest = Manifest(
        name=snapshots.name,
        store_uri=snapshots.store.uri,
        source=settings.source,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        parent=parent.digest if parent else None,
        shape=form.shape,
        resize=form.resize,
        bit_depth=form.bit_depth,
        shards=tuple(shard for split in SPLITS for shard in writer.shards.values() if shard.split == split),
        tables=write_tables(db, writer.shards, snapshots.store, parent, snapshots.name, work.scratch),
        decoders={**draft.decoders, draft.source: work.decoder},
        problems=tuple(problems),
        problem_counts=counts,
        **describe(db, tuple(listed.labels)),
    )
    small_classes = listed.listing.admission.small_classes(manifest.images_by_class())
    manifest = manifest.model_copy(update={"small_classes": small_classes})
    if settings.group and manifest.groups == sum(map(manifest.count, SPLITS)):
        asked.warn(f"data.group={settings.group} makes a group of every image, so it has no effect")
    return snapshots.publish(manifest)


def _small_photographs(shape: tuple[int, int, int], db: Database, photo_size_px: int) -> Iterator[str]:
    """A sentence if a new dataset would store these photographs larger, because each keeps its
    size."""
    height, width, _ = shape
    has_pretrained = photo_size_px > MAX_SIZE_PX
    could_be_larger = min(height, width) < photo_size_px and max(height, width) < LARGEST_SIZE_PX
    if has_pretrained and is_photographic(shape) and could_be_larger and most_are_larger(db, height, width):
        yield (
            f"this dataset keeps its photographs at {width} x {height} pixels, although a new one would keep "
            f"{photo_size_px} of their shorter side for the pretrained network; to store them larger, start over with "
            "another --workdir or store, which reads all images again, takes more space, draws new splits, and "
            "compares its first release with none"
        )


def _write_left_out(db: Database, path: Path) -> None:
    """Write the columns path and reason, with secrets masked. Without rows, write no file."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        rows = csv.writer(file)
        header = ("path", "reason")
        for name, reason in list_left_out(db):
            if header:
                rows.writerow(header)
                header = ()
            rows.writerow((mask(name), mask(reason)))


class _Progress:
    def __init__(self, report: Callable[[str], None], total: int, done: str = "") -> None:
        """``total`` is 0 if unknown. Each message ends with ``done``."""
        self._report, self._total, self._ending = report, total, done
        self._done, self._reported_s = 0, time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            images = quantity(self._total or self._done, "image")
            self._report(f"{self._done:,} of {images}{self._ending}" if self._total else images)
