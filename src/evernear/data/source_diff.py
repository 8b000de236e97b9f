"""The difference between a source and snapshots of it, from listings alone: no image is read.

A file is new if its name, size or modification time is (in a bucket: its ETag). Its change time and inode, which ingest
compares as well, also differ after a ``chmod`` or in a restored backup, which should not start a run.

A listing does not show the split that ingest will choose for an image (its count is an expectation), nor whether a new
file is a copy, a renamed file or broken; nor, in sources of decoded arrays (digits, MNIST), whether an image was
replaced.
"""

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
from evernear.settings import DataSettings
from evernear.store import Store

_PAGE = 500


@dataclass
class SourceDiff:
    """Files of a source compared with those of a snapshot."""

    listed: int = 0
    new: int = 0
    """Files that are not in the snapshot, or have other content there."""
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


def diff_source(settings: DataSettings, ledgers: Sequence[Path | None]) -> list[SourceDiff]:
    """Compare ``settings.source``, listed once, with each of ``ledgers`` (None: an empty snapshot).

    Memory does not grow with the number of files.

    Raises:
        DataError, SettingsError: the source is unusable.
        StoreError: the source or a ledger cannot be read.
    """
    source = open_source(settings.source, settings)
    entries = source.entries()
    diffs = [SourceDiff() for _ in ledgers]
    with ExitStack() as stack:
        opened = [
            stack.enter_context(closing(PublishedLedger(path, settings.source))) if path else None for path in ledgers
        ]
        while page := list(islice(entries, _PAGE)):
            for ledger, diff in zip(opened, diffs, strict=True):
                _add(diff, page, ledger.etags([entry.name for entry in page]) if ledger else {})
        for ledger, diff in zip(opened, diffs, strict=True):
            diff.removed += ledger.count() if ledger else 0
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


def _add(diff: SourceDiff, page: Sequence[FileEntry], etags: Mapping[str, str]) -> None:
    diff.listed += len(page)
    diff.removed -= len(etags)
    known = {name: without_change_time(etag) for name, etag in etags.items()}
    new = [entry for entry in page if known.get(entry.name) != without_change_time(entry.etag)]
    diff.new += len(new)
    diff.explicit.update(entry.explicit_split for entry in new if entry.explicit_split)
    diff.labels.update(entry.label for entry in new)
