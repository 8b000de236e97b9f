"""Batch prediction without a server: write predictions for all images of a source to Parquet files.

The source is listed once and divided into parts (`evernear.common.parts`). Each becomes one Parquet
file next to the folder of the parts. Parquet readers ignore that folder and the marker
(`evernear.common.outputs`), because their names begin with an underscore::

    <out>/part-000000.parquet
    <out>/_evernear/parts.json, ...
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.common.outputs import claim
from evernear.common.parts import Part, Parts, Worker, concurrently
from evernear.common.store import Store
from evernear.data.decoding import max_file_size_bytes
from evernear.data.image_tree import ImageFile, ImageTree, open_tree
from evernear.data.sources import NameSample, require_outside
from evernear.data.sources.names import OWN_FOLDER
from evernear.errors import DataError, IntegrityError, TransientStoreError
from evernear.serving.core import Predictor
from evernear.serving.release_source import ReleaseSource
from evernear.serving.responses import Prediction, Rejection

KIND = "predict"
FOLDER = OWN_FOLDER
"""The folder of the parts in the output directory."""
PART_IMAGES = 5000
"""Images per part: one second to a few minutes of work, depending on the size of the network."""
PART_BYTES = 2**31
BATCH_IMAGES = 64
BATCH_BYTES = 2**26
"""Two batches are in memory."""
READERS = 16
_SHOWN = 10
_SERVER_ERROR = 500
SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("digest", pa.string()),
        pa.field("label", pa.string()),
        pa.field("distance", pa.float32()),
        pa.field("unknown", pa.bool_()),
        pa.field("neighbors", pa.list_(pa.struct([("label", pa.string()), ("distance", pa.float32())]))),
        pa.field("version", pa.string(), nullable=False),
        pa.field("error", pa.string()),
    ]
)
"""``digest`` is the SHA-256 hash of the image file. For an image without a prediction, ``error`` is
set and the prediction columns are null."""


class PredictPart(Part):
    """``files`` holds the name and the size in bytes of each file."""

    files: tuple[tuple[str, int], ...]


class Shared(Frozen):
    source: str
    store_uri: str
    version: str
    part_images: int = Field(default=PART_IMAGES, ge=1)


class PredictResult(Frozen):
    """Counts the images of a part, or of all parts."""

    images: int = Field(ge=0)
    errors: int = Field(ge=0)
    failed: tuple[str, ...] = ()
    """The names of the first images without a prediction."""

    def predicted(self) -> str:
        """Text such as "4,998 predictions"."""
        return quantity(self.images - self.errors, "prediction")

    def left_out(self) -> str:
        """The number and first names of the images without a prediction, or "" without any."""
        if not self.errors:
            return ""
        more = " and more" if self.errors > len(self.failed) else ""
        count = quantity(self.errors, "image has no prediction", "images have no prediction")
        return f"{count}; see the column error: {', '.join(self.failed)}{more}"

    def require_predictions(self, source: str) -> None:
        if self.errors == self.images:
            raise DataError(f"No image of {source} has a prediction; the column error says why.")


def plan_predictions(shared: Shared, out: Store) -> Parts:
    """Return the plan in ``out``. If it has none, list the source and create one.

    Raises:
        ConflictError: ``out`` contains other files, or predictions for a different source or
            release.
    """
    require_outside(out, shared.source, store_uri=shared.store_uri)
    contents = f"predictions of {shared.source} by release {shared.version}"
    parts = Parts.find(out, FOLDER)
    if parts is not None:
        claim(out, contents)
        return parts  # even if the part size differs
    tree = open_tree(shared.source)
    listed = _parts(tree, shared)
    first = next(listed)
    claim(out, contents)
    every = chain([first], listed)
    return Parts.make(out, FOLDER, KIND, shared.model_dump(), every, lambda: _notes(tree.skipped, shared.source))


def summarize(parts: Parts) -> PredictResult:
    images = errors = 0
    failed: list[str] = []
    for stored in parts.results():
        result = PredictResult.from_json(stored.value, f"a result in {parts.store.uri}")
        images, errors = images + result.images, errors + result.errors
        failed += result.failed[: _SHOWN - len(failed)]
    return PredictResult(images=images, errors=errors, failed=tuple(failed))


def open_worker(parts: Parts, on_images: Callable[[int], None] = lambda _: None) -> Worker:
    """Load the release, and return a function that writes a part's predictions to a Parquet file.
    After each batch, it calls ``on_images`` with the number of images in the batch."""
    shared = Shared.model_validate(parts.plan.shared)
    tree = open_tree(shared.source)
    with ReleaseSource(shared.store_uri, shared.version).unpacked() as release:
        predictor = Predictor.open(release)

    def predict_part(number: int, value: bytes) -> bytes:
        part = PredictPart.from_json(value, f"part {number} in {parts.store.uri}")
        failed = NameSample()
        with tempfile.TemporaryDirectory(prefix="evernear-") as directory:
            path = Path(directory) / "part.parquet"
            with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
                for rows in _predict(predictor, tree, part):
                    writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
                    on_images(len(rows))
                    for row in rows:
                        if row["error"]:
                            failed.add(row["path"])
            parts.store.put(f"part-{number:06}.parquet", path)
        result = PredictResult(images=len(part.files), errors=failed.count, failed=tuple(failed.names[:_SHOWN]))
        return result.to_json()

    return predict_part


Row = dict[str, Any]


def _predict(predictor: Predictor, tree: ImageTree, part: PredictPart) -> Iterator[list[Row]]:
    """Yield the rows of each batch. The next batch's files are read while one is recognized."""
    max_pixels, version = predictor.manifest.max_pixels, predictor.manifest.version
    files = [ImageFile(*file) for file in part.files]

    def read(file: ImageFile) -> bytes | Rejection:
        limit_bytes = max_file_size_bytes(max_pixels)
        if file.size_bytes > limit_bytes:
            return Rejection(message=f"The file is too large: {file.size_bytes:,} bytes, the limit is {limit_bytes:,}.")
        try:
            return tree.read(file.name)
        except (DataError, IntegrityError) as error:
            return Rejection(message=str(error))

    with ThreadPoolExecutor(READERS, "read") as readers:

        def read_all(batch: list[ImageFile]) -> tuple[list[ImageFile], list[bytes | Rejection]]:
            return batch, [*readers.map(read, batch)]

        batches = _bounded(files, BATCH_IMAGES, BATCH_BYTES)
        for batch, images in concurrently(read_all, batches, ahead=1):
            answers = predictor.predict(images)
            yield [_row(*row, version) for row in zip(batch, images, answers, strict=True)]


