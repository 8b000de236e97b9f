"""The Milvus alias that follows the champion, for readers other than evernear."""

from evernear.common.store import Store
from evernear.errors import EvernearError, IntegrityError, StoreError, TransientStoreError
from evernear.index.description import Collection
from evernear.integrations.milvus import client as milvus_client
from evernear.release.registry import Registry


def follow_alias(store: Store, before: str | None) -> list[str]:
    """After the champion moved from ``before``, point the alias at the new collection. Idempotent.
    evernear itself does not use the alias, so a failure is only a warning."""
    try:
        _point_alias(Registry(store), before)
    except EvernearError as error:
        return [f"The alias in Milvus does not follow the champion yet: {error} The next run sets it."]
    return []


def _point_alias(registry: Registry, before: str | None) -> None:
    """Point the alias at the champion's collection, if it has one. If the collection of ``before``
    has a different alias, that one is removed. One that points at another store's collection is not
    changed, because this store may be a copy."""
    while True:
        champion = registry.champion()
        collection = _collection(registry, champion and champion.version)
        left = _collection(registry, before)
        if (
            left is not None
            and registry.owns(left.name)
            and (collection is None or (left.uri, left.alias) != (collection.uri, collection.alias))
        ):
            milvus_client.drop_alias(left)
        if collection is not None:
            _require_own_alias(registry, collection)
            milvus_client.point_alias(collection)
        if registry.champion() == champion:  # of two concurrent promotions, the later one wins
            return


def _require_own_alias(registry: Registry, collection: Collection) -> None:
    client = milvus_client.connect(collection.uri)
    with milvus_client.milvus_errors(collection.uri):
        target = milvus_client.alias_target(client, collection)
    if target is not None and target != collection.name and not registry.owns(target):
        raise StoreError(
            f"{collection.alias} points at {target}, which belongs to another store, or to this one before it moved; "
            "in the latter case, delete the alias in Milvus."
        )


def _collection(registry: Registry, version: str | None) -> Collection | None:
    """A release's collection, or None if it has none or the release record is lost."""
    if version is None:
        return None
    try:
        return registry.get(version, include_pruned=True).manifest.collection
    except TransientStoreError:
        raise
    except (IntegrityError, StoreError):
        return None
