"""Find the differences between a source and its snapshots by comparing listings. Only a few of the
touched files are read.

A file is new if its name, label, size or modification time is new. In a bucket, the ETag is used
instead of the time. Ingest also compares the change time and the inode of each file. These two
values also change after a ``chmod`` and in a restored backup, but such changes should not start a
run.

The newest snapshot shows which files ingest has read since an older snapshot. If a file is in it
with the same etag, the file counts as new only if its image is new. If only
the etag differs, the file may have been touched, restored without its times, or uploaded again in
parts of a different size. A sample of such files is read, and the share of changed images in the
sample determines how many of the files count as new.

A listing does not show which split ingest will choose for an image, so the number of new images in
a split is an expected value. A listing also does not show whether a new file is broken, a copy of
another file, or a renamed file. If a source provides decoded arrays (digits, MNIST), its listing
does not show whether an image was replaced.
"""

import hashlib
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from evernear.common.disk import disk_errors
from evernear.common.output import quantity
from evernear.common.store import Store
from evernear.data.books import local_tables, source_uri
from evernear.data.database import Database, batched
from evernear.data.decoding import read_image
from evernear.data.list import ANY_NUMBER, Admission, ClassMinimum
from evernear.data.manifest import Manifest, Split
from evernear.data.plan import members
from evernear.data.preprocess import decode_inspected
from evernear.data.reduction import BitDepth
from evernear.data.sources import FileEntry, FileSource, open_source
from evernear.data.sources.base import Source
from evernear.data.sources.packed import PackedFiles
from evernear.data.splits import split_fractions
from evernear.data.tables import SCHEMAS, Table
from evernear.errors import DataError, MissingObjectError
from evernear.settings import DataSettings

_PAGE = 20_000
_MAX_TOUCHED = 200
_MAX_TOUCHED_BYTES = 2**28
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_TABLES: tuple[Table, ...] = ("files", "images")
_LISTED = pa.schema([
    ("name", pa.string()), ("etag", pa.string()), ("label", pa.string()), ("given_split", pa.string()),
    ("size_bytes", pa.int64()),
])  # fmt: skip
_RENAMED = pa.schema([("before", pa.string()), ("after", pa.string())])
# What is not the same in a snapshot: its tables are ``files`` and ``images``, and ``old_files``
# those of the newest one. The part of an etag before a space stays when the mode or the owner of a
# file changes. In a table, unlike in a folder, the name stays the same if the label changes. A file
# that was left out may be readable with another mode or owner.
_COMPARED = """
CREATE OR REPLACE TABLE compared AS
SELECT l.*, r.digest, r.name IS NOT NULL AND $has_newest
    AND (l.size_bytes = r.size_bytes OR split_part(l.etag, ' ', 1) = split_part(r.etag, ' ', 1))
    AND (r.digest IS NULL OR coalesce(n.after, i.label) IS NOT DISTINCT FROM l.label) AS unchanged,
  split_part(l.etag, ' ', 1) <> split_part(r.etag, ' ', 1) OR r.digest IS NULL AND r.etag <> l.etag AS touched
FROM listed l LEFT JOIN (SELECT name, etag, label FROM files WHERE source = $source AND NOT waiting) k USING (name)
  LEFT JOIN (
    SELECT name, etag, size_bytes, digest FROM old_files
    WHERE source = $source AND NOT waiting AND (digest IS NOT NULL OR NOT unread)
  ) r USING (name)
  LEFT JOIN images i ON i.digest = r.digest
  LEFT JOIN renamed n ON n.before = i.label
WHERE k.name IS NULL OR k.label <> l.label OR split_part(k.etag, ' ', 1) <> split_part(l.etag, ' ', 1)
"""
_GONE = """
SELECT count(*), count(*) FILTER (name NOT IN (SELECT name FROM listed))
FROM files WHERE source = $source AND NOT waiting
"""
_NEW = "SELECT label, given_split, count(*) FROM compared WHERE NOT unchanged GROUP BY 1, 2"
_TOUCHED = """
SELECT name, etag, label, given_split, size_bytes, digest FROM compared WHERE unchanged AND touched
"""
# Files in each class that has no images from other sources.
_OWN_CLASSES = """
SELECT label, count(*) FROM files WHERE source = $source AND digest IS NOT NULL AND NOT waiting AND label NOT IN
  (SELECT label FROM files WHERE source <> $source AND digest IS NOT NULL AND NOT waiting) GROUP BY 1
"""


