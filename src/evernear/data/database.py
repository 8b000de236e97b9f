"""The one place that opens DuckDB. A database is a scratch file, and its memory is limited. It
reads only the files that it is given, and neither loads extensions nor uses the network.

A statement must not depend on the order in which threads finish: rows are only in the order of an
`ORDER BY`, and a result that is read after other statements began has its own cursor.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow.parquet as pq

from evernear.common.disk import disk_errors
from evernear.common.processes import available_cpus, memory_limit_bytes
from evernear.errors import ConflictError, StoreError

MEMORY_BYTES = 512 * 2**20
"""Memory for tables without a container. In a container, they get an eighth of its limit. Larger
operations use the disk, but a sort needs more memory for more rows: with two threads, 128 MiB are
too little for 10,000,000 names, and 256 MiB suffice for 30,000,000."""
THREAD_BYTES = 128 * 2**20
"""Memory that each thread needs (https://duckdb.org/docs/current/guides/performance/environment)."""
_BATCH_ROWS = 50_000
_T = TypeVar("_T")
ArrowTable = Any
ArrowBatch = Any
ArrowSchema = Any
"""pyarrow has no types."""


def batched(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yield lists with up to ``size`` items each, like `itertools.batched` in Python 3.12."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class Database:
    """Methods raise `StoreError` if the disk is full, and `ConflictError` if a file was deleted."""

    def __init__(self, scratch: Path, readable: Sequence[Path] = ()) -> None:
        """``scratch`` is a directory for the database, which nobody else uses. Of other
        directories, only those in ``readable`` can be read."""
        self._scratch = scratch
        limit_bytes = memory_limit_bytes()
        memory_bytes = MEMORY_BYTES if math.isinf(limit_bytes) else int(limit_bytes) // 8
        with _database_errors():
            self._db = duckdb.connect(
                ":memory:",
                config={
                    "memory_limit": f"{memory_bytes}B",
                    "threads": max(1, min(available_cpus(), memory_bytes // THREAD_BYTES)),
                    "temp_directory": str(scratch / "spill"),
                    "preserve_insertion_order": False,
                    "autoinstall_known_extensions": False,
                    "autoload_known_extensions": False,
                    "allow_community_extensions": False,
                },
            )
            folders = ", ".join(_literal(str(path.resolve())) for path in (scratch, *readable))
            self._db.execute(f"SET allowed_directories = [{folders}]")
            self._db.execute("SET enable_external_access = false")
            _hide_progress(self._db)

    def close(self) -> None:
        self._db.close()

    def run(self, statements: str, **values: object) -> None:
        """Run statements that are separated by semicolons. ``$name`` is one of ``values``."""
        with _database_errors():
            for statement in self._db.extract_statements(statements):
                named = {name: values[name] for name in statement.named_parameters}
                self._db.execute(statement, named)

    def rows(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        with _database_errors():
            return self._db.sql(query, params=values).fetchall()

    def row(self, query: str, **values: object) -> tuple[Any, ...]:
        """The only row of a result. Faster than `rows`, and without its order."""
        with _database_errors():
            (row,) = self._db.execute(query, values).fetchall()
        return row

    def value(self, query: str, **values: object) -> Any:
        return self.row(query, **values)[0]

    def first(self, query: str, limit: int, **values: object) -> tuple[int, list[tuple[Any, ...]]]:
        """The number of rows, and the first ones in the order of their columns."""
        with _database_errors():
            found = self._db.sql(query, params=values)
            count = found.count("*").fetchall()[0][0]
            columns = ", ".join(f'"{name}"' for name in found.columns)
            return count, found.order(columns).limit(limit).fetchall() if count else []

    def batches(self, query: str, batch_rows: int = _BATCH_ROWS, /, **values: object) -> Iterator[ArrowBatch]:
        """Yield the result in order, while other statements run."""
        with _database_errors():
            cursor = self._db.cursor()
            _hide_progress(cursor)
            reader = cursor.sql(query, params=values).to_arrow_reader(batch_rows)
        while True:
            with _database_errors():
                batch = next(reader, None)
            if batch is None:
                return
            yield batch

    def stream(self, query: str, **values: object) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of `batches`."""
        for batch in self.batches(query, _BATCH_ROWS, **values):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def create(self, table: str, schema: ArrowSchema) -> None:
        """Make an empty table with columns of the `_TYPES`."""
        columns = ", ".join(f'"{field.name}" {_TYPES[str(field.type)]}' for field in schema)
        with _database_errors():
            self._db.execute(f"CREATE OR REPLACE TABLE {table} ({columns})")

    def insert(self, table: str, rows: ArrowTable) -> None:
        with _database_errors():
            self._db.from_arrow(rows).insert_into(table)

    @contextmanager
    def written(self, view: str, schema: ArrowSchema) -> Generator[Callable[[ArrowTable], None]]:
        """Name rows as ``view``, which are written to a scratch file as they come. This takes a
        tenth of the time of `insert`, and no memory."""
        path = self._scratch / f"{view}.parquet"
        repeated = [name for name in schema.names if name not in _UNIQUE]
        options: dict[str, Any] = {"compression": "lz4", "use_dictionary": repeated}
        with disk_errors(path), pq.ParquetWriter(path, schema, **options) as file:
            yield file.write_table
        self.attach(view, [path], schema)

    def attach(self, view: str, files: Sequence[Path], schema: ArrowSchema) -> None:
        """Name the rows in Parquet files."""
        with _database_errors():
            if files:
                paths = ", ".join(_literal(str(path.resolve())) for path in files)
                self._db.execute(f"CREATE OR REPLACE VIEW {view} AS FROM read_parquet([{paths}])")
                return
            self.create(f"no_{view}", schema)
            self._db.execute(f"CREATE OR REPLACE VIEW {view} AS FROM no_{view}")


_TYPES = {
    "string": "VARCHAR",
    "binary": "BLOB",
    "bool": "BOOLEAN",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "timestamp[us]": "TIMESTAMP",
}
_UNIQUE = ("name", "etag", "digest", "number", "position", "row")
"""Columns in which a dictionary of the values would not save space."""


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _hide_progress(connection: duckdb.DuckDBPyConnection) -> None:
    """DuckDB prints a bar to the standard output of an interactive Python and of ``python -c``.
    Without ipywidgets, it prints none in a notebook, and rejects the statement."""
    with suppress(duckdb.InvalidInputException):
        connection.execute("SET enable_progress_bar = false")


@contextmanager
def _database_errors() -> Generator[None]:
    try:
        yield
    except (duckdb.Error, OSError) as error:  # `batches` raises pyarrow's
        text = str(error)
        if "No files found" in text:
            raise ConflictError("`evernear forget` or a prune finished in the meantime; run again.") from error
        if "No space left" in text or "max_temp_directory_size" in text:
            raise StoreError("The disk that holds the temporary directory is full (TMPDIR).") from error
        if "Out of Memory" in text:
            raise StoreError(
                f"There is too little memory for the tables of the dataset: {MEMORY_BYTES // 2**20} MiB, or in a "
                "container an eighth of its limit. Use a container with a higher memory limit (in Kubeflow Pipelines, "
                "raise pipeline.task_memory)."
            ) from error
        raise StoreError(f"The tables of the dataset cannot be read or written: {text.splitlines()[0]}") from error
