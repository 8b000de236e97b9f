"""Writers for the export formats. Each writer writes the images of one part and keeps
only one block of images in memory."""

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evernear.common.disk import disk_errors
from evernear.common.store import Store
from evernear.data.export import Format
from evernear.data.export.plan import ExportPart
from evernear.data.export.samples import Samples
from evernear.data.sources.names import exported_position

Write = Callable[[Store, ExportPart, Iterator[Samples], Path], None]
"""Writes the images of a part to a store. The `Path` argument is an empty scratch
directory."""
_WRITES_IN_FLIGHT = 16


def writer_of(form: Format) -> Write:
    """The writer for a format."""
    return {"parquet": write_parquet, "webdataset": write_tar, "folder": write_files}[form]


def write_parquet(out: Store, part: ExportPart, blocks: Iterator[Samples], scratch: Path) -> None:
    """Write a Parquet file with the columns image (bytes and path), label, split,
    digest and, if present, group and embedding."""
    first, blocks = _peek(blocks)
    texts = ("label", "split", "digest", *(() if first.groups is None else ("group",)))
    schema = _parquet_schema(texts, None if first.embeddings is None else first.embeddings.shape[1])
    path = scratch / "part.parquet"
    with disk_errors(path), pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for samples in blocks:
            writer.write_table(pa.table(_columns(samples), schema))
    out.put(f"{part.name}.parquet", path)


def _parquet_schema(texts: Sequence[str], dim: int | None) -> Any:
    """The schema of a Parquet file with the text columns ``texts``. The schema's
    metadata contains the feature types for Hugging Face's `datasets`."""
    text = {"dtype": "string", "_type": "Value"}
    fields = [
        pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        *(pa.field(name, pa.string()) for name in texts),
    ]
    features: dict[str, object] = {"image": {"_type": "Image"}, **dict.fromkeys(texts, text)}
    if dim is not None:
        fields.append(pa.field("embedding", pa.list_(pa.float32(), dim)))
        features["embedding"] = {"feature": {"dtype": "float32", "_type": "Value"}, "length": dim, "_type": "List"}
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def _columns(samples: Samples) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "image": [
            {"bytes": image, "path": f"{stem}.png"} for stem, image in zip(samples.stems, samples.images, strict=True)
        ],
        "label": samples.labels,
        "split": [samples.split] * len(samples),
        "digest": samples.digests,
    }
    if samples.groups is not None:
        columns["group"] = samples.groups
    if samples.embeddings is not None:
        flat = pa.array(samples.embeddings.ravel(), pa.float32())
        columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, samples.embeddings.shape[1])
    return columns


def write_tar(out: Store, part: ExportPart, blocks: Iterator[Samples], scratch: Path) -> None:
    """Write a tar archive with png, cls (label number), json and, if present, npy
    (embedding) files for each image."""
    path = scratch / "part.tar"
    with disk_errors(path), tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for samples in blocks:
            for row, stem in enumerate(samples.stems):
                for suffix, content in _members(samples, row):
                    member = tarfile.TarInfo(f"{stem}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
            tar.getmembers().clear()  # it would remember every file
    out.put(f"{part.name}.tar", path)


def _members(samples: Samples, row: int) -> Iterator[tuple[str, bytes]]:
    yield "png", samples.images[row]
    yield "cls", str(samples.numbers[row]).encode()
    described = {"label": samples.labels[row], "split": samples.split, "digest": samples.digests[row]}
    if samples.groups is not None:
        described["group"] = samples.groups[row]
    yield "json", json.dumps(described, ensure_ascii=False).encode()
    if samples.embeddings is not None:
        buffer = BytesIO()
        np.save(buffer, samples.embeddings[row], allow_pickle=False)
        yield "npy", buffer.getvalue()


def write_files(out: Store, part: ExportPart, blocks: Iterator[Samples], scratch: Path) -> None:
    """Write each image as a PNG file to its label's folder, and skip files that a
    killed process has already written."""
    first, blocks = _peek(blocks)
    begun = out.find(_key(first, 0)) is not None
    written = set(_written(out, part)) if begun else {_key(first, 0)}
    if not begun:
        out.put(_key(first, 0), first.images[0])  # written first, as proof that the part was begun
    with ThreadPoolExecutor(_WRITES_IN_FLIGHT, "write") as pool:
        for samples in blocks:
            keys = [_key(samples, row) for row in range(len(samples))]
            missing = [(key, image) for key, image in zip(keys, samples.images, strict=True) if key not in written]
            for _ in pool.map(out.put, *zip(*missing, strict=True)) if missing else ():
                pass


def _key(samples: Samples, row: int) -> str:
    return f"{samples.split}/{samples.labels[row]}/{samples.stems[row]}.png"


def _written(out: Store, part: ExportPart) -> Iterator[str]:
    """Yield the existing files of a part. All files of the split are listed, but only
    the part's files are yielded."""
    for info in out.list(f"{part.split}/"):
        position = exported_position(info.key)
        if position is not None and part.first <= position < part.first + part.units:
            yield info.key


def _peek(blocks: Iterable[Samples]) -> tuple[Samples, Iterator[Samples]]:
    """Return the first block and an iterator over all blocks, including the first
    block."""
    rest = iter(blocks)
    first = next(rest)

    def all_blocks() -> Iterator[Samples]:
        yield first
        yield from rest

    return first, all_blocks()
