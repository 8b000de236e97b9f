"""The parts of an ingest (`evernear.common.parts`): plan them, and decode and hash their files.
Each part is a range of the files in decoding order, and is processed independently of the others.

The decoding order depends only on the listing, and so do the parts. If an ingest is killed and run
again, the new run first finishes the planned parts. After that, the new run plans the files that
were added since. Plans are numbered::

    datasets/<name>/parts/<parent snapshot>/<settings>/<number>/...              parts and results
    datasets/<name>/parts/<parent snapshot>/<settings>/<number>/<sha256>.raw     one part's pixels

The result of a part describes each of its files, in the order of its pixels, and contains the name
of the object with the pixels. Parts and results are stored as columns, because columns are parsed
faster than rows.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evernear.common.disk import disk_errors, sha256_bytes, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import OpenWorker, Part, Parts, Worker, concurrently
from evernear.common.processes import available_cpus
from evernear.common.store import Store
from evernear.data.decoding import DecodedImage, DecodeFailure, Decoder, ImageForm
from evernear.data.ledger import Ledger, decode_order
from evernear.data.manifest import Manifest, Split
from evernear.data.preprocess import Pixels
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry, FileSource, open_source
from evernear.data.sources.packed import PackedFiles
from evernear.data.sqlite import batched
from evernear.errors import DataError, EvernearError, IntegrityError, MissingObjectError
from evernear.settings import DataSettings

KIND = "ingest"
REQUESTS_IN_FLIGHT = 32
"""Files to read concurrently. A bucket that answers in 20 ms limits two readers to 79 images per
second, which is less than a CPU decodes (benchmarks/results/scale_ingest.md)."""
RunParts = Callable[[Parts, OpenWorker], object]
"""Runs all parts that do not have a result yet. The `OpenWorker` opens a worker in this process."""
PART_SIZE_BYTES = 2**30
"""Most bytes of files in a part, and of their pixels in the form of the dataset."""
PART_NAMES = 20_000
"""Maximum number of files in a part, which limits the work that a killed ingest loses."""
_OF_SPEED = {"nodes"}
"""Settings that do not change the outcome of decoding a file."""


class IngestPart(Part):
    """Files in the order of decoding, with a column for each field of `FileEntry`. Columns are
    parsed faster than rows."""

    columns: tuple[
        tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[Split | None, ...], tuple[int, ...], tuple[str, ...]
    ]

    @classmethod
    def of(cls, entries: Sequence[FileEntry]) -> "IngestPart":
        return cls.model_validate({"units": len(entries), "columns": [*zip(*entries, strict=True)]})

    @property
    def entries(self) -> list[FileEntry]:
        return [FileEntry(*row) for row in zip(*self.columns, strict=True)]


class Shared(Frozen):
    settings: DataSettings
    form: ImageForm


class DecodedFile(NamedTuple):
    """With a digest, the file is an image; with a fault, it is broken; otherwise, it is no
    image."""

    name: str
    etag: str
    explicit_split: Split | None
    digest: str = ""
    width_px: int = 0
    height_px: int = 0
    flaws: int = 0
    fault: str | None = None


Decoded = tuple[DecodedFile, Pixels]
"""A file and its pixels, a uint8 array of shape (1, H, W, C), or (0, H, W, C) if it is no image."""


class DecodedPart(Frozen):
    """The result of a part, with a column for each field of `DecodedFile`."""

    columns: tuple[
        tuple[str, ...],
        tuple[str, ...],
        tuple[Split | None, ...],
        tuple[str, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[int, ...],
        tuple[str | None, ...],
    ]
    pixels: str = ""
    """The key of the pixels: uint8 (N, H, W, C) without a header. Empty without images."""
    sha256: str = ""

    @classmethod
    def of(cls, files: Iterable[DecodedFile], pixels: str = "", sha256: str = "") -> "DecodedPart":
        columns = [*zip(*files, strict=True)] or [()] * len(DecodedFile._fields)
        return cls.model_validate({"columns": columns, "pixels": pixels, "sha256": sha256})

    @property
    def files(self) -> Iterator[DecodedFile]:
        return map(DecodedFile._make, zip(*self.columns, strict=True))


def open_here(
    source: FileSource, settings: DataSettings, form: ImageForm, on_files: Callable[[int], None], parts: Parts
) -> Worker:
    """Bind all arguments but the last to get an `OpenWorker`. ``on_files`` receives the number of
    files decoded since its last call."""
    return partial(_decode_part, source, settings, form, on_files, parts)


def open_worker(parts: Parts) -> Worker:
    """Like `open_here`, but opens the source, in another process or on another machine."""
    shared = Shared.model_validate(parts.plan.shared)
    source = open_source(shared.settings.source, shared.settings)
    if not isinstance(source, FileSource):
        raise DataError(f"{shared.settings.source} has no files to decode.")
    return open_here(source, shared.settings, shared.form, lambda _: None, parts)


def _decode_part(
    source: FileSource,
    settings: DataSettings,
    form: ImageForm,
    on_files: Callable[[int], None],
    parts: Parts,
    number: int,
    value: bytes,
) -> bytes:
    """Decode a part, store the pixels by their sha256, and return its `DecodedPart` as JSON."""
    part = IngestPart.from_json(value, f"part {number} in {parts.store.uri}")
    at_once, threads = images_at_once(form), available_cpus()
    lookahead = max(REQUESTS_IN_FLIGHT, at_once)
    decoder, files = Decoder(source, form, settings.max_pixels), list[DecodedFile]()
    with tempfile.TemporaryDirectory(prefix="evernear-ingest-") as scratch:
        path = Path(scratch) / "pixels.raw"
        decoded = decoder.decode_all(iter(part.entries), REQUESTS_IN_FLIGHT, threads, lookahead)
        with closing(decoded) as results:
            for batch in batched(results, at_once):
                # Without a result for a file that is gone, the ingest lists the source again.
                files += [_decoded_file(each) for each in batch if not _is_gone(each)]
                _append(path, (result.pixels for result in batch if isinstance(result, DecodedImage)))
                on_files(len(batch))
        if not any(file.digest for file in files):
            return DecodedPart.of(files).to_json()
        sha256 = sha256_file(path)
        key = f"{parts.folder}/{sha256}.raw"
        parts.store.put(key, path)
    return DecodedPart.of(files, key, sha256).to_json()


def _is_gone(result: DecodedImage | DecodeFailure) -> bool:
    return isinstance(result, DecodeFailure) and result.is_gone


def _decoded_file(result: DecodedImage | DecodeFailure) -> DecodedFile:
    name, etag, _, explicit_split, *_ = result.entry
    if isinstance(result, DecodeFailure):
        return DecodedFile(name, etag, explicit_split, fault=result.reason)
    return DecodedFile(name, etag, explicit_split, result.digest.hex(), *result.size, int(result.flaws))


def _append(path: Path, images: Iterable[Pixels]) -> None:
    # The file is opened for each batch, so that a failed part leaves no open file.
    with disk_errors(path), path.open("ab") as file:
        for pixels in images:
            file.write(pixels.tobytes())


def decoded_names(parts: Parts) -> Iterator[tuple[str, str]]:
    for decoded in concurrently(partial(_result, parts), parts.done()):
        yield from ((file.name, file.etag) for file in decoded.files if file.fault is None)


def stored_results(parts: Parts, scratch: Path) -> Iterator[Decoded]:
    """Yield the decoded files of finished parts. At most three parts' pixels are on disk."""
    shape = Shared.model_validate(parts.plan.shared).form.shape

    def fetch(number: int) -> tuple[DecodedPart, Path]:
        decoded, path = _result(parts, number), scratch / f"{parts.plan.sha256}-{number}.raw"
        if decoded.pixels:
            try:
                parts.store.fetch(decoded.pixels, path, decoded.sha256)
            except IntegrityError as error:
                raise MissingObjectError(str(error)) from error
        return decoded, path

    for decoded, path in concurrently(fetch, parts.done(), ahead=1):
        pixels = np.empty((0, *shape), np.uint8)
        if decoded.pixels:
            pixels = np.asarray(np.memmap(path, np.uint8, "r").reshape(-1, *shape))
            path.unlink()  # the memory mapping stays valid
        row = 0
        for file in decoded.files:
            start, row = row, row + bool(file.digest)
            yield file, pixels[start:row]


