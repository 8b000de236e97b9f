"""Helpers for SQLite queries."""

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from evernear.errors import StoreError

_T = TypeVar("_T")


def batched(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yield lists with up to ``size`` items each, like `itertools.batched` in Python
    3.12.
    """
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def marks(values: Sequence[object]) -> str:
    """Placeholders for ``values`` in an SQL query."""
    return ",".join("?" * len(values))


@contextmanager
def sqlite_errors() -> Generator[None]:
    """Convert SQLite errors that concern the ledger of a dataset.

    Raises:
        StoreError: the disk is full, or the ledger file is damaged.
    """
    try:
        yield
    except sqlite3.Error as error:
        if "full" in str(error):
            raise StoreError("The disk that holds the temporary directory is full (TMPDIR).") from error
        raise StoreError(f"The dataset's ledger cannot be read or written: {error}.") from error