def _row(file: ImageFile, image: bytes | Rejection, answer: Prediction | Rejection, version: str) -> Row:
    row: Row = dict.fromkeys(SCHEMA.names) | {"path": file.name, "version": version}
    if isinstance(image, bytes):
        row["digest"] = sha256_bytes(image)
    if isinstance(answer, Prediction):
        neighbors = [{"label": neighbor.label, "distance": neighbor.dist} for neighbor in answer.neighbors]
        return row | {
            "label": answer.pred, "distance": answer.dist, "unknown": answer.unknown, "neighbors": neighbors
        }  # fmt: skip
    if answer.code >= _SERVER_ERROR:  # not caused by the image: the vector server is down, for example
        raise TransientStoreError(answer.message)
    return row | {"error": answer.message}


def _bounded(files: Iterable[ImageFile], max_files: int, max_bytes: int) -> Iterator[list[ImageFile]]:
    """Split ``files``, in order, into groups within the limits. A larger file is its own group."""
    group: list[ImageFile] = []
    size_bytes = 0
    for file in files:
        if group and (len(group) == max_files or size_bytes + file.size_bytes > max_bytes):
            yield group
            group, size_bytes = [], 0
        group.append(file)
        size_bytes += file.size_bytes
    if group:
        yield group


def _parts(tree: ImageTree, shared: Shared) -> Iterator[PredictPart]:
    empty = True
    for group in _bounded(tree.files(), shared.part_images, PART_BYTES):
        empty = False
        yield PredictPart(units=len(group), files=tuple((file.name, file.size_bytes) for file in group))
    if empty:
        raise DataError(f"The source {shared.source} contains no image.")


def _notes(skipped: NameSample, source: str) -> tuple[str, ...]:
    if not skipped.count:
        return ()
    count = quantity(skipped.count, "file or folder that is no image", "files or folders that are no images")
    more = " and more" if skipped.count > _SHOWN else ""
    return (f"Skipped {count} in {source}: {', '.join(skipped.names[:_SHOWN])}{more}.",)
