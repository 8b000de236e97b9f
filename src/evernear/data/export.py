"""Export a dataset snapshot to files that other tools can open: Parquet, WebDataset, or folders of
PNG files.

One of three writers consumes a stream of rows::

    <out>/data/train-00000-of-00012.parquet     (Hugging Face's name for a split's file)
    <out>/train-000000.tar
    <out>/train/<label>/<position>-<digest>.png

The files depend only on the snapshot, so an export that was killed is run again from its beginning.
A file becomes visible when it is complete.
"""

import json
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import chain, count, groupby, repeat
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from evernear.common.disk import disk_errors
from evernear.common.parts import concurrently
from evernear.common.store import Store
from evernear.data.books import opened_books
from evernear.data.database import batched
from evernear.data.manifest import SPLITS, Manifest, Split
from evernear.data.preprocess import Pixels, pixels_digest
from evernear.data.shards import Block, Dataset
from evernear.data.sources.names import exported_stem, is_skipped
from evernear.data.writer import group_number
from evernear.errors import SettingsError

Format = Literal["parquet", "webdataset", "folder"]
FILE_BYTES = 2**28
FILE_IMAGES = 100_000
"""Most images in a Parquet or tar file, whose pixels are limited to `FILE_BYTES` too."""
_BLOCK_BYTES = 2**23
"""Maximum size of the pixels that are read at a time. They form one row group of a Parquet file."""
_BLOCK_IMAGES = 1000
_MAX_NAME_BYTES = 255

Embedded = Iterator[tuple[Block, NDArray[np.float32] | None]]
Embed = Callable[[Iterable[tuple[Iterator[Block], int]]], Embedded]
"""Adds embeddings to the blocks of shards, each of which comes with its number of images."""


class Row(NamedTuple):
    """An image of a split, as a PNG file. ``number`` is the number of its label in the manifest.
    ``group`` is None if the dataset has no groups, and empty if the image has none."""

    split: Split
    position: int
    image: bytes
    label: str
    number: int
    digest: str
    group: str | None
    embedding: NDArray[np.float32] | None

    @property
    def stem(self) -> str:
        """A name that is unique in the split and preserves the order of the images."""
        return exported_stem(self.position, self.digest)


def without_embeddings(shards: Iterable[tuple[Iterator[Block], int]]) -> Embedded:
    for blocks, _ in shards:
        yield from zip(blocks, repeat(None))


def require_folder_names(manifest: Manifest) -> None:
    """Require each label to be a folder name that ingest reads back as the same label."""
    labels = {label for shard in manifest.shards for label in shard.label_counts}
    for label in sorted(labels):
        if is_skipped(label) or {"/", "\\", "\0"} & set(label) or len(label.encode()) > _MAX_NAME_BYTES:
            raise SettingsError(
                f"The label {label!r} cannot be the name of a folder; use --format parquet or --format webdataset."
            )


def export_dataset(
    dataset: Dataset,
    out: Store,
    form: Format,
    embed: Embed = without_embeddings,
    report: Callable[[int], None] = lambda _: None,
) -> None:
    """Memory use does not grow with the number of images. ``report`` receives it."""
    groups = _group_names(dataset) if form != "folder" and dataset.manifest.groups else None
    rows = _reported(_rows(dataset, embed, groups), report)
    match form:
        case "parquet":
            _write_parquet(out, dataset, rows)
        case "webdataset":
            _write_tars(out, dataset, rows)
        case "folder":
            _write_folders(out, rows)


def _write_parquet(out: Store, dataset: Dataset, rows: Iterator[Row]) -> None:
    for split, number, of_file in _files(dataset, rows):
        first = next(of_file)
        schema = _schema(first)
        with _scratch_file() as path:
            with pq.ParquetWriter(path, schema, use_dictionary=False) as file:
                for block in batched(chain([first], of_file), _block_images(dataset)):
                    file.write_table(pa.Table.from_pylist([_fields(row) for row in block], schema))
            files = ceil(sum(shard.count for shard in dataset.shards(split)) / _file_images(dataset))
            out.put(f"data/{split}-{number:05}-of-{files:05}.parquet", path)


def _fields(row: Row) -> dict[str, Any]:
    return row._asdict() | {"image": {"bytes": row.image, "path": f"{row.stem}.png"}}