@dataclass
class SourceDiff:
    listed: int = 0
    new: int = 0
    touched: Counter[Split | None] = field(default_factory=Counter[Split | None])
    """Files, by explicit split, whose etag has changed since they were read, but not their size."""
    gone_classes: Mapping[str, int] = field(default_factory=dict[str, int])
    listing: str = ""
    """A digest of the listing, which changes if the listing changes."""
    removed: int = 0
    explicit: Counter[Split] = field(default_factory=Counter[Split])
    fractions: Mapping[Split, float] = field(default_factory=dict[Split, float])
    """The expected share of each split among new files that have no explicit split."""
    labels: Counter[str] = field(default_factory=Counter[str])

    def expected(self, split: Split) -> float:
        return self.explicit[split] + (self.new - self.explicit.total()) * self.fractions.get(split, 0.0)

    def add_changed(self, share: float) -> None:
        for split, count in self.touched.items():
            changed = math.ceil(share * count)
            self.new += changed
            if split:
                self.explicit[split] += changed


def diff_source(
    settings: DataSettings,
    store: Store,
    manifests: Sequence[Manifest | None],
    newest: Manifest | None = None,
    minimum: ClassMinimum = ANY_NUMBER,
    cache: Path | None = None,
    renamed: Mapping[str, str] = _NO_NAMES,
) -> list[SourceDiff]:
    """List ``settings.source`` once, and compare the listing with each of the snapshots in
    ``store``. None stands for an empty snapshot. Files of classes that wait because of ``minimum``
    do not count. ``renamed`` has the new names of classes: their images are not new.

    If ``newest`` is set, the newest snapshot, at most 200 of the files that were only touched are
    read. Memory use does not grow with the number of files. Tables from a bucket are copied to
    ``cache``, where those of earlier calls are used again and others are deleted.

    Raises:
        DataError, SettingsError: the source is unusable, or it is empty although a snapshot
            contains files from this source.
        StoreError: the source cannot be read, or a table cannot be read.
    """
    source, uri = open_source(settings.source, settings), source_uri(settings.source)
    with tempfile.TemporaryDirectory(prefix="evernear-watch-") as directory:
        scratch = Path(directory)
        tables = [
            local_tables(store, each, _TABLES, cache or scratch) if each else dict[Table, list[Path]]()
            for each in (*manifests, newest)
        ]
        used = {path for files in tables for paths in files.values() for path in paths}
        if cache is not None:
            _delete_others(cache, used)
        with closing(Database(scratch, sorted({path.parent for path in used}))) as db:
            *earlier, latest = tables
            db.attach("old_files", (latest or earlier[0]).get("files", []), SCHEMAS["files"])
            if isinstance(source, PackedFiles):
                source.remembered = lambda file, etag: members(db, uri, file, etag)
            listing = _list(db, source, minimum)
            db.attach("old_files", latest.get("files", []), SCHEMAS["files"])
            db.create("renamed", _RENAMED)
            db.insert("renamed", pa.table([[*renamed], [*renamed.values()]], _RENAMED))
            diffs, touched = list[SourceDiff](), _Touched()
            for files, manifest in zip(earlier, manifests, strict=True):
                for table in _TABLES:
                    db.attach(table, files.get(table, []), SCHEMAS[table])
                diffs.append(_diff(db, settings, uri, manifest, listing, touched, newest is not None))
            share = touched.changed_share(source, settings, newest.bit_depth if newest else 16)
    for diff in diffs:
        diff.add_changed(share)
        # Etags count only if an image was replaced by an image of the same size, because touching a
        # file is not a change.
        diff.listing = f"{(listing.names + (listing.etags if share else 0)) % 2**64:016x}"
        diff.fractions = split_fractions(source.chosen_splits, settings)  # final only after the listing
    return diffs


