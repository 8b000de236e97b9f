"""The groups of a snapshot's images, for an export."""

import sqlite3
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from evernear.common.disk import disk_errors
from evernear.data.group_table import SCHEMA, groups_of
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sqlite import sqlite_errors


class SnapshotGroups:
    """The groups of a snapshot's images. They are copied from the snapshot's ledger to
    a private temporary file, so that memory use does not grow with their number.
    """

    def __init__(self, dataset: Dataset) -> None:
        """Read the ledger of ``dataset``.

        Raises:
            IntegrityError, StoreError: the ledger is missing or damaged.
        """
        with sqlite_errors():
            self._db = sqlite3.connect("", isolation_level=None)  # a private temporary file
            self._db.execute(SCHEMA)
        weakref.finalize(self, self._db.close)
        with (
            disk_errors(tempfile.gettempdir()),
            tempfile.TemporaryDirectory(prefix="evernear-groups-") as scratch,
            sqlite_errors(),
        ):
            path = Path(scratch, "ledger.sqlite")
            Snapshots(dataset.store, dataset.manifest.name).fetch_ledger(dataset.manifest, path)
            self._db.execute("ATTACH ? AS ledger", (str(path),))
            self._db.execute("INSERT INTO groups SELECT digest, name FROM ledger.groups")
            self._db.execute("DETACH ledger")

    def of(self, digests: Sequence[bytes]) -> list[str]:
        """The group of each image. An image without a group has an empty string."""
        found = groups_of(self._db, digests)
        return [found.get(digest, "") for digest in digests]
