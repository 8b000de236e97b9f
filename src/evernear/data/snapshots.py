"""The snapshots of a dataset in the store, the pointer to the newest one, and what is done about
damaged objects of a snapshot.

An image that is read again with the same digest stands in for a lost one in every snapshot: the
ledger of a snapshot contains the digests of its images.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import sha256_file
from evernear.common.frozen import Document
from evernear.common.store import Store
from evernear.data.ledger import Ledger
from evernear.data.manifest import REPAIR, Manifest, Shard, Split, fetch_object, find_manifest, ledger_key, manifest_key
from evernear.data.shards import Dataset
from evernear.data.sources import open_source
from evernear.data.stored_ledger import (
    PublishedLedger,
    apply_changes,
    compress,
    expand,
    require_ledger_format,
    save_compact,
)
from evernear.errors import ConflictError, IntegrityError
from evernear.settings import DataSettings

# The complete ledger is stored again after this many sets of changes, or when the total size of the
# changes exceeds this fraction of the ledger's size.
_MAX_CHANGES = 20
_MAX_CHANGED_FRACTION = 0.25


DATASETS = "datasets/"


class DatasetHead(Document):
    remedy = REPAIR

    digest: str
    interrupts: int = 0
    """Number of calls of `Snapshots.interrupt_ingests`."""


class Snapshots:
    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self._head_key = f"{DATASETS}{name}/head.json"
        self._head_etag: str | None = None
        self._interrupts = 0
        self._ledger: tuple[str, ...] = ()
        self._changes_bytes = 0

    def head(self) -> Manifest | None:
        stored = self.store.find(self._head_key)
        if stored is None:
            self._require_no_later_snapshot()
            return None
        data, self._head_etag = stored
        head = DatasetHead.from_json(data, f"{self.store.uri}/{self._head_key}")
        self._interrupts = head.interrupts
        return self._manifest(head.digest)

    def fetch_ledger(self, manifest: Manifest, path: Path) -> None:
        """Copy a snapshot's ledger. `publish` can then store only the changes to it."""
        self._ledger, self._changes_bytes = _ledger_of(manifest), 0
        self._fetch(manifest.ledger_sha256, path)
        for sha256 in manifest.ledger_changes:
            changes = path.with_suffix(".changes")
            self._fetch(sha256, changes)
            self._changes_bytes += changes.stat().st_size
            apply_changes(path, changes)
            changes.unlink()

    @contextmanager
    def ledger(self, manifest: Manifest) -> Generator[PublishedLedger]:
        """Read a local copy of a snapshot's ledger."""
        with TemporaryDirectory(prefix="evernear-ledger-") as scratch:
            path = Path(scratch, "ledger.sqlite")
            self.fetch_ledger(manifest, path)
            with closing(PublishedLedger(path, manifest.source)) as ledger:
                yield ledger

    def move_head(self, digest: str | None) -> None:
        """Make the snapshot ``digest``, which is in the store, the newest snapshot. If ``digest``
        is None, the dataset starts over.

        Raises:
            ConflictError: a different process moved the head since it was read.
        """
        stored = self.store.find(self._head_key)
        if digest is None:
            self.store.delete(self._head_key)
        else:
            self.store.put_if(self._head_key, DatasetHead(digest=digest).to_json(), stored[1] if stored else None)

    def parts_folder(self, parent: Manifest | None) -> str:
        """The folder for parts of ingests that start from ``parent``, with a slash."""
        return parts_folder(self.name, parent.digest if parent else None)

    def delete_parts(self, is_obsolete: Callable[[str], bool] = lambda _: True) -> None:
        for info in self.store.list(parts_prefix(self.name)):
            if is_obsolete(info.key):
                self.store.delete(info.key)

    def publish(self, manifest: Manifest, ledger: Ledger, scratch: Path) -> Manifest:
        """Make ``manifest`` the newest snapshot.

        The content of a snapshot never changes, but its ledger follows the source. For example, a
        file may be renamed, or may be read again because its times changed. If the ledger were not
        updated, each later run and the watcher would treat such a file as new.
        """
        key = manifest_key(self.name, manifest.digest)
        stored = self.store.find(key)
        is_same = False
        with suppress(IntegrityError):  # a damaged manifest is written again
            known = Manifest.from_store(stored[0], self.store, key) if stored else None
            if known is not None:
                is_same = self._ledger == _ledger_of(known) and not ledger.has_changed()
                is_described = known.small_classes == manifest.small_classes
                if is_same and is_described and self._is_head(known.digest):
                    return known
                current = ("source", "reviewed", "reviewed_left_out", "small_classes")
                manifest = known.model_copy(update={name: getattr(manifest, name) for name in current})
        if not is_same:
            manifest = self._with_ledger(manifest, ledger, scratch)
        try:
            self.store.put_if(key, manifest.to_store(), stored[1] if stored else None)
        except ConflictError:  # a different ingest of the same images
            manifest = self._manifest(manifest.digest)
        # The number of interrupts is kept, so that the head never returns to a state from before an
        # interrupt.
        self._move_head(DatasetHead(digest=manifest.digest, interrupts=self._interrupts))
        return manifest

    def images(self, manifest: Manifest) -> list[bytes]:
        """The digests of all images in a snapshot, and of images that wait."""
        with self.ledger(manifest) as ledger:
            return ledger.stored_digests()

    def interrupt_ingests(self) -> None:
        """Make an ingest that is in progress fail, so that the next ingest starts over."""
        data, etag = self.store.find(self._head_key) or (b"", None)
        head = DatasetHead.from_json(data, f"{self.store.uri}/{self._head_key}")
        self.store.put_if(
            self._head_key, DatasetHead(digest=head.digest, interrupts=head.interrupts + 1).to_json(), etag
        )
        self.delete_parts()

    def compact_ledgers(self, manifests: Iterable[Manifest]) -> None:
        """Store ledgers without removed images, and delete all other ledgers."""
        compact: set[str] = set()
        with TemporaryDirectory(prefix="evernear-ledger-") as scratch:
            path, saved = Path(scratch) / "ledger.sqlite", Path(scratch) / "saved.sqlite"
            for manifest in manifests:
                self.fetch_ledger(manifest, path)
                save_compact(path, saved)
                sha256 = sha256_file(saved)
                self.store.put(ledger_key(self.name, sha256), saved)
                compacted = manifest.model_copy(update={"ledger_sha256": sha256, "ledger_changes": ()})
                self.store.put(manifest_key(self.name, manifest.digest), compacted.to_store())
                compact.add(ledger_key(self.name, sha256))
                saved.unlink()
        for info in self.store.list(f"{DATASETS}{self.name}/ledgers/"):
            if info.key not in compact:
                self.store.delete(info.key)

    def _with_ledger(self, manifest: Manifest, ledger: Ledger, scratch: Path) -> Manifest:
        path = scratch / "saved.sqlite"
        if 0 < len(self._ledger) <= _MAX_CHANGES:
            ledger.save_changes(path)
            self._changes_bytes += path.stat().st_size
        if path.exists() and self._changes_bytes < _MAX_CHANGED_FRACTION * ledger.size_bytes():
            compress(path)
            self._ledger = (*self._ledger, sha256_file(path))
        else:
            path.unlink(missing_ok=True)
            ledger.save(path)
            self._ledger, self._changes_bytes = (sha256_file(path),), 0
        self.store.put(ledger_key(self.name, self._ledger[-1]), path)
        path.unlink()
        sha256, *changes = self._ledger
        return manifest.model_copy(update={"ledger_sha256": sha256, "ledger_changes": tuple(changes)})

    def _fetch(self, sha256: str, path: Path) -> None:
        """Fetch a ledger, or changes to one."""
        key = ledger_key(self.name, sha256)
        fetch_object(self.store, key, path, sha256)
        expand(path)
        require_ledger_format(path, f"{self.store.uri}/{key}")

    def _is_head(self, digest: str) -> bool:
        stored = self.store.find(self._head_key)
        return stored is not None and DatasetHead.from_json(stored[0], self._head_key).digest == digest

    def manifests(self) -> Iterator[tuple[str, Manifest]]:
        for info in self.store.list(f"{DATASETS}{self.name}/manifests/"):
            digest = PurePosixPath(info.key).stem
            with suppress(IntegrityError):
                if (manifest := find_manifest(self.store, self.name, digest)) is not None:
                    yield digest, manifest

    def _require_no_later_snapshot(self) -> None:
        """A lost head is harmless only after a killed first ingest."""
        if any(manifest.parent for _, manifest in self.manifests()):
            raise IntegrityError(
                f"{self._head_key} does not exist in {self.store.uri}, although the dataset {self.name} has several "
                f"snapshots; {REPAIR}."
            )

    def _move_head(self, head: DatasetHead) -> None:
        try:
            self.store.put_if(self._head_key, head.to_json(), self._head_etag)
        except ConflictError:
            if DatasetHead.from_json(self.store.get(self._head_key), self._head_key) != head:
                raise ConflictError(
                    f"Another ingest of the dataset {self.name!r} finished in the meantime; run again."
                ) from None

    def _manifest(self, digest: str) -> Manifest:
        manifest = find_manifest(self.store, self.name, digest)
        if manifest is None:
            key = manifest_key(self.name, digest)
            raise IntegrityError(f"{key} does not exist in {self.store.uri}; {REPAIR}.")
        return manifest


