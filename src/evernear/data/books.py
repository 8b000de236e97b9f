"""Query the published tables of a snapshot (`evernear.data.tables`)."""

import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.parquet import require_table_format
from evernear.common.store import FileStore, Store
from evernear.data.database import Database
from evernear.data.manifest import REPAIR, Manifest, Partition, fetch_object
from evernear.data.tables import SCHEMAS, TABLES, Table, table_key
from evernear.errors import IntegrityError


@contextmanager
def opened_books(
    store: Store, manifest: Manifest, tables: Sequence[Table] = TABLES, cache: Path | None = None
) -> Generator[Database]:
    """A database in which the snapshot's ``tables`` are views with these names. Partitions from a
    bucket are copied to ``cache``, where those of earlier calls are used again."""
    with tempfile.TemporaryDirectory(prefix="evernear-tables-") as scratch:
        files = local_tables(store, manifest, tables, cache or Path(scratch))
        folders = {path.parent for paths in files.values() for path in paths}
        with closing(Database(Path(scratch), sorted(folders))) as books:
            for table, paths in files.items():
                books.attach(table, paths, SCHEMAS[table])
            yield books


def local_tables(store: Store, manifest: Manifest, tables: Sequence[Table], folder: Path) -> Mapping[Table, list[Path]]:
    """The verified partitions of each table: in place if the store is a directory, and otherwise
    copied to ``folder``."""
    return {
        table: [_local(store, manifest.name, table, partition, folder) for partition in manifest.tables.get(table, ())]
        for table in tables
    }


def _local(store: Store, dataset: str, table: Table, partition: Partition, folder: Path) -> Path:
    key = table_key(dataset, table, partition.sha256)
    path = folder / f"{partition.sha256}.parquet"
    if isinstance(store, FileStore):
        path = store.path(key)
        with disk_errors(path):
            if not path.is_file():
                raise IntegrityError(f"{key} does not exist in {store.uri}; {REPAIR}.")
            if sha256_file(path) != partition.sha256:
                raise IntegrityError(f"{key} in {store.uri} does not have its sha256; {REPAIR}.")
    elif not path.exists():
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        fetch_object(store, key, path, partition.sha256)
    require_table_format(path, f"{store.uri}/{key}")
    return path


_NAMES = """
SELECT digest, name FROM files WHERE source = $source AND digest IN (SELECT unnest($digests::BLOB[])) AND NOT waiting
ORDER BY digest, name
"""


def file_names(books: Database, source: str, digests: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
    """The names of the files of each image in ``source``."""
    names: dict[bytes, tuple[str, ...]] = {}
    for digest, name in books.rows(_NAMES, source=source_uri(source), digests=list(digests)):
        names[digest] = (*names.get(digest, ()), name)
    return names


def source_uri(source: str) -> str:
    """``s3://bucket/prefix/`` and ``s3://bucket/prefix`` are the same source."""
    return source.rstrip("/")
