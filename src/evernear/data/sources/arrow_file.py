"""Read the rows of a Parquet or Arrow file, one batch at a time."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from evernear.common.disk import disk_errors, require_no_pointer
from evernear.data.sources.base import field_text
from evernear.errors import DataError

_TEXT_ROWS = 4096


class ArrowFile(NamedTuple):
    name: str
    schema: Any
    batches: Callable[[list[str], int], Iterator[Any]]

    def texts(self, columns: Sequence[str], first_row: int = 0) -> Iterator[list[str]]:
        """Yield the text of each row's cells. ``first_row`` is its number in messages."""
        names = class_names(self.schema)
        kinds = [str(self.schema.field(column).type) for column in columns]
        row = first_row
        for batch in self.batches(list(dict.fromkeys(columns)), _TEXT_ROWS):
            cells = [self._values(batch, column) for column in columns]
            for values in zip(*cells, strict=True):
                texts: list[str] = []
                for column, kind, value in zip(columns, kinds, values, strict=True):
                    place = f"row {row:,} of {self.name}"
                    text = field_text(value, f"The column {column} in {place}", kind)
                    texts.append(_class_of(text, column, place, names[column]) if column in names else text)
                row += 1
                yield texts

    def _values(self, batch: Any, column: str) -> list[object]:
        try:
            return batch.column(column).to_pylist()
        except (ValueError, OverflowError) as error:
            kind = self.schema.field(column).type
            raise DataError(
                f"The column {column} of {self.name}, whose type is {kind}, contains a value that cannot be read"
                f" ({error}); write text in UTF-8 or whole numbers."
            ) from None


def class_names(schema: Any) -> Mapping[str, Sequence[str]]:
    """The names of class numbers by column, as `datasets` writes them, if the form is known."""
    try:
        metadata: Any = json.loads((schema.metadata or {}).get(b"huggingface", b"null"))
    except (ValueError, RecursionError):
        return {}
    match metadata:
        case {"info": {"features": {**features}}}:
            names = {column: _names(feature) for column, feature in features.items()}
            return {column: found for column, found in names.items() if found and _is_numbers(schema, column)}
        case _:
            return {}


def _names(feature: Any) -> Sequence[str]:
    match feature:
        case {"_type": "ClassLabel", "names": [*names]} if all(isinstance(name, str) for name in names):
            return names
        case {"feature": inner} | [inner]:  # a list, in the newer and in the older form
            return _names(inner)
        case _:
            return ()


def _is_numbers(schema: Any, column: str) -> bool:
    if column not in schema.names:
        return False
    kind = schema.field(column).type
    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind = kind.field(0).type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _class_of(number: str, column: str, place: str, names: Sequence[str]) -> str:
    """The name of a class number. The number -1 means that the label is missing."""
    if number in ("", "-1"):
        return ""
    if not 0 <= int(number) < len(names):
        raise DataError(f"The {column} {number} in {place} has no name: it has {len(names)} classes.")
    return names[int(number)]


@contextmanager
def open_arrow_file(path: Path, name: str) -> Generator[ArrowFile]:
    require_no_pointer(path, name)
    with disk_errors(path):
        with path.open("rb") as start:
            is_arrow = start.read(4) != b"PAR1" and not name.endswith((".parquet", ".pq"))
        try:
            with _arrow(path, name) if is_arrow else _parquet(path, name) as table:
                yield table
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise DataError(f"{name} is not a valid Parquet or Arrow file ({reason}); write it again.") from None


@contextmanager
def _parquet(path: Path, name: str) -> Generator[ArrowFile]:
    with pq.ParquetFile(path) as table:
        yield ArrowFile(name, table.schema_arrow, lambda columns, rows: table.iter_batches(rows, columns=columns))


@contextmanager
def _arrow(path: Path, name: str) -> Generator[ArrowFile]:
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

        yield ArrowFile(name, reader.schema, slices)