def _schema(row: Row) -> Any:
    """The metadata contains the feature types for Hugging Face's `datasets`."""
    texts = ("label", "split", "digest", *(() if row.group is None else ("group",)))
    fields = [
        pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        *(pa.field(name, pa.string()) for name in texts),
    ]
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    features |= {name: {"dtype": "string", "_type": "Value"} for name in texts}
    if row.embedding is not None:
        dim = len(row.embedding)
        fields.append(pa.field("embedding", pa.list_(pa.float32(), dim)))
        features["embedding"] = {"feature": {"dtype": "float32", "_type": "Value"}, "length": dim, "_type": "List"}
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def _write_tars(out: Store, dataset: Dataset, rows: Iterator[Row]) -> None:
    for split, number, of_file in _files(dataset, rows):
        with _scratch_file() as path:
            with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
                for row in of_file:
                    for suffix, content in _members(row):
                        member = tarfile.TarInfo(f"{row.stem}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, BytesIO(content))
                    tar.getmembers().clear()  # it would remember every file
            out.put(f"{split}-{number:06}.tar", path)


def _members(row: Row) -> Iterator[tuple[str, bytes]]:
    yield "png", row.image
    yield "cls", str(row.number).encode()
    described = {"label": row.label, "split": row.split, "digest": row.digest}
    yield (
        "json",
        json.dumps(described | ({} if row.group is None else {"group": row.group}), ensure_ascii=False).encode(),
    )
    if row.embedding is not None:
        buffer = BytesIO()
        np.save(buffer, row.embedding, allow_pickle=False)
        yield "npy", buffer.getvalue()


def _write_folders(out: Store, rows: Iterator[Row]) -> None:
    def write(row: Row) -> str:
        return out.put(f"{row.split}/{row.label}/{row.stem}.png", row.image)

    for _ in concurrently(write, rows):
        pass


def _files(dataset: Dataset, rows: Iterator[Row]) -> Iterator[tuple[Split, int, Iterator[Row]]]:
    images = _file_images(dataset)
    for (split, number), of_file in groupby(rows, lambda row: (row.split, row.position // images)):
        yield split, number, of_file


def _file_images(dataset: Dataset) -> int:
    return max(1, min(FILE_IMAGES, FILE_BYTES // int(np.prod(dataset.shape))))


def _block_images(dataset: Dataset) -> int:
    return max(1, min(_BLOCK_IMAGES, _BLOCK_BYTES // int(np.prod(dataset.shape))))


@contextmanager
def _scratch_file() -> Generator[Path]:
    with (
        disk_errors(tempfile.gettempdir()),
        tempfile.TemporaryDirectory(prefix="evernear-") as scratch,
    ):
        yield Path(scratch, "file")


def _group_names(dataset: Dataset) -> dict[int, str]:
    """The names of the groups, by the numbers in the shards."""
    with opened_books(dataset.store, dataset.manifest, ("images",)) as books:
        names = books.stream('SELECT DISTINCT "group" FROM images WHERE "group" IS NOT NULL')
        return {group_number(name): name for (name,) in names}


def _rows(dataset: Dataset, embed: Embed, groups: Mapping[int, str] | None) -> Iterator[Row]:
    for split in SPLITS:
        shards = ((dataset.shard_blocks(each, _block_images(dataset)), each.count) for each in dataset.shards(split))
        positions = count()
        for block, embeddings in embed(shards):
            digests = [digest.tobytes() for digest in block.digests]
            names = repeat(None) if groups is None else [groups.get(number, "") for number in block.groups.tolist()]
            vectors = repeat(None) if embeddings is None else embeddings
            for pixels, number, digest, group, vector in zip(
                block.images, block.labels.tolist(), digests, names, vectors, strict=False
            ):
                image, label = _png(pixels, digest), dataset.labels[number]
                yield Row(split, next(positions), image, label, number, digest.hex(), group, vector)


def _reported(rows: Iterator[Row], report: Callable[[int], None]) -> Iterator[Row]:
    for done, row in enumerate(rows):
        report(done)
        yield row


def _png(pixels: Pixels, digest: bytes) -> bytes:
    """Encode an image (H, W, C). It is gray if the original was, so that the digest stays."""
    height_px, width_px, channels = pixels.shape
    gray = pixels[..., 0]
    if channels > 1 and not (
        (pixels == gray[..., None]).all() and pixels_digest("L", width_px, height_px, gray.tobytes()) == digest
    ):
        gray = pixels
    buffer = BytesIO()
    Image.fromarray(gray).save(buffer, "PNG")
    return buffer.getvalue()
