"""Private directories in ``/tmp`` with predictable names, so that other processes can locate
them."""

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
    """The directory name for ``owner`` and this user. The name is short, because socket paths have
    a limited length."""
    return "evernear-" + hashlib.sha256(f"{os.geteuid()}:".encode() + os.fsencode(owner)).hexdigest()[:12]


def make_private(directory: Path) -> None:
    """Create ``directory`` as an empty directory that only this user can access.

    An earlier directory that belongs to this user is removed. The name is predictable, so a
    different user may already have created a directory or link with this name. A path that belongs
    to a different user is not used.

    Raises:
        StoreError: the path exists and cannot be removed,
            or the directory cannot be created.
    """
    remove_own(directory)
    with disk_errors(directory):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            raise StoreError(f"{directory} is not a directory of this user; remove it and run again.") from None


def remove_own(directory: Path) -> None:
    """Remove ``directory`` recursively if it belongs to this user."""
    try:
        status = directory.lstat()
    except OSError:
        return
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def scratch(directory: Path) -> Generator[Path]:
    """Create ``directory`` with `make_private`, and remove it at the end of the context.

    Raises:
        StoreError: as in `make_private`.
    """
    make_private(directory)
    try:
        yield directory
    finally:
        remove_own(directory)
