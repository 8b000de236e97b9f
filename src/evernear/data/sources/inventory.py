"""A bucket whose object listing comes from an S3 Inventory report instead of list
requests.

Every day or every week, S3 writes a report as CSV or Parquet files. The manifest
``<prefix>/<source bucket>/<configuration>/<time>/manifest.json`` contains the names of
the report's files. See "Locating your inventory list" in the Amazon S3 user guide.
"""

import csv
import gzip
import hashlib
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_plus

from pydantic import BaseModel, Field, ValidationError

from evernear.common.disk import disk_errors
from evernear.common.store import ObjectInfo, open_store
from evernear.data.sources.folder import DEFAULTS, Bucket, dataset_name
from evernear.data.sqlite import batched, sqlite_errors
from evernear.errors import DataError, MissingObjectError, SettingsError
from evernear.settings.data import DataSettings

_REPORT = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\dZ/")
"""Matches the folder of a report. The name of the folder is the time at which S3 began
to list the bucket.
"""
_MANIFEST = "manifest.json"
_COLUMNS = {
    "CSV": ("Key", "Size", "ETag", "IsLatest", "IsDeleteMarker"),
    "Parquet": ("key", "size", "e_tag", "is_latest", "is_delete_marker"),
}
_REQUIRED = 3
"""Number of required columns. The other columns are present only in reports that
include all versions.
"""
_PAGE = 4096


class _File(BaseModel):
    key: str
    md5: str = Field(alias="MD5checksum")


class _Manifest(BaseModel):
    bucket: str = Field(alias="sourceBucket", pattern=r"^[a-z0-9][a-z0-9.-]*$")
    format: str = Field(alias="fileFormat")
    columns: str = Field(alias="fileSchema")
    files: list[_File]


class _Row(NamedTuple):
    key: str
    etag: str
    size_bytes: int


class Inventory(Bucket):
    """The image files in a bucket, as listed in the newest report in an S3 Inventory
    folder.
    """

    def __init__(self, location: str, settings: DataSettings = DEFAULTS) -> None:
        """Open the newest report.

        Args:
            location: ``s3://bucket/<prefix>/<source bucket>/<configuration>``, the
                folder of the reports. If ``#prefix`` is appended, only the objects
                under that prefix are images.
            settings: The meaning of the bucket's folders.

        Raises:
            SettingsError: ``location`` is not in a bucket.
            DataError: the folder has no report, or the report's manifest cannot be
                used.
        """
        uri, _, prefix = location.partition("#")
        if not uri.startswith("s3://"):
            raise SettingsError(f"inventory:{location} is not in a bucket; write inventory:s3://bucket/prefix.")
        self._uri, self._prefix = uri.rstrip("/"), f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._report, self._manifest = _newest_report(self._uri)
        super().__init__(f"s3://{self._manifest.bucket}/{self._prefix}".rstrip("/"), settings)
        self.name = inventory_name(location)

    def read(self, name: str) -> bytes:
        """The content of an object.

        Raises:
            DataError: the object was deleted after S3 wrote the report.
        """
        try:
            return super().read(name)
        except MissingObjectError:
            raise DataError(f"{name} was deleted after the inventory of {self._report} was written.") from None

    def _objects(self) -> Iterator[ObjectInfo]:
        """Yield the rows of the report, sorted by key. The rows are sorted in a
        temporary file, because S3 does not sort them.
        """
        with closing(sqlite3.connect("")) as db, sqlite_errors():
            db.execute("CREATE TABLE objects (key TEXT PRIMARY KEY, etag TEXT, size_bytes INTEGER) WITHOUT ROWID")
            for page in batched(self._rows(), _PAGE):
                db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", page)
            for key, etag, size_bytes in db.execute("SELECT key, etag, size_bytes FROM objects ORDER BY key"):
                yield ObjectInfo(key, size_bytes, _EPOCH, lambda etag=etag: etag)

    def _rows(self) -> Iterator[_Row]:
        """The rows for objects under the prefix. The prefix is removed from the
        keys.
        """
        bucket = open_store("s3://" + self._uri.removeprefix("s3://").partition("/")[0])
        read = _csv_rows if self._manifest.format == "CSV" else _parquet_rows
        columns = _COLUMNS[self._manifest.format]
        for file in self._manifest.files:
            with tempfile.TemporaryDirectory(prefix="evernear-inventory-") as scratch:
                path = bucket.fetch(file.key, Path(scratch) / "part")
                _require_md5(path, file, f"s3://{bucket.uri.removeprefix('s3://')}/{file.key}")
                for key, size, etag, is_latest, is_deleted in read(path, file.key, self._manifest, columns):
                    if is_latest != "false" and is_deleted != "true" and key.startswith(self._prefix):
                        yield _Row(key.removeprefix(self._prefix), etag, _size_bytes(size, file.key))


