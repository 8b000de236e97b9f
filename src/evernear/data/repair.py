"""What is done about lost shards and tables of a snapshot, and what they contained."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from evernear.data.books import local_tables, opened_books
from evernear.data.database import Database
from evernear.data.manifest import Manifest
from evernear.data.publish import store_tables
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources import open_source
from evernear.data.tables import SCHEMAS, TABLES
from evernear.errors import IntegrityError
from evernear.settings import DataSettings

_STORED = "SELECT digest FROM images UNION SELECT digest FROM files WHERE waiting"
_FILES_OF_SHARD = """
SELECT source, name, digest FROM files JOIN images USING (digest) WHERE shard = $shard AND NOT waiting ORDER BY ALL
"""
# The images of lost shards are treated as removed, and their files as unread.
_DROP = """
CREATE TABLE dropped AS SELECT * FROM images WHERE shard IN (SELECT shard FROM lost);
CREATE VIEW files_out AS
SELECT f.* REPLACE (unread OR digest IS NOT NULL AND digest IN (SELECT digest FROM dropped) AS unread)
FROM files f;
CREATE VIEW images_out AS SELECT * FROM images ANTI JOIN lost USING (shard);
CREATE VIEW removed_out AS
SELECT * FROM removed UNION ALL SELECT digest, split, "group", reviewed FROM dropped;
CREATE VIEW notes_out AS SELECT * FROM notes;
"""
# A width of 0 is unknown.
_REBUILT = """
CREATE VIEW files_out AS SELECT * FROM no_files;
CREATE VIEW images_out AS
SELECT digest, label, split, NULL::VARCHAR AS "group", 0 AS width_px, 0 AS height_px, 0 AS flaws,
  NULL::VARCHAR AS reviewed, shard, row
FROM stored;
CREATE VIEW removed_out AS SELECT * FROM no_removed;
CREATE VIEW notes_out AS SELECT * FROM no_notes;
"""


def stored_digests(snapshots: Snapshots, manifest: Manifest) -> Iterator[bytes]:
    """The digests of all images in a snapshot, and of images that wait."""
    with opened_books(snapshots.store, manifest, ("images", "files")) as books:
        for batch in books.batches(_STORED):
            yield from batch.column(0).to_pylist()


def gone_names(snapshots: Snapshots, lost: Iterable[str], settings: DataSettings, moved: bool) -> list[str]:
    """One file name of each image in lost shards of the newest snapshot that the source no longer
    lists: ``settings.source`` if it has ``moved``, and otherwise the sources in the tables."""
    files: set[tuple[str, str, bytes]] = set()
    if (head := snapshots.head()) is not None:
        with opened_books(snapshots.store, head, ("images", "files")) as books:
            files = {file for sha256 in lost for file in books.rows(_FILES_OF_SHARD, shard=sha256)}
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
    with opened_books(snapshots.store, holder, ("images", "files")) as books:
        files = books.rows(_FILES_OF_SHARD, shard=sha256)
    names = {digest: name for _, name, digest in reversed(files)}
    with opened_books(snapshots.store, head, ("images",)) as books:
        books.create("lost", pa.schema([("digest", pa.binary())]))
        books.insert("lost", pa.table({"digest": pa.array([*names], pa.binary())}))
        newer = {digest for (digest,) in books.rows("SELECT digest FROM images SEMI JOIN lost USING (digest)")}
    return sorted(name for digest, name in names.items() if digest not in newer)


def drop_shards(snapshots: Snapshots, lost: Iterable[str]) -> Manifest:
    """Publish a copy of the newest snapshot from which the shards in ``lost`` are removed. The next
    ingest reads the images of these shards again, and puts them into the same splits."""
    head, lost = _require_head(snapshots), sorted(lost)
    with tempfile.TemporaryDirectory(prefix="evernear-repair-") as directory:
        scratch = Path(directory)
        files = local_tables(snapshots.store, head, TABLES, scratch)
        folders = {path.parent for paths in files.values() for path in paths}
        with closing(Database(scratch, sorted(folders))) as db:
            for table, paths in files.items():
                db.attach(table, paths, SCHEMAS[table])
            db.create("lost", pa.schema([("shard", pa.string())]))
            db.insert("lost", pa.table({"shard": pa.array(lost, pa.string())}))
            db.run(_DROP)
            tables = store_tables(db, snapshots.store, head, snapshots.name, scratch)
    changes = {
        "shards": tuple(shard for shard in head.shards if shard.sha256 not in lost),
        "tables": tables,
        "parent": head.digest,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return snapshots.publish(head.model_copy(update=changes))


def rebuild_tables(snapshots: Snapshots) -> None:
    """Replace the tables of the newest snapshot by what its shards say. The next ingest reads all
    images again, and leaves them in their splits."""
    head = _require_head(snapshots)
    dataset = Dataset(head, snapshots.store)
    stored = pa.schema([
        ("digest", pa.binary()), ("label", pa.string()), ("split", pa.string()), ("shard", pa.string()),
        ("row", pa.int32()),
    ])  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="evernear-repair-") as directory:
        scratch = Path(directory)
        with closing(Database(scratch)) as db:
            db.create("stored", stored)
            for shard in head.shards:
                row = 0
                for block in dataset.shard_blocks(shard):
                    count = len(block)
                    labels = [head.labels[number] for number in block.labels.tolist()]
                    digests = [digest.tobytes() for digest in block.digests]
                    rows = np.arange(row, row := row + count)
                    db.insert("stored", pa.table(
                        [digests, labels, [shard.split] * count, [shard.sha256] * count, rows.tolist()], stored
                    ))  # fmt: skip
            for table in ("files", "removed", "notes"):
                db.create(f"no_{table}", SCHEMAS[table])
            db.run(_REBUILT)
            tables = store_tables(db, snapshots.store, head, snapshots.name, scratch)
    snapshots.publish(head.model_copy(update={"tables": tables, "decoders": {}}))


def _require_head(snapshots: Snapshots) -> Manifest:
    head = snapshots.head()
    if head is None:
        raise IntegrityError(f"The dataset {snapshots.name} has no snapshot.")
    return head
