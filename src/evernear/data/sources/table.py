"""A table of image files and their labels, in CSV or Parquet. The columns are path and label, and
optionally split and group.

The rows are loaded into a scratch database, so that memory use does not grow with the table. It
finds repeated paths, and joins the rows with the listing of a bucket.
"""

import os
import posixpath
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from evernear.common.disk import disk_errors
from evernear.common.output import NAMED, named
from evernear.common.outputs import MarkedFolders, is_output
from evernear.common.store import open_store
from evernear.common.text import class_name, column_positions, csv_rows, lookalike_key, require_one_line, spelled
from evernear.data.database import Database, batched
from evernear.data.sources.base import FileEntry, FileSource, NameSample, file_etag, read_file
from evernear.data.sources.folder import dataset_name
from evernear.data.sources.layout import NamedSplits
from evernear.data.sources.names import has_image_suffix, names_other_kind, skipped_path
from evernear.errors import DataError, SettingsError
from evernear.settings.data import DataSettings

_PAGE = 20_000
_MAX_LISTED = 100_000
"""Number of objects among which a missing one is looked for under a similar name."""
_S3 = "s3://"
_WINDOWS_ABSOLUTE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
"""A drive or a share, as in ``C:/images`` and ``\\\\server\\images``."""
_ROWS = pa.schema([
    ("number", pa.int64()), ("name", pa.string()), ("where", pa.string()), ("bucket", pa.string()),
    ("key", pa.string()),
    ("label", pa.string()), ("split", pa.string()), ("grp", pa.string()),
])  # fmt: skip
_OBJECTS = pa.schema([
    ("bucket", pa.string()), ("key", pa.string()), ("etag", pa.string()), ("size_bytes", pa.int64()),
    ("modified_us", pa.int64()),
])  # fmt: skip
_FIRST = """
CREATE TABLE firsts AS
SELECT name, arg_min((label, split, grp), number) AS first, count(*) AS rows FROM loaded GROUP BY name;
CREATE TABLE rows AS
SELECT l.* EXCLUDE (number, "where") FROM loaded l JOIN (SELECT min(number) AS number FROM loaded GROUP BY name)
  USING (number);
"""
_REPEATED = """
SELECT name, "where", (label, split, grp) = first AS same FROM loaded JOIN firsts USING (name)
WHERE rows > 1 QUALIFY row_number() OVER (PARTITION BY name ORDER BY number) > 1 ORDER BY number
"""
_PRESENT = """
INSERT INTO present
SELECT o.* FROM page o SEMI JOIN (SELECT DISTINCT key FROM rows WHERE bucket = $bucket) USING (key);
DROP TABLE page;
"""
_FOUND = """
SELECT name, label, split, bucket, etag, size_bytes, grp, modified_us FROM rows LEFT JOIN present USING (bucket, key)
WHERE NOT EXISTS (
  SELECT 1 FROM outputs o WHERE o.bucket = rows.bucket AND key > o.folder || '/' AND key < o.folder || '0'
) ORDER BY name
"""


REQUIRED = ("path", "label")
OPTIONAL = ("split", "group")
CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet", ".pq")


class Row(NamedTuple):
    """Its position in the file, for messages, and the text of each cell, perhaps empty."""

    where: str
    path: str
    label: str
    split: str
    group: str


