"""The difference between a source and snapshots of it, from listings alone: no image is read.

A file is new if its name, size or modification time is (in a bucket: its ETag). Its change time and inode, which ingest
compares as well, also differ after a ``chmod`` or in a restored backup, which should not start a run.

The ledger of the newest snapshot shows what ingest has read since: a file that it has with that etag is new only if its
image is. So files that were touched or uploaded again settle when a run has read them, even if it led to no release.

A listing does not show the split that ingest will choose for an image (its count is an expectation), nor whether a new
file is a copy, a renamed file or broken; nor, in sources of decoded arrays (digits, MNIST), whether an image was
replaced.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from evernear.data.ledger import PublishedLedger
from evernear.data.manifest import Manifest, Split
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry, open_source
from evernear.data.sources.base import without_change_time
from evernear.data.splits import split_fractions
from evernear.disk import disk_errors, sha256_bytes
from evernear.errors import DataError
from evernear.output import quantity
from evernear.settings import DataSettings
from evernear.store import Store

_PAGE = 500


@dataclass
class SourceDiff:
    """Files of a source compared with those of a snapshot."""

    listed: int = 0
    new: int = 0
    """Files that are not in the snapshot, or have other content there."""
    gone_classes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Classes of the snapshot without any file in the source, and their numbers of files there."""
    listing: str = ""
    """A digest of the listing, to see whether anything has changed."""
    removed: int = 0
    """Files of the snapshot that the source no longer lists."""
    explicit: Counter[Split] = field(default_factory=Counter[Split])
    """New files with an explicit split."""
    fractions: Mapping[Split, float] = field(default_factory=dict[Split, float])
    """The expected share of each split in the other new files."""
    labels: Counter[str] = field(default_factory=Counter[str])
    """New files by label."""

    def expected(self, split: Split) -> float:
        """The expected number of new images in ``split``."""
        return self.explicit[split] + (self.new - self.explicit.total()) * self.fractions.get(split, 0.0)


def diff_source(settings: DataSettings, ledgers: Sequence[Path | None], newest: Path | None = None) -> list[SourceDiff]:
    """Compare ``settings.source``, listed once, with each of ``ledgers`` (None: an empty snapshot).

    ``newest`` is the ledger of the dataset's newest snapshot. Memory does not grow with the number of files.

    Raises:
        DataError, SettingsError: the source is unusable, or empty although a snapshot has files of it.
        StoreError: the source or a ledger cannot be read.
    """
    source = open_source(settings.source, settings)
    entries = source.entries()
    diffs = [SourceDiff() for _ in ledgers]
    listing, classes = 0, set[str]()
    with ExitStack() as stack:
        *opened, latest = [
            stack.enter_context(closing(PublishedLedger(path, settings.source))) if path else None
            for path in (*ledgers, newest)
        ]
        while page := list(islice(entries, _PAGE)):
            # A sum, because the order of a folder's listing may differ.
            listing += sum(map(_fingerprint, page))
            classes.update(entry.label for entry in page)
            read = latest.contents([entry.name for entry in page]) if latest else {}
            for ledger, diff in zip(opened, diffs, strict=True):
                _add(diff, page, ledger, read)
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
            diff.listing = f"{listing % 2**64:016x}"
            diff.fractions = split_fractions(source.chosen_splits, settings)  # final only after the listing
    return diffs


def fetch_ledger(store: Store, manifest: Manifest, directory: Path) -> Path:
    """The ledger of a snapshot, cached in ``directory``: a ledger never changes.

    Raises:
        StoreError, IntegrityError: the ledger is missing from the store, or damaged.
    """
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
    read: Mapping[str, tuple[str, bytes | None]],
) -> None:
    """Compare a page of the listing with a ledger; ``read`` has the etags and digests of the files as last read."""
    etags = ledger.etags([entry.name for entry in page]) if ledger else {}
    diff.listed += len(page)
    diff.removed -= len(etags)
    new = [entry for entry in page if not _has_etag(entry, etags.get(entry.name))]
    if ledger:
        as_read = {
            entry.name: read[entry.name][1]
            for entry in new
            if entry.name in read and _has_etag(entry, read[entry.name][0])
        }
        labels = ledger.image_labels([digest for digest in as_read.values() if digest is not None])
        new = [entry for entry in new if entry.name not in as_read or _is_new(entry, as_read[entry.name], labels)]
    diff.new += len(new)
    diff.explicit.update(entry.explicit_split for entry in new if entry.explicit_split)
    diff.labels.update(entry.label for entry in new)


def _has_etag(entry: FileEntry, etag: str | None) -> bool:
    return etag is not None and without_change_time(etag) == without_change_time(entry.etag)


def _is_new(entry: FileEntry, digest: bytes | None, labels: Mapping[bytes, str]) -> bool:
    """Whether the content of a file is an image (``digest``) that a snapshot lacks, or has in another class."""
    return digest is not None and labels.get(digest) != entry.label


def _fingerprint(entry: FileEntry) -> int:
    text = "\0".join((entry.name, entry.label, without_change_time(entry.etag)))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest())
