"""The alias in Milvus that follows the champion, for readers other than evernear."""

import logging

from evernear.errors import EvernearError
from evernear.index import milvus_client
from evernear.index.description import Collection
from evernear.release.registry import Champion, Registry

_log = logging.getLogger(__name__)


def follow_alias(registry: Registry, before: Champion | None) -> None:
    """Point the alias at the champion's collection, after the champion moved from ``before``.

    The release is live already and does not use the alias, so a failure is a warning. Repeating it changes nothing.
    """
    try:
        point_alias(registry, before)
    except EvernearError as error:
        _log.warning("The alias in Milvus does not follow the champion yet: %s Run `evernear registry alias`.", error)


def point_alias(registry: Registry, before: Champion | None = None) -> Collection | None:
    """Point the alias at the champion's collection, and return that; None if its vectors are in its archive.

    The alias of ``before`` is removed if it is another one.

    Raises:
        StoreError: the registry or Milvus cannot be reached or rejects the request.
        SettingsError: pymilvus is not installed, or the token cannot be used.
    """
    while True:
        champion = registry.champion()
        collection = _collection(registry, champion)
        left = _collection(registry, before)
        if left is not None and (collection is None or (left.uri, left.alias) != (collection.uri, collection.alias)):
            milvus_client.drop_alias(left)
        if collection is not None:
            milvus_client.point_alias(collection)
        if registry.champion() == champion:  # of two concurrent promotions, the later one wins
            return collection


def _collection(registry: Registry, champion: Champion | None) -> Collection | None:
    return registry.get(champion.version, include_pruned=True).manifest.collection if champion else None