def _delete_others(cache: Path, used: set[Path]) -> None:
    with disk_errors(cache):
        for path in set(cache.glob("*.parquet")) - used:
            path.unlink(missing_ok=True)


@dataclass
class _Listing:
    count: int = 0
    names: int = 0
    """Sums of hashes, because the order of the files in a folder's listing may vary."""
    etags: int = 0
    classes: set[str] = field(default_factory=set[str])


def _list(db: Database, source: Source, minimum: ClassMinimum) -> _Listing:
    """Make the table ``listed``."""
    listing = _Listing()
    db.create("listed", _LISTED)
    for page in batched(Admission(minimum).admitted(source.entries()), _PAGE):
        listing.count += len(page)
        listing.names += sum(_hash(entry.name, entry.label, entry.size_bytes) for entry in page)
        listing.etags += sum(_hash(entry.name, entry.etag) for entry in page)
        listing.classes.update(entry.label for entry in page)
        db.insert(
            "listed", pa.table([list(column) for column in zip(*(entry[:5] for entry in page), strict=True)], _LISTED)
        )
    return listing


def _diff(
    db: Database,
    settings: DataSettings,
    source: str,
    manifest: Manifest | None,
    listing: _Listing,
    touched: "_Touched",
    has_newest: bool,
) -> SourceDiff:
    diff = SourceDiff(listed=listing.count)
    db.run(_COMPARED, source=source, has_newest=has_newest and manifest is not None)
    for label, split, count in db.rows(_NEW):
        diff.new += count
        diff.labels[label] += count
        if split:
            diff.explicit[split] += count
    if manifest is None:
        return diff
    count, diff.removed = db.row(_GONE, source=source)
    if not listing.count and count:
        raise DataError(
            f"{settings.source} lists no image, and the release was made from {quantity(count, 'file')} of it: check"
            " that it is mounted and complete."
        )
    own = db.rows(_OWN_CLASSES, source=source)
    diff.gone_classes = {label: count for label, count in own if label not in listing.classes}
    for *fields, digest in db.stream(_TOUCHED):
        entry = FileEntry(*fields)
        diff.touched[entry.explicit_split] += 1
        touched.add(entry, digest)
    return diff


class _Touched:
    """A uniform sample of the touched files, for the share of changed images."""

    def __init__(self) -> None:
        self._sample: dict[int, tuple[FileEntry, bytes | None]] = {}

    def add(self, entry: FileEntry, digest: bytes | None) -> None:
        """Add a file whose image had ``digest``. The files with the lowest hashes are kept."""
        self._sample[_hash(entry.name, entry.etag)] = entry, digest
        if len(self._sample) > _MAX_TOUCHED:
            del self._sample[max(self._sample)]

    def changed_share(self, source: Source, settings: DataSettings, bit_depth: BitDepth) -> float:
        if not self._sample or not isinstance(source, FileSource):
            return 0.0
        read = changed = size_bytes = 0
        for entry, digest in sorted(self._sample.values(), key=lambda sampled: sampled[0].name):
            changed += _read_digest(source, entry, settings.max_pixels, bit_depth) != digest
            read, size_bytes = read + 1, size_bytes + entry.size_bytes
            if size_bytes > _MAX_TOUCHED_BYTES:
                break
        return changed / read


def _read_digest(source: FileSource, entry: FileEntry, max_pixels: int, bit_depth: BitDepth) -> bytes | None:
    try:
        return decode_inspected(read_image(source, entry, max_pixels), bit_depth).digest()
    except (DataError, MissingObjectError):
        return None


def _hash(*parts: object) -> int:
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest())
