"""Locks of the working directory and of a store in a directory."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from evernear.common.disk import file_lock
from evernear.common.store import open_store
from evernear.errors import BusyError, StoreError


def test_second_lock_says_who_is_first(tmp_path: Path) -> None:
    busy = "Another run uses it."
    with (
        file_lock(tmp_path / "lock", 0),
        pytest.raises(BusyError, match=busy),
        file_lock(tmp_path / "lock", 0, lambda: busy),
    ):
        pass
    with file_lock(tmp_path / "lock", 0):
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Lustre, NFS without its lock daemon, and file systems of user processes."""

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    store = open_store((tmp_path / "store").as_uri())
    with pytest.raises(StoreError, match=r"/store/\.staging is on a disk without file locks \(.*\); choose"):
        store.put("a", b"a")
    with pytest.raises(StoreError, match="on a disk without file locks"), file_lock(tmp_path / "run.lock", 0):
        pass
    assert [*store.list("")] == []
