"""Find the differences between a source and its snapshots by comparing listings. Only a few of the
touched files are read.

A file is new if its name, label, size or modification time is new. In a bucket, the ETag is used
instead of the time. Ingest also compares the change time and the inode of each file. These two
values also change after a ``chmod`` and in a restored backup, but such changes should not start a
run.

The ledger of the newest snapshot shows which files ingest has read since an older snapshot. If a
file is in this ledger with the same etag, the file counts as new only if its image is new. If only
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
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from evernear.common.disk import disk_errors, sha256_bytes
from evernear.common.output import quantity
from evernear.common.store import Store
from evernear.data.decoding import read_image
from evernear.data.listing import ANY_NUMBER, Admission, ClassMinimum
from evernear.data.manifest import Manifest, Split
from evernear.data.preprocess import decode_inspected
from evernear.data.reduction import BitDepth
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry, FileSource, open_source
from evernear.data.sources.base import Source, without_change_time
from evernear.data.sources.packed import PackedFiles
from evernear.data.splits import split_fractions
from evernear.data.stored_ledger import PublishedLedger, ReadFile
from evernear.errors import DataError, MissingObjectError
from evernear.settings import DataSettings

_PAGE = 500
_MAX_TOUCHED = 200
_MAX_TOUCHED_BYTES = 2**28


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


@dataclass(frozen=True)
class Newest:
    """The newest snapshot, whose ledger shows what ingest has read since an older one."""

    ledger: Path
    bit_depth: BitDepth = 16


def diff_source(
    settings: DataSettings,
    ledgers: Sequence[Path | None],
    newest: Newest | None = None,
    minimum: ClassMinimum = ANY_NUMBER,
) -> list[SourceDiff]:
    """List ``settings.source`` once, and compare the listing with each of ``ledgers``. None stands
    for an empty snapshot. Files of classes that wait because of ``minimum`` do not count.

    If ``newest`` is set, at most 200 of the files that were only touched are read. Memory use does
    not grow with the number of files.

    Raises:
        DataError, SettingsError: the source is unusable, or it is empty although a snapshot
            contains files from this source.
        StoreError: the source cannot be read, or a ledger cannot be read.
    """
    source = open_source(settings.source, settings)
    entries = Admission(minimum).admitted(source.entries())
    diffs = [SourceDiff() for _ in ledgers]
    classes, touched, names, etags = set[str](), _Touched(), 0, 0
    with ExitStack() as stack:
        *opened, latest = [
            stack.enter_context(closing(PublishedLedger(path, settings.source))) if path else None
            for path in (*ledgers, newest.ledger if newest else None)
        ]
        if isinstance(source, PackedFiles) and (ledger := latest or opened[0]):
            source.remembered = ledger.members
        while page := list(islice(entries, _PAGE)):
            # The hashes are summed, because the order of the files in a folder's listing may vary.
            names += sum(_hash(entry.name, entry.label, entry.size_bytes) for entry in page)
            etags += sum(_hash(entry.name, entry.etag) for entry in page)
            classes.update(entry.label for entry in page)
            read = latest.as_read([entry.name for entry in page]) if latest else {}
            for ledger, diff in zip(opened, diffs, strict=True):
                _add(diff, page, ledger, read, touched)
        changed_share = touched.changed_share(source, settings, newest.bit_depth if newest else 16)
        for ledger, diff in zip(opened, diffs, strict=True):
            if ledger:
                if not diff.listed and (count := ledger.count()):
                    raise DataError(
                        f"{settings.source} lists no image, and the release was made from {quantity(count, 'file')} of"
                        " it: check that it is mounted and complete."
                    )
                diff.removed += ledger.count()
                own = ledger.own_classes().items()
                diff.gone_classes = {label: count for label, count in own if label not in classes}
            diff.add_changed(changed_share)
            # Etags count only if an image was replaced by an image of the same size, because
            # touching a file is not a change.
            diff.listing = f"{(names + (etags if changed_share else 0)) % 2**64:016x}"
            diff.fractions = split_fractions(source.chosen_splits, settings)  # final only after the listing
    return diffs


def fetch_ledger(store: Store, manifest: Manifest, directory: Path) -> Path:
    name = sha256_bytes("".join((manifest.ledger_sha256, *manifest.ledger_changes)).encode())
    path = directory / f"{name}.sqlite"
    if not path.exists():
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".ledger-", dir=directory) as partial:
                ledger = Path(partial, path.name)
                Snapshots(store, manifest.name).fetch_ledger(manifest, ledger)
                ledger.replace(path)
    return path


def _add(
    diff: SourceDiff,
    page: Sequence[FileEntry],
    ledger: PublishedLedger | None,
    read: Mapping[str, ReadFile],
    touched: "_Touched",
) -> None:
    known = ledger.listed([entry.name for entry in page]) if ledger else {}
    diff.listed += len(page)
    diff.removed -= len(known)
    new = [entry for entry in page if entry.name not in known or not _is_same(entry, *known[entry.name])]
    if ledger and read:
        digests = [read[entry.name].digest for entry in new if entry.name in read]
        labels = ledger.image_labels([digest for digest in digests if digest is not None])
        unchanged = [entry for entry in new if entry.name in read and _is_known(entry, read[entry.name], labels)]
        for entry in unchanged:
            if not _has_etag(entry, read[entry.name].etag) or _may_be_mended(entry, read[entry.name]):
                diff.touched[entry.explicit_split] += 1
                touched.add(entry, read[entry.name].digest)
        names = {entry.name for entry in unchanged}
        new = [entry for entry in new if entry.name not in names]
    diff.new += len(new)
    diff.explicit.update(entry.explicit_split for entry in new if entry.explicit_split)
    diff.labels.update(entry.label for entry in new)


def _is_same(entry: FileEntry, etag: str, label: str) -> bool:
    """In a table, unlike in a folder, the name stays the same if the label changes."""
    return entry.label == label and _has_etag(entry, etag)


def _has_etag(entry: FileEntry, etag: str) -> bool:
    return without_change_time(etag) == without_change_time(entry.etag)


def _may_be_mended(entry: FileEntry, read: ReadFile) -> bool:
    """Whether a file that was left out has another owner or mode since, and may now be readable."""
    return read.digest is None and read.etag != entry.etag


def _is_known(entry: FileEntry, read: ReadFile, labels: Mapping[bytes, str]) -> bool:
    if entry.size_bytes != read.size_bytes and not _has_etag(entry, read.etag):
        return False
    return read.digest is None or labels.get(read.digest) == entry.label


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
