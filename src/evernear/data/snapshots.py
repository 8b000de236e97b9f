"""The snapshots of a dataset in the store, and the pointer to the newest one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from evernear.common.frozen import Document
from evernear.common.store import Store
from evernear.data.manifest import REPAIR, Manifest, find_manifest, manifest_key
from evernear.data.tables import TABLES, table_key
from evernear.errors import ConflictError, IntegrityError

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

    def head(self) -> Manifest | None:
        stored = self.store.find(self._head_key)
        if stored is None:
            self._require_no_later_snapshot()
            return None
        data, self._head_etag = stored
        head = DatasetHead.from_json(data, f"{self.store.uri}/{self._head_key}")
        self._interrupts = head.interrupts
        return self._manifest(head.digest)

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

    def publish(self, manifest: Manifest) -> Manifest:
        """Make ``manifest``, whose tables and shards are in the store, the newest snapshot.

        The images of a snapshot never change, but its tables follow the source. For example, a file
        may be renamed, or may be read again because its times changed. If the tables were not
        updated, each later run and the watcher would treat such a file as new.
        """
        key = manifest_key(self.name, manifest.digest)
        stored = self.store.find(key)
        with suppress(IntegrityError):  # a damaged manifest is written again
            if stored is not None:
                known = Manifest.from_store(stored[0], self.store, key)
                kept = {"created": known.created, "parent": known.parent}
                if known.source.rstrip("/") == manifest.source.rstrip("/"):
                    kept["source"] = known.source
                manifest = manifest.model_copy(update=kept)
                if manifest == known and self._is_head(known.digest):
                    return known
        try:
            self.store.put_if(key, manifest.to_store(), stored[1] if stored else None)
        except ConflictError:  # a different ingest of the same images
            manifest = self._manifest(manifest.digest)
        # The number of interrupts is kept, so that the head never returns to a state from before an
        # interrupt.
        self._move_head(DatasetHead(digest=manifest.digest, interrupts=self._interrupts))
        return manifest

    def interrupt_ingests(self) -> None:
        """Make an ingest that is in progress fail, so that the next ingest starts over."""
        data, etag = self.store.find(self._head_key) or (b"", None)
        head = DatasetHead.from_json(data, f"{self.store.uri}/{self._head_key}")
        self.store.put_if(
            self._head_key, DatasetHead(digest=head.digest, interrupts=head.interrupts + 1).to_json(), etag
        )
        self.delete_parts()

    def compact_tables(self, manifests: Iterable[Manifest]) -> None:
        """Leave the removed images out of the tables of ``manifests``, and delete all other
        tables."""
        needed: set[str] = set()
        for manifest in manifests:
            tables = {table: partitions for table, partitions in manifest.tables.items() if table != "removed"}
            compacted = manifest.model_copy(update={"tables": tables})
            self.store.put(manifest_key(self.name, manifest.digest), compacted.to_store())
            needed.update(
                table_key(self.name, table, partition.sha256)
                for table, partitions in tables.items()
                for partition in partitions
            )
        for table in TABLES:
            for info in self.store.list(f"{DATASETS}{self.name}/{table}/"):
                if info.key not in needed:
                    self.store.delete(info.key)

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


def parts_prefix(name: str) -> str:
    return f"{DATASETS}{name}/parts/"


def parts_folder(name: str, parent: str | None) -> str:
    return f"{parts_prefix(name)}{parent or 'first'}/"
