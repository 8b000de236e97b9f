"""Source in, dataset snapshot out: streaming, incremental, and the same for the same images.

A dataset mirrors each source it was fed from: new files are added, files that went are dropped, a moved file
takes its new label, all by content hash. A split, once an image has it, never changes: a model may have seen
the image.
"""

import json
import math
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from PIL import Image

from evernear.data.image_file import EncodedImage, inspect
from evernear.data.ledger import Ledger, Listed, NewImage
from evernear.data.manifest import SPLITS, Manifest, Split, ledger_key, manifest_key
from evernear.data.preprocess import Pixels, decode_inspected, image_digest, pixels_digest, to_array
from evernear.data.sources import Arrays, ArraySource, FileSource, open_source
from evernear.data.writer import ShardWriter
from evernear.disk import disk_errors, sha256_file
from evernear.errors import ConflictError, DataError, IntegrityError, SettingsError
from evernear.settings import DataSettings
from evernear.store import Store, open_store
from evernear.threads import available_cpus

Say = Callable[[str], None]
Shape = tuple[int, int, int]

# Images on their way into a shard: a few of large ones, many of small ones.
_BATCH = 256
_BATCH_BYTES = 16 * 2**20
# Images of the largest size that are decoded together, by as many threads as there may be.
_LARGEST_TOGETHER = 4
_SAY_EVERY_S = 1.0


@dataclass(frozen=True)
class Batch:
    """Images ready for a shard: ``pixels`` is uint8 (N, H, W, C) as the dataset has it."""

    names: list[str]
    labels: list[str]
    given: list[Split | None]
    digests: list[bytes]
    sizes: list[tuple[int, int]]
    constant: list[bool]
    pixels: Pixels


@dataclass(frozen=True)
class _Decoded:
    file: Listed
    digest: bytes
    size: tuple[int, int]
    constant: bool
    pixels: Pixels


@dataclass(frozen=True)
class _Fault:
    file: Listed
    sentence: str


def ingest(settings: DataSettings, store_uri: str, say: Say = lambda _: None) -> Manifest:
    """Bring a dataset in the store up to date with ``settings.source`` and return its snapshot.

    Without any change that is the snapshot of last time. Nothing a reader sees changes before the very last
    write, the move of ``head.json``; killed at any point and run again, it ends with the same digest. Memory
    does not grow with the number of images. ``say`` hears of the progress about once a second.

    Raises:
        DataError: no images, one class only, or images that cannot be put together with the earlier ones.
        StoreError: store or disk refuse. ConflictError: another ingest of this dataset was faster.
    """
    if settings.test_fraction + settings.gallery_fraction + settings.query_fraction >= 1:
        raise SettingsError("data.test_fraction, gallery_fraction and query_fraction leave nothing to train on.")
    source = open_source(settings.source)
    snapshots = _Snapshots(open_store(store_uri), _dataset_name(settings, source))
    with (
        disk_errors(tempfile.gettempdir()),
        tempfile.TemporaryDirectory(prefix="evernear-ingest-") as scratch,
    ):
        return _ingest(settings, source, snapshots, Path(scratch), say)


def split_of(digest: bytes, hashed: Iterable[Split], settings: DataSettings) -> Split:
    """The split that an image's content decides, out of ``hashed``; ``train`` gets what the others leave."""
    share = int.from_bytes(digest[:8]) / 2.0**64
    fractions: dict[Split, float] = {
        "test": settings.test_fraction,
        "gallery": settings.gallery_fraction,
        "query": settings.query_fraction,
    }
    for split, fraction in fractions.items():
        if split in hashed:
            if share < fraction:
                return split
            share -= fraction
    return "train"


def _ingest(
    settings: DataSettings, source: ArraySource | FileSource, snapshots: "_Snapshots", scratch: Path, say: Say
) -> Manifest:
    parent = snapshots.head()
    ledger_path = scratch / "ledger.sqlite"
    if parent is not None:
        snapshots.fetch_ledger(parent, ledger_path)
    with closing(Ledger(ledger_path, settings.source)) as ledger:
        if not settings.dataset:
            _require_one_source(ledger, snapshots.name, settings.source)
        if isinstance(source, FileSource):
            _list(source, ledger, settings.source)
            labels = ledger.labels_listed()
        else:
            labels = [*ledger.labels_listed(), *source.labels()]
        _add_labels(ledger, labels, settings.source)
        shape = _shape(settings, source, ledger, parent)
        writer = ShardWriter(snapshots.store, snapshots.name, shape, settings.shard_size_bytes, ledger, scratch)
        adder = _Adder(settings, source, ledger, writer, say)
        if isinstance(source, FileSource):
            adder.add_files(source, shape)
        else:
            adder.add_arrays(source, shape)
        writer.close()
        for slot in ledger.reconcile():
            writer.rewrite(slot, ledger.changes(slot))
        say("writing the manifest")
        return snapshots.publish(_manifest(settings, snapshots, shape, ledger, parent), ledger, scratch)


