"""List the objects that a store's newest snapshots, unfinished ingests and published releases need.

The roots are ``store.json``, ``datasets/<name>/head.json``, ``datasets/<name>/parts/``,
``releases/manifests/``, ``releases/champion.json`` and the champion's history. A release needs its
archive, the snapshot that it was built from, and the snapshot that its network was trained on. A
snapshot needs its manifest, its tables and its shards.

`references` only reads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import PurePosixPath
from typing import TypeVar

from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.common.store.base import IDENTITY
from evernear.data.manifest import Manifest, find_manifest, manifest_key
from evernear.data.snapshots import DATASETS, DatasetHead, Snapshots, parts_folder
from evernear.data.tables import table_key
from evernear.data.writer import shard_key
from evernear.errors import IntegrityError
from evernear.release.promotions import CHAMPION, HISTORY, Promotion
from evernear.release.records import MANIFESTS, PRUNED, Record
from evernear.release.registry import Registry

RESUMABLE = timedelta(days=7)
"""Maximum age of parts and checkpoints from which an interrupted step or training can resume."""
NEWEST = "the newest snapshot of"
"""Prefix of the owner's name for a newest snapshot. The dataset's name follows."""
_Document = TypeVar("_Document", bound=Frozen)


@dataclass(frozen=True)
class Reference:
    """``sha256`` is None for a JSON document."""

    key: str
    owner: str
    """Such as "release 20261120.162250.af2fb66c" or "the newest snapshot of birds"."""
    sha256: str | None = None


@dataclass(frozen=True)
class Unreadable:
    """A missing or damaged document, whose references are unknown."""

    key: str
    owner: str
    reason: str


def references(store: Store, retired: Iterable[str] = ()) -> Iterator[Reference | Unreadable]:
    """Yield the objects that the store's roots need, as if the releases in ``retired`` were pruned.
    An object that several owners need is yielded once for each owner."""
    if store.find(IDENTITY) is not None:
        yield Reference(IDENTITY, "the store")
    for name in datasets(store):
        yield from _of_dataset(store, name)
    yield from _of_releases(store, frozenset(retired))


def datasets(store: Store) -> list[str]:
    return sorted({info.key.split("/")[1] for info in store.list(DATASETS)})


def snapshot_references(store: Store, name: str, digest: str, owner: str) -> Iterator[Reference | Unreadable]:
    key = manifest_key(name, digest)
    try:
        manifest = find_manifest(store, name, digest)
    except IntegrityError as error:
        yield Unreadable(key, owner, str(error))
        return
    if manifest is None:
        yield Unreadable(key, owner, f"{key} does not exist in {store.uri}.")
        return
    yield Reference(key, owner)
    yield from _of_manifest(manifest, owner)


def _of_dataset(store: Store, name: str) -> Iterator[Reference | Unreadable]:
    owner = f"{NEWEST} {name}"
    head_key = f"{DATASETS}{name}/head.json"
    head = _read(store, head_key, DatasetHead, owner)
    if isinstance(head, Unreadable) and _is_first_ingest(store, name):
        head = None
    if isinstance(head, Unreadable):
        yield head
    elif head is not None:
        yield Reference(head_key, owner)
        yield from snapshot_references(store, name, head.digest, owner)
    if not isinstance(head, Unreadable):
        yield from _of_unfinished_ingests(store, name, head.digest if head else None)


def _of_unfinished_ingests(store: Store, name: str, parent: str | None) -> Iterator[Reference]:
    """Parts of ingests from the newest snapshot, active within `RESUMABLE`."""
    resumable = datetime.now(UTC) - RESUMABLE
    folder = parts_folder(name, parent)
    ingests = groupby(store.list(folder), key=lambda info: info.key.removeprefix(folder).partition("/")[0])
    for _, objects in ingests:
        listed = list(objects)
        if max(info.modified for info in listed) >= resumable:
            yield from (Reference(info.key, f"the unfinished ingest of {name}") for info in listed)


def _is_first_ingest(store: Store, name: str) -> bool:
    """Whether a first ingest is in progress or was killed, so there is no head."""
    if store.find(f"{DATASETS}{name}/head.json") is not None:
        return False
    has_history = any(manifest.parent for _, manifest in Snapshots(store, name).manifests())
    released = {record.manifest.dataset_name for record in Registry(store).records()[0].values()}
    return not has_history and name not in released


def _of_releases(store: Store, retired: frozenset[str]) -> Iterator[Reference | Unreadable]:
    yield from _of_champion(store)
    trained_on: dict[str, tuple[str, str]] = {}
    records = sorted(
        (PurePosixPath(info.key).stem, folder) for folder in (MANIFESTS, PRUNED) for info in store.list(folder)
    )
    for version, folder in records:
        owner, key = f"release {version}", f"{folder}{version}.json"
        record = _read(store, key, Record, owner)
        if isinstance(record, Unreadable):
            if folder == MANIFESTS and version not in retired:
                yield record
            continue
        release = record.manifest
        built_from = (release.dataset_name, release.dataset_digest)
        # The oldest release with a network was built from the network's training snapshot.
        trained = trained_on.setdefault(release.network_description_sha256, built_from)
        if folder == PRUNED or version in retired:
            continue
        yield Reference(key, owner)
        yield Reference(record.archive_key, owner, record.archive_sha256)
        for name, digest in sorted({built_from, trained}):
            yield from snapshot_references(store, name, digest, owner)


def _of_champion(store: Store) -> Iterator[Reference | Unreadable]:
    """The pointer, its history, and the records of champion, rollback target and anchor."""
    owner = "the champion"
    try:
        champion = Registry(store).champion()
    except IntegrityError as error:
        yield Unreadable(CHAMPION, owner, str(error))
        return
    if champion is None:
        return
    yield Reference(CHAMPION, owner)
    versions = {champion.previous: "the target of a rollback", champion.anchor: "the anchor", champion.version: owner}
    for version, needed_by in versions.items():
        key = f"{MANIFESTS}{version}.json"
        if version is None or (version != champion.version and store.find(f"{PRUNED}{version}.json")):
            continue
        record = _read(store, key, Record, needed_by)
        yield record if isinstance(record, Unreadable) else Reference(key, needed_by)
    for info in store.list(HISTORY):
        promotion = _read(store, info.key, Promotion, "the history of the champion")
        yield promotion if isinstance(promotion, Unreadable) else Reference(info.key, "the history of the champion")


def _of_manifest(manifest: Manifest, owner: str) -> Iterator[Reference]:
    for table, partitions in manifest.tables.items():
        for partition in partitions:
            yield Reference(table_key(manifest.name, table, partition.sha256), owner, partition.sha256)
    for shard in manifest.shards:
        yield Reference(shard_key(manifest.name, shard.sha256), owner, shard.sha256)


def _read(store: Store, key: str, model: type[_Document], owner: str) -> _Document | Unreadable:
    try:
        stored = store.find(key)
        if stored is None:
            return Unreadable(key, owner, f"{key} does not exist in {store.uri}.")
        return model.from_json(stored[0], f"{store.uri}/{key}")
    except IntegrityError as error:
        return Unreadable(key, owner, str(error))
