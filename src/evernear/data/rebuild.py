"""Forget the damaged objects of a dataset. The next ingest reads their images again, and puts them
into the same splits. An image that is read again with the same digest stands in for the lost one in
every snapshot: the ledger of a snapshot contains the digests of its images."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.data.ledger import Ledger
from evernear.data.manifest import Manifest, Shard, Split
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources import open_source
from evernear.data.stored_ledger import shard_digests, shard_files, unreplaced_names
from evernear.errors import IntegrityError
from evernear.settings import DataSettings


def split_digests(dataset: Dataset, split: Split) -> Iterator[NDArray[np.uint8]]:
    """Yield the digests (N, 32) of a split. Those of a lost shard come from the snapshot's
    ledger."""
    for shard in dataset.shards(split):
        try:
            digests = [block.digests for block in dataset.shard_blocks(shard)]
        except IntegrityError as lost:
            digests = [_ledger_digests(dataset, shard, lost)]
        yield from digests


def _ledger_digests(dataset: Dataset, shard: Shard, lost: IntegrityError) -> NDArray[np.uint8]:
    with tempfile.TemporaryDirectory(prefix="evernear-ledger-") as scratch:
        ledger = Path(scratch, "ledger.sqlite")
        try:
            Snapshots(dataset.store, dataset.manifest.name).fetch_ledger(dataset.manifest, ledger)
        except IntegrityError:
            raise lost from None
        return np.frombuffer(b"".join(shard_digests(ledger, shard.sha256)), np.uint8).reshape(-1, 32)


def gone_names(snapshots: Snapshots, lost: Iterable[str], settings: DataSettings, moved: bool) -> list[str]:
    """One file name of each image in the shards ``lost`` of the newest snapshot that the source no
    longer lists. If ``moved`` is set, ``settings.source`` is listed instead of the sources in the
    ledger."""
    files: set[tuple[str, str, bytes]] = set()
    if (head := snapshots.head()) is not None:
        with tempfile.TemporaryDirectory(prefix="evernear-ledger-") as scratch:
            ledger = Path(scratch, "ledger.sqlite")
            snapshots.fetch_ledger(head, ledger)
            files = {file for sha256 in lost for file in shard_files(ledger, sha256)}
    present: set[bytes] = set()
    for uri in sorted({uri for uri, *_ in files}):
        of_name = {name: digest for source, name, digest in files if source == uri}
        entries = open_source(settings.source if moved else uri, settings).entries()
        present |= {of_name[entry.name] for entry in entries if entry.name in of_name}
    return sorted({digest: name for _, name, digest in files if digest not in present}.values())


def lost_names(snapshots: Snapshots, sha256: str) -> list[str]:
    """One file name of each image in a lost shard of an earlier snapshot for which no image of the
    newest snapshot stands in."""
    head = snapshots.head()
    holders = (m for _, m in snapshots.manifests() if any(shard.sha256 == sha256 for shard in m.shards))
    if head is None or (holder := next(holders, None)) is None:
        raise IntegrityError("No intact snapshot names it.")
    with tempfile.TemporaryDirectory(prefix="evernear-ledger-") as scratch:
        earlier, newest = Path(scratch, "earlier.sqlite"), Path(scratch, "newest.sqlite")
        snapshots.fetch_ledger(holder, earlier)
        snapshots.fetch_ledger(head, newest)
        return unreplaced_names(earlier, sha256, newest)


def drop_shards(snapshots: Snapshots, lost: Iterable[str]) -> Manifest:
    """Publish a copy of the newest snapshot from which the shards in ``lost`` are removed. The next
    ingest reads the images of these shards again, and puts them into the same splits."""
    head, lost = snapshots.head(), set(lost)
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    with tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch:
        path = Path(scratch) / "ledger.sqlite"
        snapshots.fetch_ledger(head, path)
        with closing(Ledger(path, head.source)) as ledger:
            ledger.lose_shards(lost)
            changes = {
                "shards": tuple(shard for shard in head.shards if shard.sha256 not in lost),
                "parent": head.digest,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            return snapshots.publish(head.model_copy(update=changes), ledger, Path(scratch))


def rebuild_ledger(snapshots: Snapshots) -> None:
    """Replace the newest snapshot's ledger with a ledger that contains only the splits of the
    images. The splits are read from the snapshot's shards. The next ingest reads all images again,
    and puts them into the same splits."""
    head = snapshots.head()
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    dataset = Dataset(head, snapshots.store)
    with (
        tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch,
        closing(Ledger(Path(scratch) / "ledger.sqlite", head.source)) as ledger,
    ):
        ledger.add_labels(head.labels)
        for shard in head.shards:
            for block in dataset.shard_blocks(shard):
                ledger.remember_splits((digest.tobytes() for digest in block.digests), shard.split)
        snapshots.publish(head, ledger, Path(scratch))
