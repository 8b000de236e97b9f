"""The releases of a registry, each read only once."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TypeVar

from evernear.common.store import open_store
from evernear.errors import ServingError
from evernear.release.archive_reader import SmokeQuery
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving.release_source import ReleaseSource

CACHE_SIZE = 8  # a rollout and its rollback need two
Value = TypeVar("Value")


class Releases:
    """All methods can raise `StoreError` and `IntegrityError`."""

    def __init__(self, store_uri: str) -> None:
        self._store_uri = store_uri
        self._registry = Registry(open_store(store_uri))
        self.manifest = _cached(lambda version: self._registry.get(version).manifest)
        self.test_query = _cached(self._read_test_query)
        """An image that is stored in a release, and its expected prediction. The first call for a
        version downloads the whole archive."""

    async def champion(self) -> ReleaseManifest:
        """The manifest of the champion.

        Raises:
            ServingError: no release has been promoted yet.
        """
        champion = await asyncio.to_thread(self._registry.champion)
        if champion is None:
            raise ServingError("No release has been promoted yet; `evernear registry list` shows the releases.")
        return await self.manifest(champion.version)

    def _read_test_query(self, version: str) -> tuple[bytes, SmokeQuery]:
        with ReleaseSource(self._store_uri, version).unpacked() as release:
            queries = release.smoke_queries()
        if not queries:
            raise ServingError(f"Release {version} has no stored query.")
        return queries[0]


def _cached(read: Callable[[str], Value]) -> Callable[[str], Awaitable[Value]]:
    """Run ``read`` in a thread, once per version, even if requests need it concurrently."""
    lock, cached = asyncio.Lock(), lru_cache(CACHE_SIZE)(read)

    async def get(version: str) -> Value:
        async with lock:
            return await asyncio.to_thread(cached, version)

    return get