class Table(FileSource):
    """A path is relative to the folder of the table, or has the form ``s3://bucket/key``."""

    def __init__(self, location: str, settings: DataSettings) -> None:
        if not is_table(location):
            raise SettingsError(f"{location} is not a table; name a file that ends with .csv, .tsv or .parquet.")
        self._location, self._settings = location, settings
        self._file_name = posixpath.basename(location)
        self.name = dataset_name(posixpath.splitext(self._file_name)[0])
        self._in_bucket = location.startswith(_S3)
        self._root = posixpath.dirname(location) if self._in_bucket else str(Path(location).parent)
        if not self._in_bucket and not Path(location).is_file():
            raise DataError(f"The table {location} does not exist.")
        self._notes: defaultdict[str, NameSample] = defaultdict(NameSample)
        self.notes = self._notes
        self._reader = cache(_reader)

    def entries(self) -> Iterator[FileEntry]:
        self._notes.clear()
        with (
            tempfile.TemporaryDirectory(prefix="evernear-table-") as scratch,
            closing(Database(Path(scratch))) as db,
        ):
            splits = self._load(db, Path(scratch))
            db.create("present", _OBJECTS)
            db.create("outputs", pa.schema([("bucket", pa.string()), ("folder", pa.string())]))
            for (bucket,) in db.rows("SELECT DISTINCT bucket FROM rows WHERE bucket <> ''"):
                self._find_objects(db, bucket)
            self.chosen_splits = splits.chosen_splits
            yield from self._present(db, splits)

    def _present(self, db: Database, splits: NamedSplits) -> Iterator[FileEntry]:
        missing, folder, outputs, links = NameSample(), "", set[str](), set[str]()
        for name, label, split, bucket, etag, size_bytes, group, modified_us in db.stream(_FOUND):
            if not bucket:
                etag, size_bytes, modified_us = self._stat(name)
                if (parent := posixpath.dirname(name)) != folder:
                    folder = parent
                    links.add(self._link_around(folder))
                if output := self._output_around(folder):
                    outputs.add(output)
                    continue
            if etag is None:
                missing.add(name)
            else:
                yield FileEntry(name, etag, label, splits.explicit(split), size_bytes, group, modified_us)
        for output in outputs:
            self._notes["litter"].add(output)
        for link in links - {""}:
            self._notes["outside_link"].add(link)
        self._require_present(missing)

    def read(self, name: str) -> bytes:
        uri = f"{self._root}/{name}" if self._in_bucket and not name.startswith(_S3) else name
        if uri.startswith(_S3):
            bucket, _, key = uri.removeprefix(_S3).partition("/")
            return self._reader(bucket)(key)
        return read_file(Path(self._root, name))

    def _load(self, db: Database, scratch: Path) -> NamedSplits:
        splits = NamedSplits(self._file_name, self._settings)
        labels: defaultdict[str, set[str]] = defaultdict(set)
        db.create("loaded", _ROWS)
        rows = enumerate(read_rows(self._fetched(scratch), self._file_name))
        for page in batched(self._used(rows, splits, labels), _PAGE):
            db.insert("loaded", pa.table([list(column) for column in zip(*page, strict=True)], _ROWS))
        db.run(_FIRST)
        conflicts = NameSample()
        for name, where, is_same in db.stream(_REPEATED):
            if is_same:
                self._notes["duplicate_row"].add(name)
            else:
                conflicts.add(f"{name} ({where})")
        for spellings in labels.values():
            if len(spellings) > 1:
                self._notes["merged_folders"].add(" and ".join(map(spelled, sorted(spellings))))
        if conflicts.count:
            raise DataError(
                f"{self._file_name} contradicts itself: another row has the same path, but another label, split or"
                f" group for {named(conflicts.names, conflicts.count)}; keep the right row of each."
            )
        splits.finish()
        return splits

    def _used(
        self, rows: Iterator[tuple[int, Row]], splits: NamedSplits, labels: defaultdict[str, set[str]]
    ) -> Iterator[tuple[object, ...]]:
        """Yield the values of `_ROWS`."""
        for number, row in rows:
            name, bucket, key = self._place(row)
            label = class_name(row.label)
            if not self._is_used(name, label):
                continue
            require_one_line(label, f"The label in {row.where} of {self._file_name}")
            labels[label].add(row.label)
            split = splits.add(row.split, row.where)
            if split != "none":
                yield number, name, row.where, bucket, key, label, split, row.group.strip()

    def _fetched(self, scratch: Path) -> Path:
        if not self._in_bucket:
            return Path(self._location)
        return open_store(self._root).fetch(self._file_name, scratch / "table")

    def _place(self, row: Row) -> tuple[str, str, str]:
        """The name of a row's file in the source and, for an object, the bucket and the key."""
        text, refused = row.path, f"The path {row.path!r} in {row.where} of {self._file_name}"
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{refused} is not UTF-8; rename the file.") from None
        if text.startswith(_S3):
            bucket, _, key = text.removeprefix(_S3).partition("/")
            if not (bucket and key):
                raise DataError(f"{refused} names no object; write s3://bucket/key.")
            return text, bucket, key
        if not text.strip() or "\0" in text:
            raise DataError(f"{refused} is {'empty' if not text.strip() else 'not a path'}; correct or remove the row.")
        if "://" in text or text.startswith(("/", "~")) or _WINDOWS_ABSOLUTE.match(text):
            raise DataError(
                f"{refused} is neither relative to the table's folder {self._root} nor an object s3://bucket/key; write"
                " it relative to the folder, or move the table to a folder that contains the images."
            )
        if ".." in text.split("/"):
            raise DataError(
                f"{refused} leads out of the table's folder with '..'; move the table to a folder that contains the"
                " images."
            )
        name = posixpath.normpath(text)
        if not self._in_bucket:
            return name, "", ""
        bucket, _, prefix = self._root.removeprefix(_S3).partition("/")
        return name, bucket, f"{prefix}/{name}" if prefix else name

    def _is_used(self, name: str, label: str) -> bool:
        if skipped := skipped_path(name.removeprefix(_S3)):
            self._notes["litter"].add(skipped)
        elif names_other_kind(name):
            self._notes["not_an_image"].add(name)
        elif not label:
            self._notes["no_label"].add(name)
        else:
            return True
        return False

    def _stat(self, name: str) -> tuple[str | None, int, int]:
        path = os.path.join(self._root, name)  # noqa: PTH118 - pathlib would take most of the time
        try:
            stat = os.stat(path)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return None, 0, 0
        except OSError as error:
            with disk_errors(path):
                raise error
        if not os.path.isfile(path):  # noqa: PTH113
            return None, 0, 0
        return file_etag(stat), stat.st_size, stat.st_mtime_ns // 1000

    @cache  # noqa: B019 - few tables exist
    def _output_around(self, folder: str) -> str:
        """The folder around ``folder`` that evernear wrote, or an empty string."""
        parts = folder.split("/")
        paths = ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return next((path for path in paths if path and is_output(f"{self._root}/{path}")), "")

    def _link_around(self, folder: str) -> str:
        """The link that leads out of the table's folder, and its target, or an empty string."""
        root = os.path.realpath(self._root)
        if os.path.commonpath([root, os.path.realpath(os.path.join(root, folder))]) == root:  # noqa: PTH118
            return ""
        parts = folder.split("/")
        paths = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        link = next(path for path in paths if Path(root, path).is_symlink())
        target = os.fsencode(Path(root, link).readlink()).decode(errors="backslashreplace")
        return f"{link} -> {target}"

    def _find_objects(self, db: Database, bucket: str) -> None:
        own_bucket, _, root = self._root.removeprefix(_S3).partition("/")
        marked = MarkedFolders(root if self._in_bucket and own_bucket == bucket else "")
        ends = db.row("SELECT min(key), max(key) FROM rows WHERE bucket = $bucket", bucket=bucket)
        folder = posixpath.commonprefix(ends).rpartition("/")[0]
        listed = open_store(_S3 + bucket).list(f"{folder}/" if folder else "")
        objects = (info for info in listed if not marked.contain(info.key))
        for page in batched(objects, _PAGE):
            rows = [
                (bucket, info.key, info.etag, info.size_bytes, int(info.modified.timestamp() * 1e6)) for info in page
            ]
            db.create("page", _OBJECTS)
            db.insert("page", pa.table([list(column) for column in zip(*rows, strict=True)], _OBJECTS))
            db.run(_PRESENT, bucket=bucket)
        for folder in marked.names:
            within = {
                "bucket": bucket,
                "first": f"{folder}/",
                "end": f"{folder}0",
            }  # 0 follows / in the order of characters
            if db.value("SELECT count(*) FROM rows WHERE bucket = $bucket AND key > $first AND key < $end", **within):
                db.insert("outputs", pa.table({"bucket": [bucket], "folder": [folder]}))
                uri = f"{_S3}{bucket}/{folder}"
                self._notes["litter"].add(uri.removeprefix(f"{self._root}/"))

    def _require_present(self, missing: NameSample) -> None:
        if not missing.count:
            return
        slashes = " Separate folders by / instead of \\." if any("\\" in name for name in missing.names) else ""
        shown = [self._beside_twin(name) for name in missing.names[:NAMED]]
        raise DataError(
            f"{self._file_name} names files that do not exist in {self._root}: {named(shown, missing.count)}; correct"
            f" the paths, restore the files, or remove the rows.{slashes}"
        )

    def _beside_twin(self, name: str) -> str:
        """A missing name, with the one that looks the same, and their differences escaped."""
        if name.startswith(_S3) or self._in_bucket:
            uri = name if name.startswith(_S3) else f"{self._root}/{name}"
            folder, _, last = uri.rpartition("/")
            keys = (info.key for info in islice(open_store(folder).list(""), _MAX_LISTED))
            found = next((key for key in keys if lookalike_key(key) == lookalike_key(last)), "")
            twin = f"{name.rpartition('/')[0]}/{found}".lstrip("/") if found else ""
        else:
            twin = _twin_on_disk(Path(self._root), name)
        return f"{name!a} (the file there is {twin!a})" if twin else name


