"""An identifier that marks a store's objects elsewhere, such as Milvus collections."""

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
    remedy = "delete it, so that the store gets another one"

    id: str = Field(pattern=r"^[0-9a-f]{32}$")


def owner_of(store: Store) -> str:
    """12 hexadecimal digits for this store at this location.

    A copied store has the original's id, but must not delete what the original needs. A copy cannot
    be distinguished from a moved store, so the digits also depend on the location.
    """
    stored = store.find(IDENTITY)
    if stored is None:
        with suppress(ConflictError):  # a different process was first
            store.put_if(IDENTITY, StoreIdentity(id=secrets.token_hex(16)).to_json(), None)
        identity = store.get(IDENTITY)
    else:
        identity = stored[0]
    own = StoreIdentity.from_json(identity, f"{store.uri}/{IDENTITY}").id
    return sha256_bytes(f"{own} {store.uri}".encode())[:_OWNER_DIGITS]
