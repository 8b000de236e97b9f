"""The Milvus alias that follows the champion, for readers other than evernear."""

from evernear.errors import EvernearError, IntegrityError, StoreError, TransientStoreError
from evernear.index.description import Collection
from evernear.integrations.milvus import client as milvus_client
from evernear.release.promotions import Champion
from evernear.release.registry import Registry


def follow_alias(registry: Registry, before: Champion | None) -> list[str]:
    """After the champion moved from ``before``, point the alias at the new collection. Idempotent.
    evernear itself does not use the alias, so a failure is only a warning."""
    try:
        point_alias(registry, before)
    except EvernearError as error:
        return [f"The alias in Milvus does not follow the champion yet: {error} The next run sets it."]
    return []


def point_alias(registry: Registry, before: Champion | None = None) -> Collection | None:
    """Point the alias at the champion's collection, and return it, or None without one.

    If the collection of ``before`` has a different alias, that one is removed. One that points at
    another store's collection is not changed, because this store may be a copy.

    Raises:
        StoreError: the alias is another store's, or the registry or Milvus fails.
    """
    while True:
        champion = registry.champion()
        collection = _collection(registry, champion)
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
            return collection


def _require_own_alias(registry: Registry, collection: Collection) -> None:
    client = milvus_client.connect(collection.uri)
    with milvus_client.milvus_errors(collection.uri):
        target = milvus_client.alias_target(client, collection)
    if target is not None and target != collection.name and not registry.owns(target):
        raise StoreError(
            f"{collection.alias} points at {target}, which belongs to another store, or to this one before it moved; "
            "in the latter case, delete the alias in Milvus."
        )


def _collection(registry: Registry, champion: Champion | None) -> Collection | None:
    """A champion's collection, or None if it has none or the release record is lost."""
    if champion is None:
        return None
    try:
        return registry.get(champion.version, include_pruned=True).manifest.collection
    except TransientStoreError:
        raise
    except (IntegrityError, StoreError):
        return None
