"""Remove old releases from a registry. A prune first writes the versions into the champion pointer,
then removes the releases, and finally removes the versions from the pointer (see
`evernear.release.promotions.Pointer`)."""

import gzip
import logging
from collections.abc import Collection
from contextlib import suppress

from evernear.common.store import Store
from evernear.errors import ConflictError, IntegrityError, StoreError
from evernear.index.description import Collection as VectorCollection
from evernear.release.promotions import Cause, Champion
from evernear.release.records import ARCHIVES, MANIFESTS, PRUNED, Record, record_key
from evernear.release.registry import Registry

_log = logging.getLogger(__name__)


def prune_releases(registry: Registry, keep: int) -> tuple[str, ...]:
    """Remove the releases that `surplus_releases` lists, and return their versions.

    Their records remain available to `Registry.get` with ``include_pruned``. Milvus collections
    that no remaining release uses are deleted. If the champion changed in the meantime
    (`ConflictError`), nothing was removed. After a `StoreError`, repeat the call.
    """
    champion = registry.champion()
    return _prune(registry, _surplus(registry, keep, champion), champion) if champion else ()


def surplus_releases(registry: Registry, keep: int) -> tuple[str, ...]:
    """The versions that `prune_releases` would remove: all but the newest ``keep`` releases. The
    champion, its parent, its rollback target, the anchor, and releases with damaged records are
    never removed. Without a champion, no release is."""
    champion = registry.champion()
    if champion is None:
        return ()
    return tuple(sorted({*_surplus(registry, keep, champion), *champion.pointer.pruning}))


def remove_releases(registry: Registry, versions: Collection[str]) -> tuple[str, ...]:
    """Remove releases, and return their versions. Rollback targets can be removed, but the champion
    cannot. If one of the releases is the anchor, the champion becomes the anchor. Raises the errors
    of `prune_releases`."""
    champion = registry.champion()
    if not versions:
        return ()
    if champion is None:
        raise StoreError(f"Releases are removed only while another one is live. {registry.explain_no_champion()}")
    if champion.version in versions:
        raise ConflictError(f"Release {champion.version} is the champion; promote another one first.")
    if champion.anchor in versions:
        cause = Cause.of_this_process(f"The anchor {champion.anchor} was removed.")
        champion = registry.set_anchor(champion.version, champion, cause)
    return _prune(registry, versions, champion)


def _surplus(registry: Registry, keep: int, champion: Champion) -> tuple[str, ...]:
    records, faults = registry.records()
    versions = [*records]
    parent = registry.get(champion.version).manifest.parent
    retained = {champion.version, champion.previous, champion.anchor, parent, *faults}
    retained.update(versions[max(0, len(versions) - keep) :])
    return tuple(version for version in versions if version not in retained)


def _prune(registry: Registry, versions: Collection[str], champion: Champion) -> tuple[str, ...]:
    pruning = {version: registry.get(version).archive_sha256 for version in versions}
    pruning |= champion.pointer.pruning  # left by a killed prune
    if not pruning:
        return ()
    champion = registry.pointer.replace(champion.pointer.model_copy(update={"pruning": pruning}), champion)
    records, faults = registry.records()
    remaining = [record for version, record in records.items() if version not in pruning]
    archives = {record.archive_sha256 for record in remaining}
    for version, archive_sha256 in pruning.items():
        if not faults:  # a release whose record is damaged may use the same collection
            _drop_collection(registry, version, remaining)
        _remove(registry.store, version, archive_sha256 if archive_sha256 not in archives else None)
    # `prunes` keeps the pointer from returning to earlier content, and so to an earlier etag
    changes: dict[str, object] = {"pruning": {}, "prunes": champion.pointer.prunes + 1}
    with suppress(ConflictError):  # a concurrent promotion copied the list; the next prune then removes nothing
        registry.pointer.replace(champion.pointer.model_copy(update=changes), champion)
    return tuple(sorted(pruning))


def _drop_collection(registry: Registry, version: str, remaining: Collection[Record]) -> None:
    """Delete the collection of a release, unless a remaining release uses it."""
    with suppress(IntegrityError):  # its record was damaged after a prune was killed
        collection = registry.get(version, include_pruned=True).manifest.collection
        if collection is not None and collection not in [record.manifest.collection for record in remaining]:
            _drop(registry, collection)


def _drop(registry: Registry, collection: VectorCollection) -> None:
    """Delete a collection, unless it may belong to the store from which this one was copied or
    moved."""
    if registry.owns(collection.name):
        from evernear.index.vectors import index_backend  # needs NumPy, which most commands do without

        with index_backend(collection.backend) as backend:
            backend.drop(collection)
    else:
        _log.warning(
            "The collection %s in %s is left, because the store was copied or moved since it was filled; drop it "
            "there if no other store needs it.",
            collection.name,
            collection.backend,
        )


def _remove(store: Store, version: str, archive_sha256: str | None) -> None:
    """Remove a release and, if ``archive_sha256`` is not None, its archive. If killed, the removal
    can be repeated."""
    entry = store.find(record_key(MANIFESTS, version))
    if entry is not None:
        # compressed, because every pruned release leaves a record
        store.put(record_key(PRUNED, version), gzip.compress(entry[0], mtime=0))
    store.delete(record_key(MANIFESTS, version))
    if archive_sha256 is not None:
        store.delete(f"{ARCHIVES}{archive_sha256}.mar")
