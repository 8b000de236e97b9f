"""The parts of an ingest (`evernear.common.parts`): plan them, and decode and hash their files.
Each part is a range of the files in decoding order, and is processed independently of the others.
This is the third stage of an ingest.

The decoding order depends only on the listing, and so do the parts. If an ingest is killed and run
again, the new run first finishes the planned parts. After that, the new run plans the files that
were added since. Plans are numbered::

    datasets/<name>/parts/<parent snapshot>/<settings>/<number>/...              parts and results
    datasets/<name>/parts/<parent snapshot>/<settings>/<number>/<sha256>.raw     one part's pixels

The result of a part is a Parquet file with a row for each of its files, in the order of its pixels.
Its metadata contains the name of the object with the pixels.
"""

import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from io import BytesIO
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evernear.common.disk import disk_errors, sha256_bytes, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import OpenWorker, Part, Parts, Worker, concurrently
from evernear.common.processes import available_cpus
from evernear.common.store import Store
from evernear.data.database import ArrowTable, Database, batched
from evernear.data.decoding import DecodedImage, DecodeFailure, Decoder, ImageForm
from evernear.data.manifest import Manifest, Split
from evernear.data.plan import DECODED_FILES, to_decode
from evernear.data.preprocess import Pixels
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry, FileSource, open_source
from evernear.data.sources.packed import PackedFiles
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
    """Files in the order of decoding, with a column for each of the first fields of `FileEntry`.
    Columns are parsed faster than rows."""

    columns: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[Split | None, ...], tuple[int, ...]]

    @classmethod
    def of(cls, entries: Sequence[FileEntry]) -> "IngestPart":
        columns = tuple(zip(*entries, strict=True))[:5]
        return cls.model_construct(units=len(entries), columns=columns)

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
    digest: bytes | None = None
    width_px: int = 0
    height_px: int = 0
    flaws: int = 0
    fault: str | None = None


DECODED = pa.schema([
    ("name", pa.string()), ("etag", pa.string()), ("digest", pa.binary()), ("width_px", pa.int32()),
    ("height_px", pa.int32()), ("flaws", pa.int32()), ("fault", pa.string()),
])  # fmt: skip


class DecodedPart(NamedTuple):
    """The result of a part."""

    files: ArrowTable
    """With the columns of `DECODED`."""
    pixels: str
    """The key of the pixels: uint8 (N, H, W, C) without a header. Empty without images."""
    sha256: str


def encode_result(files: Sequence[DecodedFile], pixels: str = "", sha256: str = "") -> bytes:
    columns = [*map(list, zip(*files, strict=True))] or [[] for _ in DECODED]
    schema = DECODED.with_metadata({"pixels": pixels, "sha256": sha256})
    buffer = BytesIO()
    pq.write_table(pa.table(columns, schema), buffer, compression="zstd", use_dictionary=False)
    return buffer.getvalue()


def _parse_result(value: bytes, where: str) -> DecodedPart:
    try:
        files = pq.read_table(BytesIO(value))
        metadata = files.schema.metadata or {}
        pixels, sha256 = (metadata[name].decode() for name in (b"pixels", b"sha256"))
        return DecodedPart(files.select(DECODED.names).cast(DECODED), pixels, sha256)
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise MissingObjectError(f"{where} is damaged: {error}.") from error


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
    """Decode a part, store the pixels by their sha256, and return its result."""
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
            return encode_result(files)
        sha256 = sha256_file(path)
        key = f"{parts.folder}/{sha256}.raw"
        parts.store.put(key, path)
    return encode_result(files, key, sha256)


def _is_gone(result: DecodedImage | DecodeFailure) -> bool:
    return isinstance(result, DecodeFailure) and result.is_gone


def _decoded_file(result: DecodedImage | DecodeFailure) -> DecodedFile:
    name, etag, *_ = result.entry
    if isinstance(result, DecodeFailure):
        return DecodedFile(name, etag, fault=result.reason)
    return DecodedFile(name, etag, result.digest, *result.size, int(result.flaws))


def _append(path: Path, images: Iterable[Pixels]) -> None:
    # The file is opened for each batch, so that a failed part leaves no open file.
    with disk_errors(path), path.open("ab") as file:
        for pixels in images:
            file.write(pixels.tobytes())


def _decoded_files(plans: Iterable[Parts]) -> Iterator[ArrowTable]:
    """For each part, the names and etags of the files that need not be read again."""
    for parts in plans:
        for decoded in concurrently(partial(_result, parts), parts.done()):
            yield decoded.files.filter(decoded.files["fault"].is_null()).select(DECODED_FILES.names)


RESULTS = pa.schema([
    ("plan", pa.int32()), ("part", pa.int32()), ("row", pa.int32()), ("position", pa.int64()), *DECODED,
])  # fmt: skip
_BEST_RESULTS = """
CREATE TABLE best_results AS
SELECT plan, part, row, row_number() OVER (ORDER BY turn(given_split, name), name) - 1 AS position, name, etag, digest,
  width_px, height_px, flaws, fault
FROM (
  SELECT r.*, p.given_split FROM results r JOIN pending p USING (name, etag)
  QUALIFY row_number() OVER (PARTITION BY r.name ORDER BY r.digest IS NULL, r.plan) = 1
);
CREATE OR REPLACE VIEW results AS SELECT * FROM best_results;
"""


