"""Read the rows of a CSV or Parquet table with names and labels, one block at a
time.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from evernear.common.csv_rows import column_positions, csv_rows
from evernear.common.disk import disk_errors
from evernear.errors import DataError

REQUIRED = ("path", "label")
OPTIONAL = ("split", "group")
CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet", ".pq")
_BATCH_ROWS = 4096


class Row(NamedTuple):
    """A row of a table: its position in the file, for messages, and the text of each
    cell. Absent cells are empty.
    """

    where: str
    path: str
    label: str
    split: str
    group: str


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a CSV or Parquet file, whose name in messages is ``name``.
    Memory use does not grow with the size of the table.

    Raises:
        DataError: the file is neither CSV nor Parquet, it is broken, or it lacks a
            column.
    """
    if name.lower().endswith(PARQUET_SUFFIXES):
        yield from _parquet_rows(file, name)
    else:
        yield from _csv_rows(file, name)


def _csv_rows(file: Path, name: str) -> Iterator[Row]:
    rows = csv_rows(file, name)
    at = column_positions(next(rows)[1], name, REQUIRED, OPTIONAL)
    for line, cells in rows:
        values = (cells[at[column]] if column in at else "" for column in (*REQUIRED, *OPTIONAL))
        yield Row(f"line {line:,}", *values)


def _parquet_rows(file: Path, name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with disk_errors(file):
        try:
            with pq.ParquetFile(file) as table:
                columns = table.schema_arrow.names
                at = column_positions(columns, name, REQUIRED, OPTIONAL)
                for column, position in at.items():
                    _require_text(table.schema_arrow.field(position).type, column, name, pa)
                number = 0
                for batch in table.iter_batches(_BATCH_ROWS, columns=[columns[position] for position in at.values()]):
                    cells = {column: batch.column(columns[place]).to_pylist() for column, place in at.items()}
                    empty = [""] * batch.num_rows
                    for values in zip(*(cells.get(column, empty) for column in (*REQUIRED, *OPTIONAL)), strict=True):
                        number += 1
                        yield Row(f"row {number:,}", *map(cell_text, values))
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise DataError(f"{name} is not a valid Parquet file ({reason}); write it again.") from None


def _require_text(kind: Any, column: str, name: str, pa: Any) -> None:
    """Accept columns of text. Columns of numbers are also accepted, except for the path
    column. Floating-point numbers are accepted, because pandas converts whole numbers
    to floating-point numbers if a value is missing.
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not (is_text or pa.types.is_null(kind) or (is_number and column != "path")):
        raise DataError(f"The column {column} of {name} contains values of the type {kind}; write text.")


def cell_text(value: object) -> str:
    """The text of a cell. A missing value (null or NaN) becomes an empty string, and
    3.0 becomes 3.
    """
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_table(location: str) -> bool:
    """Whether a file has the suffix of a table, such as .csv."""
    return os.path.splitext(location)[1].lower() in CSV_SUFFIXES + PARQUET_SUFFIXES  # noqa: PTH122 - may be a URI