def _require_one_source(ledger: Ledger, name: str, source: str) -> None:
    """Stop two sources from becoming one dataset only because their names are alike."""
    if others := ledger.other_sources():
        raise DataError(
            f"The dataset {name!r} was made from {others[0]}, and {source} would be added to it: set"
            f" data.dataset={name} if that is meant, else give it a name of its own (data.dataset)."
        )


def _list(source: FileSource, ledger: Ledger, place: str) -> None:
    ledger.list_files(source.files())
    ledger.forget_unlisted()
    ledger.note_empty_folders(source.empty_folders)
    ledger.note_hidden_folders(source.hidden_folders)
    if not ledger.count_listed():
        raise DataError(
            f"{place} holds no image in a class folder; put PNG or JPEG files under <class>/ or <split>/<class>/."
        )


def _add_labels(ledger: Ledger, labels: Iterable[str], place: str) -> None:
    distinct = set(labels)
    if len(distinct) < 2:
        raise DataError(f"{place} holds images of one class only ({min(distinct)!r}); a recogniser needs at least two.")
    ledger.add_labels(sorted(distinct.difference(ledger.labels()), key=_natural))


def _natural(label: str) -> tuple[list[str | int], str]:
    """Sorts 2 before 10, and keeps one order for labels that differ in case only."""
    words = re.split(r"(\d+)", label.lower())
    return [int(word) if i % 2 else word for i, word in enumerate(words)], label


def _shape(settings: DataSettings, source: ArraySource | FileSource, ledger: Ledger, parent: Manifest | None) -> Shape:
    """(H, W, C) of the dataset: the settings', else the earlier snapshot's, else the first image's."""
    wanted_channels = {"auto": None, "gray": 1, "color": 3}[settings.channels]
    if parent is not None:
        height, width, channels = parent.shape
    elif settings.size_px and wanted_channels:
        return settings.size_px, settings.size_px, wanted_channels
    else:
        height, width, channels = (
            _first_file(source, ledger, settings) if isinstance(source, FileSource) else (*source.size_px(), 1)
        )
    shape = (settings.size_px or height, settings.size_px or width, wanted_channels or channels)
    if parent is not None and shape != parent.shape:
        raise DataError(
            f"The dataset {parent.name!r} holds images of {_times(parent.shape)}, the settings (data.size_px,"
            f" data.channels) ask for {_times(shape)}; give the new one another name (data.dataset)."
        )
    return shape


def _times(shape: Shape) -> str:
    return " x ".join(str(n) for n in shape)


def _first_file(source: FileSource, ledger: Ledger, settings: DataSettings) -> Shape:
    fault = ""
    for file in ledger.in_order():
        try:
            image = decode_inspected(_open(source, file, settings.max_pixels))
        except DataError as error:
            fault = fault or str(error)
        else:
            return image.height, image.width, 1 if image.mode == "L" else 3
    raise DataError(f"No image in {settings.source} can be decoded; the first: {fault}")


