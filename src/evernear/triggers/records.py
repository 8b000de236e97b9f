"""A folder of small JSON objects in the store, each changed by compare-and-swap: what triggers must not forget."""

from collections.abc import Iterator
from typing import Annotated, Generic, TypeVar

from pydantic import Field, ValidationError

from evernear.errors import ConflictError, IntegrityError, StoreError
from evernear.frozen import Frozen
from evernear.store import Store


class Record(Frozen):
    """One of them; ``id`` names its object."""

    id: Annotated[str, Field(pattern=r"^[^/\\.][^/\\]{0,127}$")]


_Record = TypeVar("_Record", bound=Record)


class Records(Generic[_Record]):
    """The records of one kind, under ``folder``. Every method may raise `StoreError`."""

    def __init__(self, store: Store, folder: str, kind: type[_Record]) -> None:
        self._store = store
        self._folder = folder
        self._kind = kind
        self._known: dict[str, tuple[str, _Record]] = {}
        """By key, with its etag: a poll reads only what changed."""

    def add(self, record: _Record) -> None:
        """Keep a new one.

        Raises:
            ConflictError: there is one of this id already.
        """
        self._store.put_if(self._key(record.id), _json(record), None)

    def list(self) -> Iterator[_Record]:
        """All, by id.

        Raises:
            IntegrityError: one is damaged; raised after the last, so that it is in nobody's way.
        """
        damage: IntegrityError | None = None
        for found in list(self._store.list(self._folder)):
            held = self._known.get(found.key)
            try:
                if held is None or held[0] != found.etag:
                    held = self._find(found.key)
            except IntegrityError as error:
                damage = damage or error
                continue
            if held is not None:
                yield held[1]
        if damage is not None:
            raise damage

    def find(self, record_id: str) -> _Record | None:
        """The one of this id, if there is one."""
        held = self._find(self._key(record_id))
        return held[1] if held else None

    def change(self, record: _Record, **fields: object) -> _Record:
        """``record`` with other fields, if nobody changed it since it was read.

        Raises:
            ConflictError: somebody did; read it again.
        """
        key = self._key(record.id)
        held = self._find(key)
        if held is None or held[1] != record:
            raise ConflictError(f"{key} in {self._store.uri} was changed meanwhile; look at it and try again.")
        changed = self._kind.model_validate(record.model_dump() | fields)
        self._known[key] = (self._store.put_if(key, _json(changed), held[0]), changed)
        return changed

    def remove(self, record: _Record) -> None:
        """Forget it; one that is gone already is no error."""
        self._store.delete(self._key(record.id))
        self._known.pop(self._key(record.id), None)

    def missing(self, record_id: str) -> StoreError:
        """The error of who has to have it."""
        return StoreError(f"There is no {self._key(record_id)} in {self._store.uri}.")

    def _find(self, key: str) -> tuple[str, _Record] | None:
        found = self._store.find(key)
        if found is None:
            return None
        try:
            held = (found[1], self._kind.model_validate_json(found[0]))
        except ValidationError:
            raise IntegrityError(f"{key} in {self._store.uri} is damaged.") from None
        self._known[key] = held
        return held

    def _key(self, record_id: str) -> str:
        return f"{self._folder}{record_id}.json"


def _json(record: Record) -> bytes:
    return record.model_dump_json(indent=2).encode()
