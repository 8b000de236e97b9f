"""Ingest a source into a dataset snapshot: streaming, incremental and deterministic.

A dataset mirrors the sources it was ingested from: new files are added, files that are gone are dropped, a moved file
takes its new label, all by content hash. The split of an image never changes, even if the image is removed and
restored, because a model may have been trained on the image.
"""

import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from evernear.common.code_digest import code_digest
from evernear.common.disk import disk_errors
from evernear.common.output import quantity
from evernear.common.store import open_store
from evernear.common.threads import available_cpus
from evernear.data.batch import Batch
from evernear.data.decoding import DecodedImage, DecodeFailure, Decoder, ImageForm, read_image
from evernear.data.groups import Grouping, grouping
from evernear.data.ledger import Ledger, NewImage
from evernear.data.manifest import SPLITS, Manifest, Split
from evernear.data.placing import Placer
from evernear.data.preprocess import (
    Resize,
    bit_depth_of,
    decode_inspected,
    is_gray,
)
from evernear.data.reduction import BIT_DEPTHS, BitDepth
from evernear.data.reviewed import reviewed_by_name
from evernear.data.snapshots import Snapshots
from evernear.data.sources import ArraySource, FileEntry, FileSource, name_of, open_source
from evernear.data.sources.packed import PackedFiles
from evernear.data.sqlite import batched
from evernear.data.writer import ShardWriter
from evernear.errors import DataError, SettingsError
from evernear.settings import DataSettings

Shape = tuple[int, int, int]
NO_SPLITS: Mapping[str, Split] = {}

# Images that are written to a shard together: few large ones or many small ones.
_BATCH_IMAGES = 256
_BATCH_BYTES = 16 * 2**20
_REPORT_INTERVAL_S = 1.0
# A killed ingest loses at most this much time, or this fraction of its run time if that is longer.
_CHECKPOINT_INTERVAL_S = 10.0
_CHECKPOINT_FRACTION = 0.1
MAX_SIZE_PX = 128
"""Largest automatic size: the compact network turns the pixels of larger images into patches. Pretrained backbones
expect more, see `evernear.steps.ingest`."""
_SAMPLED_FILES = 101
_SAMPLED_AT_ONCE = 4
_MAX_NAMES = 5
DECODING_LIBRARIES = ("numpy", "pillow")
"""Libraries that decide pixels."""
_FIRST_TRANSPOSED = 5  # EXIF orientations 5 to 8 exchange width and height


