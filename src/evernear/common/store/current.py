"""Refuse a store of another version of evernear before anything in it is read or written."""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice

from evernear.common.frozen import require_format
from evernear.common.store import Store, open_store
from evernear.common.store.base import IDENTITY
from evernear.errors import IntegrityError, StoreError, TransientStoreError


def current_store(uri: str) -> Store:
    """Open the store of a working directory or of a pipeline, like `open_store`.

    This compares only the documents that lead to all others: the store's identity, the champion
    with its record, and each dataset's newest snapshot, or before the first of them, a record of a
    run. Whoever reads another document compares it as well. What the keys of this process may not
    read, it cannot misunderstand.

    Raises:
        FormatError: another version of evernear wrote the store.
    """
    store = open_store(uri)
    _compare(store, IDENTITY)
    is_used = _compare(store, "releases/champion.json", "version", "releases/manifests/{}.json")
    with _unless_denied():
        for name in store.children("datasets"):
            if name.endswith("/"):
                is_used |= _compare(store, f"datasets/{name}head.json", "digest", f"datasets/{name}manifests/{{}}.json")
        for info in islice(store.list("runs/"), 0 if is_used else 1):
            _compare(store, info.key)
    return store


def writable_store(uri: str) -> Store:
    """Like `current_store`, for a writer that tries again if the store is unreachable."""
    try:
        return current_store(uri)
    except TransientStoreError:
        return open_store(uri)


@contextmanager
def _unless_denied() -> Generator[None]:
    try:
        yield
    except StoreError as error:
        if not error.is_denied:
            raise


def _compare(store: Store, key: str, field: str = "", named: str = "") -> bool:
    """Compare a document and the one that its ``field`` names. Return whether it is readable,
    because damage is not this module's task."""
    fields: Mapping[str, object] = {}
    with suppress(IntegrityError), _unless_denied():
        stored = store.find(key)
        fields = require_format(stored[0], f"{store.uri}/{key}") if stored else {}
    name = str(fields.get(field, ""))
    if re.fullmatch(r"[\w.]+", name):
        _compare(store, named.format(name))
    return bool(fields)