class _Adder:
    """Brings images into ledger and shards, and says how far it is."""

    def __init__(
        self,
        settings: DataSettings,
        source: ArraySource | FileSource,
        ledger: Ledger,
        writer: ShardWriter,
        say: Say,
    ) -> None:
        self._settings, self._source, self._ledger, self._writer = settings, source, ledger, writer
        self._say = say
        self._said_s = time.monotonic()
        self._done = 0
        self._numbers = {label: number for number, label in enumerate(ledger.labels())}

    def add_arrays(self, source: ArraySource, shape: Shape) -> None:
        """Take images that come decoded; no Pillow where they have the dataset's size."""
        for block in source.blocks():
            batch = _batch_of_arrays(block, shape)
            self._ledger.list_decoded(zip(batch.names, batch.labels, batch.given, batch.digests, strict=True))
            self._add(batch)
            self._progress(len(batch.names))
        self._ledger.forget_unlisted()

    def add_files(self, source: FileSource, shape: Shape) -> None:
        """Decode what is pending, in parallel but in order."""
        total = self._ledger.count_pending()
        results = _decode_all(source, self._ledger.pending(page=1024), shape, self._settings)
        with closing(results):
            for part in _parts(results, _batch_size(shape)):
                good = [result for result in part if isinstance(result, _Decoded)]
                bad = [result for result in part if isinstance(result, _Fault)]
                self._ledger.settle([(d.file.name, d.digest, None) for d in good])
                self._ledger.settle([(f.file.name, None, f.sentence) for f in bad])
                if good:
                    self._add(_batch_of_files(good))
                self._progress(len(part), total)

    def _add(self, batch: Batch) -> None:
        known = self._ledger.known(batch.digests)
        rows_of: dict[Split, list[int]] = {split: [] for split in SPLITS}
        for row, digest in enumerate(batch.digests):
            if digest not in known:
                known.add(digest)
                split = batch.given[row] or split_of(digest, self._source.hashed, self._settings)
                rows_of[split].append(row)
        for split, rows in rows_of.items():
            if rows:
                self._add_rows(split, batch, rows)

    def _add_rows(self, split: Split, batch: Batch, rows: list[int]) -> None:
        labels = [self._numbers[batch.labels[row]] for row in rows]
        digests = [batch.digests[row] for row in rows]
        slots = self._writer.append(split, batch.pixels[rows], labels, digests)
        self._ledger.add_images(
            NewImage(digest, label, slot, *batch.sizes[row], batch.constant[row])
            for row, digest, label, slot in zip(rows, digests, labels, slots, strict=True)
        )

    def _progress(self, count: int, total: int = 0) -> None:
        self._done += count
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            self._say(f"{self._done:,} of {total:,} images" if total else f"{self._done:,} images")