def ingest_source(
    settings: DataSettings,
    store_uri: str,
    report: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Update a dataset in the store from ``settings.source`` and return its snapshot.

    Without changes that is the previous snapshot. Readers see nothing before the last write, which moves
    ``head.json``. An ingest of files that was killed and is run again continues at its last checkpoint, and ends with
    the same digest. Memory does not grow with the number of images. ``report`` receives progress messages about once a
    second. ``warn`` receives sentences about changes that may be mistakes.

    Raises:
        DataError: there are no images, there is only one class, or the images do not match the earlier ones.
        StoreError: the store or the disk fails.
        ConflictError: another ingest of this dataset finished in the meantime.
    """
    if settings.test_fraction + settings.gallery_fraction + settings.query_fraction >= 1:
        raise SettingsError("data.test_fraction, gallery_fraction and query_fraction leave nothing to train on.")
    source = open_source(settings.source, settings)
    snapshots = Snapshots(open_store(store_uri), dataset_name(settings, source))
    with (
        disk_errors(tempfile.gettempdir()),
        tempfile.TemporaryDirectory(prefix="evernear-ingest-") as scratch,
    ):
        parent = snapshots.head()
        # A checkpoint may be old, and files must be read again now.
        stored = (None if settings.reread else snapshots.resume(settings, parent)) or parent
        ledger_path = Path(scratch, "ledger.sqlite")
        if stored is not None:
            snapshots.fetch_ledger(stored, ledger_path)
        with closing(Ledger(ledger_path, settings.source, settings.moved_from)) as ledger:
            if not settings.dataset:
                _require_one_source(ledger, snapshots.name, settings.source)
            if stored is not None and stored.reviewed is None:  # of an earlier version
                for generation in snapshots.generations(stored, Path(scratch)):
                    ledger.reviewed.remember(reviewed_by_name(generation))
            ledger.reviewed.refresh()  # before the listing, which has only the present names
            _list_source(source, ledger, settings.source)
            if settings.reread:
                ledger.read_all_again()
            form = _form(settings, source, ledger, stored)
            published = {shard.sha256 for shard in parent.shards} if parent else set[str]()
            writer = ShardWriter(
                snapshots.store, snapshots.name, form.shape, settings.shard_size_bytes, ledger, Path(scratch), published
            )

            def checkpoint() -> None:
                writer.close()
                so_far = _manifest(settings, snapshots, form, ledger, parent)
                snapshots.checkpoint(settings, so_far, parent, ledger, Path(scratch))

            _decode_again_if_changed(ledger, writer, report)
            group = grouping(settings.group, source.group)
            _require_groups(source, settings, group, ledger)
            _refresh_groups(settings, group, ledger)
            placer = Placer(settings, source.chosen_splits, ledger, group)
            adder = _Adder(settings, form, placer, ledger, writer, report, checkpoint)
            if isinstance(source, FileSource):
                adder.add_files(source)
            else:
                adder.add_arrays(source)
            writer.close()
            slots = ledger.reconcile()
            for swap in ledger.swapped_classes():
                warn(swap)
            for slot in slots:
                writer.rewrite(slot, ledger.changes(slot))
            ledger.reviewed.refresh()
            for slot, digests in ledger.reviewed.measured().items():
                ledger.reviewed.move(writer.move(slot, digests, "train"))
            _refresh_groups(settings, group, ledger)
            report("writing the manifest")
            problems, counts = ledger.problems(*form.shape[:2], form.resize)
            manifest = _manifest(settings, snapshots, form, ledger, parent)
            manifest = manifest.model_copy(update={"problems": tuple(problems), "problem_counts": counts})
            return snapshots.publish(manifest, ledger, Path(scratch))


def _decode_again_if_changed(ledger: Ledger, writer: ShardWriter, report: Callable[[str], None]) -> None:
    """Remove the images that other code has decoded: a dataset must not mix two preprocessings."""
    decoder = code_digest("evernear.data.decoding", DECODING_LIBRARIES)
    if ledger.decoder() == decoder:
        return
    slots = ledger.decode_all_again()
    if slots:
        report("decoding all images again: evernear or Pillow decodes them in another way than before")
    for slot in slots:
        writer.rewrite(slot, ledger.changes(slot))
    ledger.set_decoder(decoder)


def _require_groups(source: ArraySource | FileSource, settings: DataSettings, group: Grouping, ledger: Ledger) -> None:
    """Require that ``data.group`` fits at least one name of the source."""
    entries = chain(ledger.in_order(), () if isinstance(source, FileSource) else source.entries())
    if settings.group and not any(group(entry.name, entry.label) for entry in entries):
        example = next(chain(ledger.in_order(), source.entries())).name
        raise DataError(
            f"data.group={settings.group} finds a group in none of the names of {settings.source}, such as {example};"
            " correct it, or leave it out."
        )


def _refresh_groups(settings: DataSettings, group: Grouping, ledger: Ledger) -> None:
    """Set the groups of the images whose files are read: names, labels and ``data.group`` may have changed."""
    if settings.group or not ledger.groups.is_empty():
        ledger.groups.refresh(group)


def dataset_name(settings: DataSettings, source: ArraySource | FileSource) -> str:
    """The name of the dataset of a source.

    Raises:
        SettingsError: ``data.dataset`` is not a valid name.
    """
    name = settings.dataset or (name_of(settings.moved_from) if settings.moved_from else source.name)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", name):
        raise SettingsError(f"data.dataset={name!r} is not valid: use lower-case letters, digits, '.', '_' and '-'.")
    return name


def _require_one_source(ledger: Ledger, name: str, source: str) -> None:
    """Reject two sources that would become one dataset only because their names are alike."""
    if others := ledger.other_sources():
        raise DataError(
            f"The dataset {name!r} was made from {others[0]}, and {source} would be added to it. If the images have"
            f" moved, set data.moved_from={others[0]}. If they belong together, set data.dataset={name}. Otherwise"
            " start over with another --workdir or store."
        )


def _list_source(source: ArraySource | FileSource, ledger: Ledger, uri: str) -> None:
    """Record the listing of a source and the labels in it."""
    ledger.normalize_labels()
    labels: set[str] = set()
    if isinstance(source, FileSource):
        if isinstance(source, PackedFiles):
            source.remembered = ledger.members
        ledger.list_files(source.entries(), in_order=isinstance(source, PackedFiles))
        ledger.forget_unlisted()
        ledger.record_empty_folders(source.empty_folders)
        ledger.record_hidden_folders(source.hidden_folders)
        ledger.record_notes(source.notes)
        if not ledger.count_listed():
            raise DataError(
                f"{uri} contains no image in a class folder; put PNG, JPEG or WebP files under <class>/ or "
                f"<split>/<class>/.{_left_out(source)}"
            )
    else:
        labels.update(entry.label for entry in source.entries())
    labels.update(ledger.labels_listed())
    if len(labels) < 2:
        only = min(labels)
        raise DataError(
            f"{uri} contains images of only one class ({only!r}); a recognizer needs at least two. If {only!r} contains"
            " the class folders, use it as the source."
        )
    ledger.add_labels(sorted(labels.difference(ledger.labels()), key=_natural_order))


def _left_out(source: FileSource) -> str:
    """A sentence about the files of a source that are no images in a class folder; empty without any."""
    notes = [note for rule, note in source.notes.items() if rule in ("no_class", "not_an_image", "litter")]
    count = sum(note.count for note in notes)
    names = [name for note in notes for name in note.names][:_MAX_NAMES]
    if not count:
        return ""
    more = " and more" if count > len(names) else ""
    return f" {quantity(count, 'file was', 'files were')} left out: {', '.join(names)}{more}."


def _natural_order(label: str) -> tuple[list[str | int], str]:
    """Sort key that puts 2 before 10, and orders labels that differ in case only."""
    words = re.split(r"(\d+)", label.lower())
    return [int(word) if i % 2 else word for i, word in enumerate(words)], label


def _form(
    settings: DataSettings, source: ArraySource | FileSource, ledger: Ledger, parent: Manifest | None
) -> ImageForm:
    """How the dataset stores images: as the parent snapshot, else from the settings and the images."""
    sample = _Sample(settings, source, ledger)
    shape = _shape(settings, sample, parent)
    return ImageForm(shape, _resize(settings, parent), _bit_depth(settings, sample, parent))


def _shape(settings: DataSettings, sample: "_Sample", parent: Manifest | None) -> Shape:
    channels = {"auto": None, "gray": 1, "color": 3}[settings.channels]
    if parent is not None:
        default = parent.shape
    elif settings.size_px and channels:
        return settings.size_px, settings.size_px, channels
    else:
        default = sample.shape()
    shape = (settings.size_px or default[0], settings.size_px or default[1], channels or default[2])
    if parent is not None and shape != parent.shape:
        raise DataError(
            f"The dataset {parent.name!r} contains images of {_dimensions(parent.shape)}, but the settings"
            f" (data.size_px, data.channels) ask for {_dimensions(shape)}; leave them out, or start over with"
            " another --workdir or store."
        )
    return shape


def _dimensions(shape: Shape) -> str:
    return " x ".join(str(n) for n in shape)


def _resize(settings: DataSettings, parent: Manifest | None) -> Resize:
    if parent is None or settings.resize in ("auto", parent.resize):
        return parent.resize if parent is not None else settings.resize
    raise DataError(
        f"The images of the dataset {parent.name!r} were resized by data.resize={parent.resize}, and the settings ask "
        f"for {settings.resize}; give the new one another name (data.dataset)."
    )


def _bit_depth(settings: DataSettings, sample: "_Sample", parent: Manifest | None) -> BitDepth:
    asked: BitDepth | None = next((depth for depth in BIT_DEPTHS if depth == settings.bit_depth), None)
    if parent is None:
        return asked or sample.bit_depth()
    if asked not in (None, parent.bit_depth):
        raise DataError(
            f"The 16-bit images of the dataset {parent.name!r} were read with data.bit_depth={parent.bit_depth}, "
            f"and the settings ask for {asked}; leave it out, or start over with another --workdir or store."
        )
    return parent.bit_depth


class _Sample:
    """What images of a source are like, from about `_SAMPLED_FILES` of them; nothing is read before it is asked."""

    def __init__(self, settings: DataSettings, source: ArraySource | FileSource, ledger: Ledger) -> None:
        self._settings, self._source, self._ledger = settings, source, ledger

    def shape(self) -> Shape:
        """(H, W, C) of the dataset.

        If most images have one size, that is it. Otherwise the dataset is square, with the median of the shorter
        sides, because photographs are upright as well as wide. A side is at most ``data.max_size_px``. The dataset is
        gray if most images are.
        """
        if not isinstance(self._source, FileSource):
            return *next(self._source.blocks()).images.shape[1:], 1
        first = _first_file_shape(self._source, self._ledger, self._settings)
        shapes = [shape for shape, _ in self._files]
        sizes = [shape[:2] for shape in shapes]
        height, width = statistics.mode(sizes) if sizes else first[:2]
        if 2 * sizes.count((height, width)) < len(sizes):
            height = width = statistics.median_low(min(size) for size in sizes)
        scale = min(1.0, (self._settings.max_size_px or MAX_SIZE_PX) / max(height, width))
        grays = sum(channels == 1 for *_, channels in shapes)
        channels = (1 if 2 * grays > len(shapes) else 3) if shapes else first[2]
        return max(1, round(height * scale)), max(1, round(width * scale)), channels

    def bit_depth(self) -> BitDepth:
        """The smallest bit depth that contains the values of all 16-bit files; 16 if there are none."""
        used: list[BitDepth] = [depth for _, depth in self._files if depth]
        return max(used) if used else 16

    @cached_property
    def _files(self) -> list[tuple[Shape, BitDepth | None]]:
        """Shape and bit depth of the sampled files. Except for 16-bit files, their headers are enough."""
        source = self._source
        if not isinstance(source, FileSource):
            return []

        def describe(image: tuple[FileEntry, bytes | None]) -> tuple[Shape, BitDepth | None] | None:
            with suppress(DataError):
                file = read_image(source, image[0], self._settings.max_pixels, image[1])
                turned = file.orientation >= _FIRST_TRANSPOSED
                height, width = (file.width_px, file.height_px) if turned else (file.height_px, file.width_px)
                return (height, width, 1 if is_gray(file) else 3), bit_depth_of(file)
            return None

        with ThreadPoolExecutor(min(self._settings.requests_in_flight, _SAMPLED_AT_ONCE)) as pool:
            if isinstance(source, PackedFiles):  # a sample of all of them would read all files
                images = source.read_in_order(islice(self._ledger.in_order(), _SAMPLED_FILES))
            else:
                images = ((entry, None) for entry in self._ledger.sample(_SAMPLED_FILES))
            described = pool.map(describe, images)
            return [file for file in described if file is not None]


def _first_file_shape(source: FileSource, ledger: Ledger, settings: DataSettings) -> Shape:
    reason = ""
    for entry in ledger.in_order():
        try:
            image = decode_inspected(read_image(source, entry, settings.max_pixels), 16).image
        except DataError as error:
            reason = reason or str(error)
        else:
            return image.height, image.width, 1 if image.mode == "L" else 3
    raise DataError(f"No image in {settings.source} can be decoded; the first: {reason}")


class _Adder:
    """Adds images to the ledger and the shards, and reports progress."""

    def __init__(
        self,
        settings: DataSettings,
        form: ImageForm,
        placer: Placer,
        ledger: Ledger,
        writer: ShardWriter,
        report: Callable[[str], None],
        checkpoint: Callable[[], None],
    ) -> None:
        self._settings, self._form, self._placer = settings, form, placer
        self._ledger, self._writer = ledger, writer
        self._report, self._checkpoint = report, checkpoint
        self._reported_s = time.monotonic()
        self._done = 0
        self._label_indices = {label: number for number, label in enumerate(ledger.labels())}

    def add_arrays(self, source: ArraySource) -> None:
        """Add images that are already decoded."""
        for block in source.blocks():
            batch = Batch.of_arrays(block, self._form)
            self._ledger.list_decoded(zip(batch.names, batch.labels, batch.explicit_splits, batch.digests, strict=True))
            self._add(batch)
            self._progress(len(batch.names))
        self._ledger.forget_unlisted()

    def add_files(self, source: FileSource) -> None:
        """Decode and add the pending files."""
        total = self._ledger.count_pending()
        started_s = time.monotonic()
        checkpoint_s = started_s + _CHECKPOINT_INTERVAL_S
        requests, threads = self._settings.requests_in_flight, self._settings.decode_threads or available_cpus()
        batch_size = max(1, min(_BATCH_IMAGES, _BATCH_BYTES // math.prod(self._form.shape)))
        lookahead = max(requests, batch_size)
        decoder = Decoder(source, self._form, self._settings.max_pixels)
        with closing(decoder.decode_all(self._ledger.pending(page=1024), requests, threads, lookahead)) as results:
            for part in batched(results, batch_size):
                images = [result for result in part if isinstance(result, DecodedImage)]
                failures = [result for result in part if isinstance(result, DecodeFailure)]
                former_splits = self._ledger.former_splits([image.entry.name for image in images])
                self._ledger.record_results([(image.entry.name, image.digest, None) for image in images])
                self._ledger.record_results([(failure.entry.name, None, failure.reason) for failure in failures])
                if images:
                    self._add(Batch.of_files(images), former_splits)
                self._progress(len(part), total)
                now_s = time.monotonic()
                if now_s >= checkpoint_s:
                    self._checkpoint()
                    checkpoint_s = now_s + max(_CHECKPOINT_INTERVAL_S, _CHECKPOINT_FRACTION * (now_s - started_s))

    def _add(self, batch: Batch, former_splits: Mapping[str, Split] = NO_SPLITS) -> None:
        splits = self._placer.place(batch.names, batch.labels, batch.digests, batch.explicit_splits, former_splits)
        for split in SPLITS:
            rows = [row for row, chosen in splits.items() if chosen == split]
            if rows:
                self._add_rows(split, batch, rows)

    def _add_rows(self, split: Split, batch: Batch, rows: list[int]) -> None:
        labels = [self._label_indices[batch.labels[row]] for row in rows]
        digests = [batch.digests[row] for row in rows]
        slots = self._writer.append(split, batch.pixels[rows], labels, digests)
        self._ledger.add_images(
            NewImage(digest, label, slot, *batch.sizes[row], batch.flaws[row])
            for row, digest, label, slot in zip(rows, digests, labels, slots, strict=True)
        )

    def _progress(self, count: int, total: int = 0) -> None:
        self._done += count
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            self._report(f"{self._done:,} of {quantity(total, 'image')}" if total else quantity(self._done, "image"))


def _manifest(
    settings: DataSettings, snapshots: Snapshots, form: ImageForm, ledger: Ledger, parent: Manifest | None
) -> Manifest:
    """A snapshot without the problems of its images."""
    shards = ledger.shards().values()
    return Manifest(
        name=snapshots.name,
        store_uri=snapshots.store.uri,
        source=settings.source,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        parent=parent.digest if parent else None,
        shape=form.shape,
        resize=form.resize,
        bit_depth=form.bit_depth,
        labels=tuple(ledger.labels()),
        shards=tuple(shard for split in SPLITS for shard in shards if shard.split == split),
        groups=ledger.groups.count(),
        groups_sha256=ledger.groups.sha256(),
        reviewed=ledger.reviewed.count(),
        reviewed_left_out=ledger.reviewed.left_out(),
        ledger_sha256="",
    )
