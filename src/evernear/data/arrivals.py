"""What a source holds that a snapshot does not, told from listings: nothing is decoded, and no image is read.

What a listing cannot tell: the split of an image that its content decides (so that is an expectation), whether a new
file is a copy of a known image, was only renamed, or is broken; and, of images that come as arrays (digits, MNIST),
whether one was replaced in its place.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from evernear.data.ledger import Listed, PublishedLedger
from evernear.data.manifest import SPLITS, Manifest, Split, ledger_key
from evernear.data.sources import FileSource, open_source
from evernear.settings import DataSettings
from evernear.store import Store

_PAGE = 500


@dataclass
class Arrivals:
    """Files of a source against those of a snapshot."""

    listed: int = 0
    new: int = 0
    """Files that the snapshot does not know, or knows with other content."""
    gone: int = 0
    """Files of the snapshot that the source no longer lists."""
    given: Counter[Split] = field(default_factory=Counter[Split])
    """New files whose split the source gives."""
    shares: Mapping[Split, float] = field(default_factory=dict[Split, float])
    """The share of each split in the new files whose split their content decides."""
    labels: Counter[str] = field(default_factory=Counter[str])
    """New files by label."""

    def expected(self, split: Split) -> float:
        """New images that go to ``split``: counted where the source says so, expected where their content does."""
        undecided = self.new - self.given.total()
        return self.given[split] + undecided * self.shares.get(split, 0.0)


def count_arrivals(settings: DataSettings, ledgers: Sequence[Path | None]) -> list[Arrivals]:
    """Compare ``settings.source``, listed once, with each of ``ledgers`` (None: a snapshot of nothing).

    Memory does not grow with the number of files.

    Raises:
        DataError, SettingsError: the source cannot be used. StoreError: it or a ledger cannot be read.
    """
    source = open_source(settings.source)
    files = source.files() if isinstance(source, FileSource) else source.listed()
    counts = [Arrivals() for _ in ledgers]
    with ExitStack() as stack:
        opened = [
            stack.enter_context(closing(PublishedLedger(path, settings.source))) if path else None for path in ledgers
        ]
        for page in _pages(files):
            for ledger, count in zip(opened, counts, strict=True):
                _add(count, page, ledger.etags([file.name for file in page]) if ledger else {})
        for ledger, count in zip(opened, counts, strict=True):
            count.gone += ledger.count() if ledger else 0
            count.shares = split_shares(source.hashed, settings)  # known only when all is listed
    return counts


def fetch_ledger(store: Store, manifest: Manifest, directory: Path) -> Path:
    """The ledger of a snapshot, in ``directory``, which keeps it: a ledger never changes.

    Raises:
        StoreError, IntegrityError: the store has it no longer, or damaged.
    """
    path = directory / f"{manifest.ledger_sha256}.sqlite"
    if not path.exists():
        store.fetch(ledger_key(manifest.name, manifest.ledger_sha256), path, manifest.ledger_sha256)
    return path


def split_shares(hashed: Iterable[Split], settings: DataSettings) -> dict[Split, float]:
    """The share of each split that `evernear.data.ingest.split_of` gives by content."""
    fractions = {
        "test": settings.test_fraction,
        "gallery": settings.gallery_fraction,
        "query": settings.query_fraction,
    }
    shares: dict[Split, float] = {split: fractions[split] for split in SPLITS if split in hashed and split != "train"}
    return {**shares, "train": 1.0 - sum(shares.values())}


def _pages(files: Iterator[Listed]) -> Iterator[list[Listed]]:
    while page := list(islice(files, _PAGE)):
        yield page


def _add(count: Arrivals, page: Sequence[Listed], known: Mapping[str, str]) -> None:
    count.listed += len(page)
    count.gone -= len(known)
    new = [file for file in page if known.get(file.name) != file.etag]
    count.new += len(new)
    count.given.update(file.given for file in new if file.given)
    count.labels.update(file.label for file in new)
