"""Directories of one user alone, among everybody's in ``/tmp``, under a name that other processes find again."""

import hashlib
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.disk import disk_errors
from evernear.errors import StoreError


def scratch_name(owner: Path) -> str:
    """A name that belongs to ``owner`` and this user; short, as paths of sockets must be."""
    return "evernear-" + hashlib.sha256(f"{os.geteuid()}:".encode() + os.fsencode(owner)).hexdigest()[:12]


def make_private(directory: Path) -> None:
    """Make ``directory``, new and for this user alone; what was left there before goes.

    Whoever knows the name can have made it first, with their files in it or as a link to another place: such a one is
    not used.

    Raises:
        StoreError: something is there that cannot be removed, or the directory cannot be made.
    """
    remove_own(directory)
    with disk_errors(directory):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            raise StoreError(f"{directory} is not a directory of this user; remove it and run again.") from None


def remove_own(directory: Path) -> None:
    """Remove ``directory`` with all that is in it, if it is one and this user's."""
    try:
        found = directory.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def scratch(directory: Path) -> Generator[Path]:
    """``directory``, as `make_private` makes it, and gone afterwards.

    Raises:
        StoreError: as `make_private`.
    """
    make_private(directory)
    try:
        yield directory
    finally:
        remove_own(directory)