def opened_ledger(dataset: Dataset) -> AbstractContextManager[PublishedLedger]:
    return Snapshots(dataset.store, dataset.manifest.name).ledger(dataset.manifest)


def parts_prefix(name: str) -> str:
    return f"{DATASETS}{name}/parts/"


def parts_folder(name: str, parent: str | None) -> str:
    return f"{parts_prefix(name)}{parent or 'first'}/"


def _ledger_of(manifest: Manifest) -> tuple[str, ...]:
    """The sha256 of the complete ledger, then of later changes."""
    return manifest.ledger_sha256, *manifest.ledger_changes


def split_digests(dataset: Dataset, split: Split) -> Iterator[NDArray[np.uint8]]:
    """The digests (N, 32) of a split. Those of a lost shard come from the ledger."""
    for shard in dataset.shards(split):
        try:
            digests = [block.digests for block in dataset.shard_blocks(shard)]
        except IntegrityError as lost:
            digests = [_ledger_digests(dataset, shard, lost)]
        yield from digests


def _ledger_digests(dataset: Dataset, shard: Shard, lost: IntegrityError) -> NDArray[np.uint8]:
    with ExitStack() as stack:
        try:
            ledger = stack.enter_context(opened_ledger(dataset))
        except IntegrityError:
            raise lost from None
        return np.frombuffer(b"".join(ledger.shard_digests(shard.sha256)), np.uint8).reshape(-1, 32)