_EPOCH = datetime.fromtimestamp(0, UTC)


def inventory_name(location: str) -> str:
    """The dataset name for the reports at ``location``."""
    return dataset_name(location.removeprefix("s3://"))


def _newest_report(uri: str) -> tuple[str, _Manifest]:
    """The time and the manifest of the newest report that is complete. S3 writes the
    manifest last.
    """
    store = open_store(uri)
    for folder in sorted(filter(_REPORT.fullmatch, store.children("")), reverse=True):
        stored = store.find(folder + _MANIFEST)
        if stored:
            where = f"{uri}/{folder}{_MANIFEST}"
            return folder.removesuffix("/"), _parse_manifest(stored[0], where)
    raise DataError(
        f"{uri} contains no report of S3 Inventory; name the folder that contains folders such as 2026-11-01T01-00Z"
        f" with a {_MANIFEST}: s3://<destination>/<prefix>/<source bucket>/<configuration>."
    )


def _parse_manifest(data: bytes, where: str) -> _Manifest:
    try:
        manifest = _Manifest.model_validate_json(data)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"])) or "JSON"
        raise DataError(f"{where} is not a manifest of S3 Inventory: {field} is invalid or missing.") from None
    if manifest.format not in _COLUMNS:
        raise DataError(
            f"The reports at {where} are {manifest.format} files; set the format of the inventory to Parquet or CSV."
        )
    names = set(re.findall(r"\w+", manifest.columns))
    if missing := [column for column in _COLUMNS[manifest.format][:_REQUIRED] if column not in names]:
        raise DataError(
            f"The reports at {where} lack {' and '.join(missing)}; add Size and ETag to the optional fields of the"
            " inventory."
        )
    return manifest


def _csv_rows(path: Path, name: str, manifest: _Manifest, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of ``columns`` in a gzipped CSV file, which has no header and has
    URL-encoded keys.
    """
    names = [column.strip() for column in manifest.columns.split(",")]
    places = [names.index(column) if column in names else None for column in columns]
    with disk_errors(path):
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="") as text:
                for cells in csv.reader(text, strict=True):
                    key, *others = ("" if place is None else cells[place] for place in places)
                    yield [unquote_plus(key, errors="strict"), *others]
        except (EOFError, gzip.BadGzipFile, zlib.error, csv.Error, IndexError, UnicodeError) as error:
            raise _broken(name, "CSV", error) from None


def _parquet_rows(path: Path, name: str, manifest: _Manifest, columns: Sequence[str]) -> Iterator[list[str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with disk_errors(path):
        try:
            with pq.ParquetFile(path) as table:
                present = [column for column in columns if column in table.schema_arrow.names]
                for batch in table.iter_batches(_PAGE, columns=present):
                    cells = {column: batch.column(column).to_pylist() for column in present}
                    empty = [None] * batch.num_rows
                    for values in zip(*(cells.get(column, empty) for column in columns), strict=True):
                        yield [_text(value) for value in values]
        except (pa.ArrowException, UnicodeError) as error:
            raise _broken(name, "Parquet", error) from None


def _size_bytes(cell: str, name: str) -> int:
    try:
        return int(cell)
    except ValueError as error:
        raise _broken(name, "inventory", error) from None


def _broken(name: str, kind: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0].rstrip(".")
    return DataError(f"The inventory file {name} is not valid {kind} ({reason}); wait for the next report.")


def _text(value: object) -> str:
    """The text of a cell, in the same form as in CSV."""
    if isinstance(value, bytes):
        return value.decode()
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _require_md5(path: Path, file: _File, where: str) -> None:
    with disk_errors(path), path.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))
    if digest.hexdigest() != file.md5:
        raise DataError(f"{where} differs from its checksum in the manifest; wait for the next report.")
