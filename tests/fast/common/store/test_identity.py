"""The identity of a store."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.common.store.base import IDENTITY, owner_of
from evernear.errors import IntegrityError


def test_identity_is_created_once_and_differs_in_a_copy(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    with ThreadPoolExecutor(4) as pool:
        (own,) = set(pool.map(lambda _: owner_of(open_store(uri)), range(4)))
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    copy = open_store((tmp_path / "copy").as_uri())
    assert copy.get(IDENTITY) == open_store(uri).get(IDENTITY)
    assert owner_of(copy) != own == owner_of(open_store(uri))
    other = open_store((tmp_path / "other").as_uri())
    assert owner_of(other) not in (own, owner_of(copy))


def test_damaged_identity_names_the_remedy(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put(IDENTITY, b"")
    with pytest.raises(IntegrityError, match="delete it, so that the store gets another one"):
        owner_of(store)