def gone_names(snapshots: Snapshots, lost: Iterable[str], settings: DataSettings, moved: bool) -> list[str]:
    """One file name of each image in lost shards of the newest snapshot that the source no longer
    lists: ``settings.source`` if it has ``moved``, and otherwise the sources in the ledger."""
    files: set[tuple[str, str, bytes]] = set()
    if (head := snapshots.head()) is not None:
        with snapshots.ledger(head) as ledger:
            files = {file for sha256 in lost for file in ledger.shard_files(sha256)}
    present: set[bytes] = set()
    for uri in sorted({uri for uri, *_ in files}):
        of_name = {name: digest for source, name, digest in files if source == uri}
        entries = open_source(settings.source if moved else uri, settings).entries()
        present |= {of_name[entry.name] for entry in entries if entry.name in of_name}
    return sorted({digest: name for _, name, digest in files if digest not in present}.values())


def lost_names(snapshots: Snapshots, sha256: str) -> list[str]:
    """One file name of each image in a lost shard for which no newer image stands in."""
    head = snapshots.head()
    holders = (m for _, m in snapshots.manifests() if any(shard.sha256 == sha256 for shard in m.shards))
    if head is None or (holder := next(holders, None)) is None:
        raise IntegrityError("No intact snapshot names it.")
    with snapshots.ledger(holder) as earlier, snapshots.ledger(head) as newest:
        names = {digest: name for _, name, digest in sorted(earlier.shard_files(sha256), reverse=True)}
        return sorted(names[digest] for digest in names.keys() - newest.image_labels([*names]).keys())


def drop_shards(snapshots: Snapshots, lost: Iterable[str]) -> Manifest:
    """Publish a copy of the newest snapshot from which the shards in ``lost`` are removed. The next
    ingest reads the images of these shards again, and puts them into the same splits."""
    head, lost = snapshots.head(), set(lost)
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    with TemporaryDirectory(prefix="evernear-repair-") as scratch:
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
    """Replace the newest snapshot's ledger with the splits of the images in its shards. The next
    ingest reads all images again, and puts them into the same splits."""
    head = snapshots.head()
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    dataset = Dataset(head, snapshots.store)
    with (
        TemporaryDirectory(prefix="evernear-repair-") as scratch,
        closing(Ledger(Path(scratch) / "ledger.sqlite", head.source)) as ledger,
    ):
        ledger.add_labels(head.labels)
        for shard in head.shards:
            for block in dataset.shard_blocks(shard):
                ledger.remember_splits((digest.tobytes() for digest in block.digests), shard.split)
        snapshots.publish(head, ledger, Path(scratch))