def _reader(bucket: str) -> Callable[[str], bytes]:
    return open_store(_S3 + bucket).reader()


def _twin_on_disk(root: Path, name: str) -> str:
    path = root
    for part in re.split(r"[/\\]", name):
        try:
            names = os.listdir(path)  # noqa: PTH208 - names, not paths
        except OSError:
            return ""
        alike = [part] if part in names else sorted(n for n in names if lookalike_key(n) == lookalike_key(part))
        if not alike:
            return ""
        path /= alike[0]
    return path.relative_to(root).as_posix() if path.is_file() else ""


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a CSV or Parquet file. Memory use is constant."""
    if name.lower().endswith(PARQUET_SUFFIXES):
        yield from _parquet_rows(file, name)
    else:
        yield from _csv_rows(file, name)


def _csv_rows(file: Path, name: str) -> Iterator[Row]:
    rows = csv_rows(file, name)
    at = column_positions(next(rows)[1], name, REQUIRED, OPTIONAL)
    for line, cells in rows:
        if row := _row_within(cells, at["path"]):
            start = line - sum(cell.count("\n") for cell in cells)
            raise DataError(
                f"A quotation mark in line {start:,} of {name} opens a value that contains other rows, such as {row!r};"
                ' remove it, or double it in a quoted value ("5"" screen").'
            )
        values = (cells[at[column]] if column in at else "" for column in (*REQUIRED, *OPTIONAL))
        yield Row(f"line {line:,}", *values)


def _row_within(cells: Sequence[str], path: int) -> str:
    """The first line within a cell that is the row of an image, or an empty string. A single
    quotation mark opens a value that ends at the next one, rows later."""
    for line in (line for cell in cells if "\n" in cell for line in cell.splitlines()[1:-1]):
        parts = re.split(r"[,;\t]", line)
        if len(parts) == len(cells) and has_image_suffix(parts[path].strip()):
            return line
    return ""


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