def _result(parts: Parts, number: int) -> DecodedPart:
    where = f"part {number} in {parts.store.uri}/{parts.folder}"
    try:
        return DecodedPart.from_json(parts.result(number).value, where)
    except IntegrityError as error:
        raise MissingObjectError(str(error)) from error


_MAX_IMAGES = 500
_MAX_BYTES = 16 * 2**20


def images_at_once(form: ImageForm) -> int:
    return max(1, min(_MAX_IMAGES, _MAX_BYTES // math.prod(form.shape)))


def parts_folder(
    snapshots: Snapshots,
    settings: DataSettings,
    parent: Manifest | None,
    decoder: str,
    sizes_px: tuple[int, int],
    attempt: str,
) -> str:
    """Where plans are stored. Those of an equal earlier ingest with the same ``attempt`` are
    reused."""
    ledger = (parent.ledger_sha256, *parent.ledger_changes) if parent else ()
    # The key includes the names of all settings, because a version with different settings could
    # not read the plans.
    chosen = f"{[*DataSettings.model_fields]} {settings.model_dump_json(exclude=_OF_SPEED)} {sizes_px}"
    begun = f"{chosen} {ledger} {decoder} {attempt}"
    return f"{snapshots.parts_folder(parent)}{sha256_bytes(begun.encode())[:16]}"


def planned_form(store: Store, folder: str) -> ImageForm | None:
    """The form of a killed ingest. Another sample of the files might lead to another form."""
    parts = Parts.find(store, f"{folder}/0")
    return Shared.model_validate(parts.plan.shared).form if parts else None


def decode_in_parts(
    source: FileSource,
    settings: DataSettings,
    form: ImageForm,
    ledger: Ledger,
    store: Store,
    folder: str,
    run: RunParts,
    on_files: Callable[[int], None],
) -> list[Parts]:
    """Decode the pending files, and return the plans with the results, newest first."""
    plans: list[Parts] = []

    def run_plan(parts: Parts) -> None:
        try:
            run(parts, partial(open_here, source, settings, form, on_files))
        except EvernearError as error:
            if Parts.find(store, parts.folder) is None:
                raise MissingObjectError("Another ingest of the same files finished in the meantime.") from error
            raise

    while (earlier := Parts.find(store, f"{folder}/{len(plans)}")) is not None:
        with suppress(EvernearError):  # files may have been deleted since, and the next plan has the remaining files
            run_plan(earlier)
        ledger.note_decoded(decoded_names(earlier))
        plans.insert(0, earlier)
    if ledger.count_to_decode():
        parts = cut(ledger.to_decode(), source, PART_NAMES, math.prod(form.shape))
        shared = Shared(settings=settings, form=form).model_dump(mode="json")
        plans.insert(0, Parts.make(store, f"{folder}/{len(plans)}", KIND, shared, parts))
        run_plan(plans[0])
    return plans


def cut(entries: Iterable[FileEntry], source: FileSource, names: int, image_bytes: int) -> Iterator[IngestPart]:
    """Yield parts with at most ``names`` files and `PART_SIZE_BYTES`, or one larger file. A file of
    many images is not divided, because each part would read it completely."""
    names = min(names, max(1, PART_SIZE_BYTES // image_bytes))
    part, size_bytes = list[FileEntry](), 0
    for unit, unit_bytes in _units(entries, source):
        if part and (len(part) + len(unit) > names or size_bytes + unit_bytes > PART_SIZE_BYTES):
            yield IngestPart.of(part)
            part, size_bytes = [], 0
        part += unit
        size_bytes += unit_bytes
    if part:
        yield IngestPart.of(part)


def _units(entries: Iterable[FileEntry], source: FileSource) -> Iterator[tuple[list[FileEntry], int]]:
    """Yield files or, of packed files, all images together, which stay in one part, with their
    size."""
    if not isinstance(source, PackedFiles):
        return (([entry], entry.size_bytes) for entry in entries)
    units = (list(images) for _, images in groupby(entries, key=lambda entry: source.file_of(entry.name)))
    return ((unit, sum(entry.size_bytes for entry in unit)) for unit in units)


def in_order(plans: list[Iterator[Decoded]], source: FileSource) -> Iterator[Decoded]:
    """Merge the decoded files of several plans, in the order of a single plan."""
    if len(plans) == 1:
        return plans[0]

    def order(decoded: Decoded) -> tuple[int, str]:
        name, split = decoded[0].name, decoded[0].explicit_split
        if isinstance(source, PackedFiles):
            return decode_order(name, split, in_order=True), source.file_of(name)
        return decode_order(name, split, in_order=False), name

    return merge(*plans, key=order)