def _batch_size(shape: Shape) -> int:
    return max(1, min(_BATCH, _BATCH_BYTES // math.prod(shape)))


def _batch_of_arrays(block: Arrays, shape: Shape) -> Batch:
    count, height, width = block.images.shape
    flat = block.images.reshape(count, -1)
    if (height, width) == shape[:2]:
        pixels = np.repeat(block.images[..., None], shape[2], axis=3)
    else:
        pixels = np.stack([to_array(Image.fromarray(image), *shape) for image in block.images])
    return Batch(
        names=block.names,
        labels=block.labels,
        given=[block.given] * count,
        digests=[pixels_digest("L", width, height, row.tobytes()) for row in flat],
        sizes=[(width, height)] * count,
        constant=(flat.min(axis=1) == flat.max(axis=1)).tolist(),
        pixels=pixels,
    )


def _batch_of_files(decoded: list[_Decoded]) -> Batch:
    return Batch(
        names=[d.file.name for d in decoded],
        labels=[d.file.label for d in decoded],
        given=[d.file.given for d in decoded],
        digests=[d.digest for d in decoded],
        sizes=[d.size for d in decoded],
        constant=[d.constant for d in decoded],
        pixels=np.stack([d.pixels for d in decoded]),
    )


def _decode_all(
    source: FileSource, files: Iterator[Listed], shape: Shape, settings: DataSettings
) -> Generator[_Decoded | _Fault]:
    """Decode on all cores, a bounded number of images ahead, and give them back in order."""
    threads = settings.decode_threads or available_cpus()
    most = max(threads, min(4 * threads, _batch_size(shape)))
    decoder = _Decoder(source, shape, settings.max_pixels)
    ahead: deque[Future[_Decoded | _Fault]] = deque()
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        for file in files:
            ahead.append(pool.submit(decoder.decode, file))
            if len(ahead) >= most:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Decoder:
    """Decodes files in many threads, in memory that does not grow with their number."""

    def __init__(self, source: FileSource, shape: Shape, max_pixels: int) -> None:
        self._source, self._shape, self._max_pixels = source, shape, max_pixels
        self._files_size_bytes = _Budget(_LARGEST_TOGETHER * _max_file_size_bytes(max_pixels))
        self._pixels = _Budget(_LARGEST_TOGETHER * max_pixels)

    def decode(self, file: Listed) -> _Decoded | _Fault:
        """The image of a file, or what is wrong with it."""
        # One size is that in the listing: a file that is too large is refused before it is read.
        with self._files_size_bytes.taken(min(file.size_bytes, _max_file_size_bytes(self._max_pixels))):
            try:
                encoded = _open(self._source, file, self._max_pixels)
                with self._pixels.taken(encoded.pixels):
                    return self._decoded(file, decode_inspected(encoded))
            except DataError as error:
                return _Fault(file, str(error))

    def _decoded(self, file: Listed, image: Image.Image) -> _Decoded:
        extrema = np.asarray(image.getextrema()).reshape(-1, 2)
        return _Decoded(
            file=file,
            digest=image_digest(image),
            size=image.size,
            constant=bool((extrema[:, 0] == extrema[:, 1]).all()),
            pixels=to_array(image, *self._shape),
        )


class _Budget:
    """Lets threads go on together as long as they take no more than ``limit`` in all."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, amount: int) -> Generator[None]:
        """Wait until ``amount``, which is at most the limit, is left, and take it for the context."""
        with self._changed:
            self._changed.wait_for(lambda: amount <= self._left)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()


def _open(source: FileSource, file: Listed, max_pixels: int) -> EncodedImage:
    if file.size_bytes > _max_file_size_bytes(max_pixels):
        raise DataError(f"{file.name} is too large: {file.size_bytes} bytes.")
    return inspect(source.read(file.name), max_pixels, file.name)


def _max_file_size_bytes(max_pixels: int) -> int:
    """The size of the pixels, were they not compressed at all: 4 channels of 16 bits."""
    return 8 * max_pixels


def _parts(results: Iterable[_Decoded | _Fault], size: int) -> Iterator[list[_Decoded | _Fault]]:
    part: list[_Decoded | _Fault] = []
    for result in results:
        part.append(result)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part


class _Snapshots:
    """The snapshots of one dataset in the store, and the pointer to the newest."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self._base = f"datasets/{name}"
        self._head_key = f"{self._base}/head.json"
        self._head_etag: str | None = None

    def head(self) -> Manifest | None:
        """The newest snapshot."""
        found = self.store.find(self._head_key)
        if found is None:
            return None
        data, self._head_etag = found
        try:
            digest = str(json.loads(data)["digest"])
        except (ValueError, KeyError, TypeError):
            raise IntegrityError(f"{self.store.uri}/{self._head_key} is no pointer to a snapshot.") from None
        key = self._manifest_key(digest)
        manifest = Manifest.from_json(self.store.get(key), f"{self.store.uri}/{key}")
        if manifest.digest != digest:
            raise IntegrityError(f"{self.store.uri}/{key} does not hold the snapshot of that digest.")
        return manifest

    def fetch_ledger(self, manifest: Manifest, path: Path) -> None:
        """Copy a snapshot's ledger to ``path``."""
        self.store.fetch(self._ledger_key(manifest.ledger_sha256), path, manifest.ledger_sha256)

    def publish(self, manifest: Manifest, ledger: Ledger, scratch: Path) -> Manifest:
        """Make ``manifest`` the newest snapshot, unless the newest one holds the same."""
        if manifest.digest == manifest.parent:
            head = self.head()
            if head is not None and head.digest == manifest.digest:
                return head
        path = scratch / "published.sqlite"
        ledger.publish(path)
        manifest = manifest.model_copy(update={"ledger_sha256": sha256_file(path)})
        self.store.put(self._ledger_key(manifest.ledger_sha256), path)
        key = self._manifest_key(manifest.digest)
        try:
            self.store.put_if(key, manifest.to_json(), None)
        except ConflictError:  # an earlier run made the same snapshot, and a snapshot never changes
            manifest = Manifest.from_json(self.store.get(key), f"{self.store.uri}/{key}")
        self._move_head(manifest)
        return manifest

    def _move_head(self, manifest: Manifest) -> None:
        pointer = json.dumps({"digest": manifest.digest}).encode() + b"\n"
        try:
            self.store.put_if(self._head_key, pointer, self._head_etag)
        except ConflictError:
            if self.store.get(self._head_key) != pointer:
                raise ConflictError(
                    f"Another ingest of the dataset {self.name!r} finished meanwhile; run again."
                ) from None

    def _manifest_key(self, digest: str) -> str:
        return manifest_key(self.name, digest)

    def _ledger_key(self, sha256: str) -> str:
        return ledger_key(self.name, sha256)


def _manifest(
    settings: DataSettings, snapshots: _Snapshots, shape: Shape, ledger: Ledger, parent: Manifest | None
) -> Manifest:
    expected = None if settings.size_px else (shape[1], shape[0])
    problems, counts = ledger.problems(expected)
    shards = ledger.shards().values()
    return Manifest(
        name=snapshots.name,
        store_uri=snapshots.store.uri,
        source=settings.source,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        parent=parent.digest if parent else None,
        shape=shape,
        labels=tuple(ledger.labels()),
        shards=tuple(shard for split in SPLITS for shard in shards if shard.split == split),
        ledger_sha256="",
        problems=tuple(problems),
        problem_counts=counts,
    )


def _dataset_name(settings: DataSettings, source: ArraySource | FileSource) -> str:
    name = settings.dataset or source.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", name):
        raise SettingsError(f"data.dataset={name!r} is no name: use lower-case letters, digits, '.', '_' and '-'.")
    return name
