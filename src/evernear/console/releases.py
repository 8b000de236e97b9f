"""The releases and the promotion history that the console lists. Immutable objects are read
once."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from evernear.common.store import Store
from evernear.console.reading import read_all
from evernear.errors import IntegrityError, MissingObjectError
from evernear.release.promotions import Champion, Promotion
from evernear.release.records import Record
from evernear.release.registry import Registry

PAGE_RELEASES = 25
"""Maximum number of releases on a page, and maximum number of promotions on a page."""
_RECORDS = 64
_PROMOTIONS = 10_000


class Releases:
    """The releases of one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._registry = Registry(store)
        self.champion = self._registry.champion
        self.record = lru_cache(_RECORDS)(self._record)
        self._promotion = lru_cache(_PROMOTIONS)(self._registry.pointer.find_in_history)

    def newest(self) -> tuple[list[Record], list[str]]:
        """The most recent releases, newest first, and an error message for each damaged release
        record."""
        versions = islice(reversed([*self._registry.list()]), PAGE_RELEASES)
        found = list(read_all(self._record_or_fault, list(versions)))
        return [each for each in found if isinstance(each, Record)], [each for each in found if isinstance(each, str)]

    def history(self, champion: Champion) -> Sequence[Promotion]:
        """All readable promotions and rollbacks, newest first."""
        earlier = read_all(self._promotion, range(champion.promotion.number - 1, 0, -1))
        return [champion.promotion, *(promotion for promotion in earlier if promotion is not None)]

    def find(self, version: str) -> Record | None:
        """The record of a release or pruned release, or None if the store has no such record.

        Raises:
            IntegrityError: the record is damaged.
        """
        try:
            return self.record(version)
        except MissingObjectError:
            return None

    def _record(self, version: str) -> Record:
        record = self._registry.find(version)
        if record is None:  # an exception is not cached
            raise MissingObjectError(f"Release {version} does not exist in {self._registry.uri}.")
        return record

    def _record_or_fault(self, version: str) -> Record | str:
        try:
            return self.record(version)
        except IntegrityError as error:
            return str(error)
