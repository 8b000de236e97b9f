"""The snapshots of a dataset in the store, and the pointer to the newest snapshot."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from evernear.common.disk import sha256_file
from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.data.ledger import Ledger
from evernear.data.manifest import REPAIR, Manifest, fetch_object, find_manifest, ledger_key, manifest_key
from evernear.data.stored_ledger import apply_changes, compress, expand, save_compact, stored_digests
from evernear.errors import ConflictError, IntegrityError

# The complete ledger is stored again after this many sets of changes, or when the total size of the
# changes exceeds this fraction of the ledger's size.
_MAX_CHANGES = 20
_MAX_CHANGED_FRACTION = 0.25


DATASETS = "datasets/"


class DatasetHead(Frozen):
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
        """Copy the ledger of a snapshot to ``path``. `publish` can then store only the changes to
        the ledger."""
        self._ledger, self._changes_bytes = _ledger_of(manifest), 0
        self._fetch(manifest.ledger_sha256, path)
        for sha256 in manifest.ledger_changes:
            changes = path.with_suffix(".changes")
            self._fetch_changes(sha256, changes)
            self._changes_bytes += changes.stat().st_size
            apply_changes(path, changes)
            changes.unlink()

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
        """The folder for the parts of ingests that start from the snapshot ``parent``. It ends with
        a slash."""
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
        """The digests of all images in one snapshot, and of images that wait for more of their
        class."""
        with TemporaryDirectory(prefix="evernear-ledger-") as scratch:
            path = Path(scratch) / "ledger.sqlite"
            self.fetch_ledger(manifest, path)
            return stored_digests(path)

    def interrupt_ingests(self) -> None:
        """Make an ingest that is in progress fail, so that the next ingest starts over."""
        data, etag = self.store.find(self._head_key) or (b"", None)
        head = DatasetHead.from_json(data, f"{self.store.uri}/{self._head_key}")
        self.store.put_if(
            self._head_key, DatasetHead(digest=head.digest, interrupts=head.interrupts + 1).to_json(), etag
        )
        self.delete_parts()

    def compact_ledgers(self, manifests: Iterable[Manifest]) -> None:
        """For each of ``manifests``, store a new ledger without data about removed images. Delete
        all other ledgers."""
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
        fetch_object(self.store, ledger_key(self.name, sha256), path, sha256)

    def _fetch_changes(self, sha256: str, path: Path) -> None:
        self._fetch(sha256, path)
        expand(path)

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
        """Check that a lost head is harmless. The only harmless case is a first ingest that was
        killed, which leaves a snapshot without a head."""
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


def parts_prefix(name: str) -> str:
    return f"{DATASETS}{name}/parts/"


def parts_folder(name: str, parent: str | None) -> str:
    return f"{parts_prefix(name)}{parent or 'first'}/"


def _ledger_of(manifest: Manifest) -> tuple[str, ...]:
    """The sha256 of each file in which a snapshot's ledger is stored: the complete ledger, then
    later changes."""
    return manifest.ledger_sha256, *manifest.ledger_changes
