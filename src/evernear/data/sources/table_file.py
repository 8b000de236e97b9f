"""Read the rows of a CSV or Parquet table with names and labels, one block at a time."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evernear.common.text import column_positions, csv_rows

REQUIRED = ("path", "label")
OPTIONAL = ("split", "group")
CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet", ".pq")


class Row(NamedTuple):
    """A row of a table: its position in the file, for messages, and the text of each cell. Absent
    cells are empty."""

    where: str
    path: str
    label: str
    split: str
    group: str


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a CSV or Parquet file, whose name in messages is ``name``. Memory use does
    not grow with the size of the table."""
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
    from evernear.data.sources.arrow_file import open_arrow_file  # needs pyarrow

    with open_arrow_file(file, name) as table:
        at = column_positions(table.schema.names, name, REQUIRED, OPTIONAL)
        columns = [table.schema.names[position] for position in at.values()]
        for number, texts in enumerate(table.texts(columns, first_row=1), 1):
            cells = dict(zip(at, texts, strict=True))
            yield Row(f"row {number:,}", *(cells.get(column, "") for column in (*REQUIRED, *OPTIONAL)))


def is_table(location: str) -> bool:
    return os.path.splitext(location)[1].lower() in CSV_SUFFIXES + PARQUET_SUFFIXES  # noqa: PTH122 - may be a URI