def load_results(plans: Sequence[Parts], db: Database) -> None:
    """Make the table ``results`` with one result of each file, numbered in the order of a single
    plan. An image precedes a fault that another plan has of its file."""
    position = 0
    with db.written("results", RESULTS) as write:
        for plan, parts in enumerate(plans):
            for number, decoded in concurrently(partial(_numbered_result, parts), parts.done()):
                count = len(decoded.files)
                is_image = np.asarray(decoded.files["digest"].is_valid())
                own = [np.full(count, plan), np.full(count, number), np.cumsum(is_image) - 1]
                columns = [*own, np.arange(position, position + count), *decoded.files.columns]
                write(pa.table(columns, RESULTS.names).cast(RESULTS))
                position += count
    if len(plans) > 1:
        db.run(_BEST_RESULTS)


def stored_pixels(
    plans: Sequence[Parts], needed: Iterable[tuple[int, int]], scratch: Path
) -> Iterator[tuple[tuple[int, int], Pixels]]:
    """Yield the pixels of each part in ``needed`` (plan and part). At most three are on disk before
    they are used."""

    def fetch(key: tuple[int, int]) -> tuple[tuple[int, int], Pixels]:
        parts = plans[key[0]]
        decoded = _result(parts, key[1])
        path = scratch / f"{parts.plan.sha256}-{key[1]}.raw"
        shape = Shared.model_validate(parts.plan.shared).form.shape
        try:
            parts.store.fetch(decoded.pixels, path, decoded.sha256)
        except IntegrityError as error:
            raise MissingObjectError(str(error)) from error
        pixels = np.asarray(np.memmap(path, np.uint8, "r").reshape(-1, *shape))
        path.unlink()  # the memory mapping stays valid
        return key, pixels

    return concurrently(fetch, needed, ahead=1)


def _numbered_result(parts: Parts, number: int) -> tuple[int, DecodedPart]:
    return number, _result(parts, number)


def _result(parts: Parts, number: int) -> DecodedPart:
    where = f"Part {number} in {parts.store.uri}/{parts.folder}"
    try:
        return _parse_result(parts.result(number).value, where)
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
    tables = [partition.sha256 for partitions in parent.tables.values() for partition in partitions] if parent else []
    # The key includes the names of all settings, because a version with different settings could
    # not read the plans.
    chosen = f"{[*DataSettings.model_fields]} {settings.model_dump_json(exclude=_OF_SPEED)} {sizes_px}"
    begun = f"{chosen} {tables} {decoder} {attempt}"
    return f"{snapshots.parts_folder(parent)}{sha256_bytes(begun.encode())[:16]}"


def planned_form(store: Store, folder: str) -> ImageForm | None:
    """The form of a killed ingest. Another sample of the files might lead to another form."""
    parts = Parts.find(store, f"{folder}/0")
    return Shared.model_validate(parts.plan.shared).form if parts else None


def decode_in_parts(
    source: FileSource,
    settings: DataSettings,
    form: ImageForm,
    db: Database,
    pending: int,
    store: Store,
    folder: str,
    run: RunParts,
    on_files: Callable[[int], None],
) -> list[Parts]:
    """Decode the ``pending`` files, and return the plans with the results, newest first."""
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
        plans.insert(0, earlier)
    entries = to_decode(db, _decoded_files(plans)) if pending else iter(())
    if (first := next(entries, None)) is not None:
        parts = cut(chain([first], entries), source, PART_NAMES, math.prod(form.shape))
        shared = Shared(settings=settings, form=form).model_dump(mode="json")
        plans.insert(0, Parts.make(store, f"{folder}/{len(plans)}", KIND, shared, parts))
        run_plan(plans[0])
    return plans


def cut(entries: Iterable[FileEntry], source: FileSource, names: int, image_bytes: int) -> Iterator[IngestPart]:
    """Yield parts with at most ``names`` files and `PART_SIZE_BYTES`, or one larger file. A file of
    many images is not divided, because each part would read it completely."""
    names = min(names, max(1, PART_SIZE_BYTES // image_bytes))
    return _cut_packed(entries, source, names) if isinstance(source, PackedFiles) else _cut_files(iter(entries), names)


def _cut_files(entries: Iterator[FileEntry], names: int) -> Iterator[IngestPart]:
    part = list(islice(entries, names))
    while part:
        sizes_bytes = accumulate(entry.size_bytes for entry in part)
        end = max(1, bisect_right(list(sizes_bytes), PART_SIZE_BYTES))
        yield IngestPart.of(part[:end])
        part = part[end:]
        part += islice(entries, names - len(part))


def _cut_packed(entries: Iterable[FileEntry], source: PackedFiles, names: int) -> Iterator[IngestPart]:
    part, size_bytes = list[FileEntry](), 0
    for _, images in groupby(entries, key=lambda entry: source.file_of(entry.name)):
        file = list(images)
        file_bytes = sum(entry.size_bytes for entry in file)
        if part and (len(part) + len(file) > names or size_bytes + file_bytes > PART_SIZE_BYTES):
            yield IngestPart.of(part)
            part, size_bytes = [], 0
        part += file
        size_bytes += file_bytes
    if part:
        yield IngestPart.of(part)
