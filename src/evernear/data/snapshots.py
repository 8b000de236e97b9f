"""The snapshots of a dataset in the store, and the pointer to the newest one."""

from pathlib import Path

from evernear.data.ledger import Ledger
from evernear.data.manifest import Manifest, ledger_key, manifest_key
from evernear.disk import sha256_file
from evernear.errors import ConflictError, IntegrityError
from evernear.frozen import Frozen
from evernear.store import Store


class DatasetHead(Frozen):
    """The pointer to the newest snapshot."""

    digest: str


class Snapshots:
    """The snapshots of the dataset ``name``."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self._head_key = f"datasets/{name}/head.json"
        self._head_etag: str | None = None

    def head(self) -> Manifest | None:
        """The newest snapshot."""
        stored = self.store.find(self._head_key)
        if stored is None:
            return None
        data, self._head_etag = stored
        digest = DatasetHead.from_json(data, f"{self.store.uri}/{self._head_key}").digest
        manifest = self._manifest(digest)
        if manifest.digest != digest:
            raise IntegrityError(
                f"{self.store.uri}/{manifest_key(self.name, digest)} does not hold the snapshot of that digest."
            )
        return manifest

    def fetch_ledger(self, manifest: Manifest, path: Path) -> None:
        """Copy the ledger of a snapshot to ``path``."""
        self.store.fetch(ledger_key(self.name, manifest.ledger_sha256), path, manifest.ledger_sha256)

    def publish(self, manifest: Manifest, ledger: Ledger, scratch: Path) -> Manifest:
        """Make ``manifest`` the newest snapshot, unless the newest one has the same content.

        Raises:
            ConflictError: another ingest moved the head meanwhile.
        """
        if manifest.digest == manifest.parent:
            head = self.head()
            if head is not None and head.digest == manifest.digest:
                return head
        path = scratch / "published.sqlite"
        ledger.publish(path)
        manifest = manifest.model_copy(update={"ledger_sha256": sha256_file(path)})
        self.store.put(ledger_key(self.name, manifest.ledger_sha256), path)
        try:
            self.store.put_if(manifest_key(self.name, manifest.digest), manifest.to_json(), None)
        except ConflictError:  # an earlier run made the same snapshot, and a snapshot never changes
            manifest = self._manifest(manifest.digest)
        self._move_head(DatasetHead(digest=manifest.digest))
        return manifest

    def _move_head(self, head: DatasetHead) -> None:
        try:
            self.store.put_if(self._head_key, head.to_json(), self._head_etag)
        except ConflictError:
            if DatasetHead.from_json(self.store.get(self._head_key), self._head_key) != head:
                raise ConflictError(
                    f"Another ingest of the dataset {self.name!r} finished meanwhile; run again."
                ) from None

    def _manifest(self, digest: str) -> Manifest:
        key = manifest_key(self.name, digest)
        return Manifest.from_json(self.store.get(key), f"{self.store.uri}/{key}")
