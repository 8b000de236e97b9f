"""The identity of a store, for what belongs to it elsewhere, such as collections in Milvus."""

import secrets
from contextlib import suppress

from pydantic import Field

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.common.store.base import Store
from evernear.errors import ConflictError

IDENTITY = "store.json"
_OWNER_DIGITS = 12


class StoreIdentity(Frozen):
    """The object at `IDENTITY`, created once."""

    remedy = "delete it, so that the store gets another one"

    id: str = Field(pattern=r"^[0-9a-f]{32}$")


def owner_of(store: Store) -> str:
    """12 hexadecimal digits for this store at this place.

    A copied store has the same id, but must not delete what the original needs. It cannot be distinguished from a moved
    one, so the place counts as well.

    Raises:
        IntegrityError: the id is damaged.
    """
    stored = store.find(IDENTITY)
    if stored is None:
        with suppress(ConflictError):  # another process was first
            store.put_if(IDENTITY, StoreIdentity(id=secrets.token_hex(16)).to_json(), None)
        identity = store.get(IDENTITY)
    else:
        identity = stored[0]
    own = StoreIdentity.from_json(identity, f"{store.uri}/{IDENTITY}").id
    return sha256_bytes(f"{own} {store.uri}".encode())[:_OWNER_DIGITS]
