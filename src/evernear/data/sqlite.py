"""Helpers for SQLite queries."""

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeVar

from evernear.errors import StoreError

_T = TypeVar("_T")
_ROWS = 100
"""Number of rows in one statement of `insert_rows`. SQLite limits the number of parameters."""


def batched(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yield lists with up to ``size`` items each, like `itertools.batched` in Python 3.12."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def insert_rows(db: sqlite3.Connection, table: str, row: str, rows: Iterable[Sequence[object]]) -> None:
    """Insert ``rows`` into ``table``.

    ``row`` is the SQL for one row, such as ``(?, ?, NULL)``, with at most 9 parameters.

    `executemany` takes three times as long, because it executes one statement for each row. Binding
    ``bytes`` or None takes longer than binding a ``bytearray``, a string or an integer.
    """
    for page in batched(rows, _ROWS):
        if len(page) == _ROWS:
            values = ",".join([row] * _ROWS)
            db.execute(f"INSERT INTO {table} VALUES {values}", tuple(chain.from_iterable(page)))  # noqa: S608 - our own words
        else:
            db.executemany(f"INSERT INTO {table} VALUES {row}", page)  # noqa: S608 - our own words


@contextmanager
def sqlite_errors() -> Generator[None]:
    """Convert SQLite errors that concern the ledger of a dataset."""
    try:
        yield
    except sqlite3.Error as error:
        if "full" in str(error):
            raise StoreError("The disk that holds the temporary directory is full (TMPDIR).") from error
        raise StoreError(f"The dataset's ledger cannot be read or written: {error}.") from error
