"""Read the rows of a CSV or Parquet table with names and labels, one block at a
time.
"""

import csv
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evernear.common.disk import disk_errors
from evernear.errors import DataError

REQUIRED = ("path", "label")
OPTIONAL = ("split", "group")
CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet", ".pq")
_BATCH_ROWS = 4096
_MAX_NAMES = 5


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


def column_positions(columns: Sequence[str], name: str) -> Mapping[str, int]:
    """The position of each known column in the table. Letter case and spaces around
    column names are ignored.

    Raises:
        DataError: a required column is missing, or a known column occurs twice.
    """
    plain = [column.strip().casefold() for column in columns]
    known = [*REQUIRED, *OPTIONAL]
    if missing := [column for column in REQUIRED if column not in plain]:
        shown = ", ".join(repr(column) for column in columns[:_MAX_NAMES])
        more = " and more" if len(columns) > _MAX_NAMES else ""
        raise DataError(
            f"{name} has no column {' and no column '.join(missing)}, but {shown or 'no columns'}{more}; call the"
            " columns path and label (and optionally split and group) in its first row."
        )
    if twice := [column for column in known if plain.count(column) > 1]:
        raise DataError(f"{name} has two columns called {twice[0]}; rename or remove one.")
    return {column: plain.index(column) for column in known if column in plain}


def _csv_rows(file: Path, name: str) -> Iterator[Row]:
    with disk_errors(file):
        with file.open("rb") as start:
            begin = start.read(2)
        encoding = "utf-16" if begin in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
        with file.open(encoding=encoding, newline="") as text:
            lines = 0
            try:
                header = text.readline()
                text.seek(0)
                # Excel uses semicolons to separate columns in locales whose decimal
                # separator is a comma.
                reader = csv.reader(text, delimiter=max(",;\t", key=header.count), strict=True)
                columns = next(reader, [])
                at = column_positions(columns, name)
                lines = reader.line_num
                for cells in reader:
                    lines = reader.line_num
                    if not cells:
                        continue
                    if len(cells) != len(columns):
                        raise DataError(
                            f"Line {lines:,} of {name} has {len(cells)} of {len(columns)} columns; put a value that"
                            ' contains the separator in quotes ("), and leave a missing one empty.'
                        )
                    values = (cells[at[column]] if column in at else "" for column in (*REQUIRED, *OPTIONAL))
                    yield Row(f"line {lines:,}", *values)
            except UnicodeError:
                raise DataError(
                    f"{name} is not UTF-8 after line {lines:,}; save it as CSV UTF-8, or convert it with `iconv`."
                ) from None
            except csv.Error as error:
                raise DataError(f"{name} is not valid CSV after line {lines:,} ({error}); correct it.") from None


def _parquet_rows(file: Path, name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with disk_errors(file):
        try:
            with pq.ParquetFile(file) as table:
                columns = table.schema_arrow.names
                at = column_positions(columns, name)
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
