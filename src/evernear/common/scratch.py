"""Private directories in ``/tmp`` with predictable names, so that other processes find them."""

import hashlib
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.common.disk import disk_errors
from evernear.errors import StoreError


def scratch_name(owner: Path) -> str:
    """A short name for ``owner`` and this user, because socket paths have a limited length."""
    return "evernear-" + hashlib.sha256(f"{os.geteuid()}:".encode() + os.fsencode(owner)).hexdigest()[:12]


def make_private(directory: Path) -> None:
    """Create ``directory`` as an empty directory that only this user can access.

    An earlier one of this user is removed. Another user may have created one or a link under this
    predictable name, which raises `StoreError`.
    """
    remove_own(directory)
    with disk_errors(directory):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            raise StoreError(f"{directory} is not a directory of this user; remove it and run again.") from None


def remove_own(directory: Path) -> None:
    try:
        status = directory.lstat()
    except OSError:
        return
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def scratch(directory: Path) -> Generator[Path]:
    make_private(directory)
    try:
        yield directory
    finally:
        remove_own(directory)
