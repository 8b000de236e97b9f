"""Hugging Face datasets, stored as Parquet files or as Arrow files from
``save_to_disk``. One column contains the images.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from evernear.common.disk import disk_errors
from evernear.data.sources.base import FileEntry
from evernear.data.sources.packed import Member, PackedFiles
from evernear.data.sources.table_file import cell_text
from evernear.errors import DataError

_BATCH_ROWS = 32
_LABEL_ROWS = 4096


class _Columns(NamedTuple):
    image: str
    label: str
    names: Sequence[str] | None
    """The names of the classes, if the labels are class numbers."""
    group: str | None


class HuggingFace(PackedFiles):
    """A source of rows that contain an image, a label and, in the column ``group``,
    optionally a group. The name or the folder of a file indicates the split of its
    rows.
    """

    suffixes = (".parquet", ".arrow")
    kind = "Parquet or Arrow files"

    def _members(self, path: Path, file: str) -> Iterator[Member]:
        row = 0
        with _opened(path, file) as table:
            columns = _columns(table.schema, file)
            names = [columns.label, *([columns.group] if columns.group else ())]
            for batch in table.batches(names, _LABEL_ROWS):
                groups = batch.column(columns.group).to_pylist() if columns.group else repeat(None)
                for value, group in zip(batch.column(columns.label).to_pylist(), groups, strict=False):
                    yield Member(f"{row:09}", _label(value, columns, file, row), group=cell_text(group))
                    row += 1

    def _images(self, path: Path, file: str, wanted: Mapping[str, FileEntry]) -> Iterator[tuple[str, bytes]]:
        row = 0
        with _opened(path, file) as table:
            columns = _columns(table.schema, file)
            for batch in table.batches([columns.image], _BATCH_ROWS):
                images = batch.column(0)
                for position in range(batch.num_rows):
                    name = f"{row:09}"
                    row += 1
                    if name in wanted:
                        yield name, _content(images[position].as_py(), file, name)


class _TableFile(NamedTuple):
    """A Parquet or Arrow file."""

    schema: Any
    batches: Callable[[list[str], int], Iterator[Any]]
    """Yields batches of the given columns. A batch has at most the given number of
    rows.
    """


@contextmanager
def _opened(path: Path, file: str) -> Generator[_TableFile]:
    with disk_errors(path):
        with path.open("rb") as start:
            is_parquet = start.read(4) == b"PAR1"
        try:
            with _parquet(path) if is_parquet else _arrow(path) as table:
                yield table
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise DataError(f"{file} is not a valid Parquet or Arrow file ({reason}); write it again.") from None


@contextmanager
def _parquet(path: Path) -> Generator[_TableFile]:
    with pq.ParquetFile(path) as table:
        yield _TableFile(table.schema_arrow, lambda columns, rows: table.iter_batches(rows, columns=columns))


@contextmanager
def _arrow(path: Path) -> Generator[_TableFile]:
    with pa.memory_map(str(path)) as file:
        try:
            batches = reader = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            file.seek(0)
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))

        def slices(columns: list[str], rows: int) -> Iterator[Any]:
            for batch in batches:
                for start in range(0, batch.num_rows, rows):
                    yield batch.select(columns).slice(start, rows)

        yield _TableFile(reader.schema, slices)


def _columns(schema: Any, file: str) -> _Columns:
    """Find the image column and the label column by the features that `datasets` writes
    or, if these features are missing, by name and type.
    """
    metadata: Any = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = metadata.get("info", {}).get("features", {})
    images = [field.name for field in schema if _is_image(field.type)]
    classes = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    image = "image" if "image" in images else images[0] if len(images) == 1 else None
    label = "label" if "label" in schema.names else classes[0] if len(classes) == 1 else None
    if image is None or label is None:
        what = "image, with the bytes of an image" if image is None else "label"
        raise DataError(
            f"{file} has no column {what}, or several; its columns: {', '.join(schema.names)}. Rename the right one to"
            f" {'image' if image is None else 'label'} (`rename_column` of datasets)."
        )
    group = "group" if label != "group" and _is_group(schema) else None
    return _Columns(image, label, features[label]["names"] if label in classes else None, group)


def _is_group(schema: Any) -> bool:
    """Whether a file has a column ``group`` of text or whole numbers. A column of
    another type has another meaning.
    """
    if "group" not in schema.names:
        return False
    kind = schema.field("group").type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return is_text or pa.types.is_integer(kind)


def _is_image(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_image(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _label(value: object, columns: _Columns, file: str, row: int) -> str:
    """The class of a row. The class number -1 means that the label is missing."""
    if columns.names is None or not isinstance(value, int):
        return cell_text(value)
    if not -1 <= value < len(columns.names):
        raise DataError(f"The label {value} in row {row:,} of {file} has no name: it has {len(columns.names)} classes.")
    return "" if value == -1 else columns.names[value]


def _content(value: Any, file: str, name: str) -> bytes:
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path"):
            raise DataError(
                f"Row {name} of {file} names the file {value['path']} instead of containing it; write the dataset with"
                " `save_to_disk` or `push_to_hub`, which embed images."
            )
        value = value.get("bytes")
    return value or b""
