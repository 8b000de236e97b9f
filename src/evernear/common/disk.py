"""Open, hash and atomically write files."""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout

from evernear.errors import BusyError, DataError, StoreError, disk_full_message

_CACHED_FILES = 8
_SETTLED_NS = 10**9
"""Some file systems store whole seconds: after two changes in one second, the time is the same."""
Value = TypeVar("Value")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""The errors of file systems without locks, such as some of Lustre, NFS and FUSE."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Unlike `open`, does not block on a pipe without a writer.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device or a directory.
    """
    file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 - Path.open takes no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def reread(read: Callable[[Path], Value]) -> Callable[[Path], Value]:
    """Cache the content of small files that servers need for each request. ``read`` is called
    again if the file has changed. Its errors are not cached."""
    cached = lru_cache(_CACHED_FILES)(lambda path, _: read(path))

    def get(path: Path) -> Value:
        found = path.stat()
        if abs(time.time_ns() - found.st_mtime_ns) < _SETTLED_NS:
            return read(path)
        return cached(path, (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))

    return get


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # no effect on regular files


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """In constant memory."""
    with disk_errors(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Begins the file that a clone without Git LFS has in the place of a large one."""


def git_lfs_pointer(name: str) -> DataError:
    return DataError(f"{name} is a Git LFS pointer without the file's content; run `git lfs pull` in its repository.")


def require_no_pointer(path: Path, name: str) -> None:
    """Reject a Git LFS pointer, of which a decoder would say that it is damaged."""
    with disk_errors(path), path.open("rb") as file:
        if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
            raise git_lfs_pointer(name)


def missing_directory(what: str, path: Path) -> DataError:
    """The error for a ``path`` at which no directory is."""
    return DataError(f"The {what} {path} {'is a file, not a directory' if path.exists() else 'does not exist'}.")


def write_atomically(path: Path, data: bytes | str) -> None:
    """After a crash, and for concurrent readers, the file has either the old or the new content."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """A new file that replaces ``path`` if the body succeeds, and is deleted if it fails. It takes
    the mode of the file that it replaces, so a settings file of mode 0600 remains private."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path.parent, path.name) as (file, staged):
            yield file
            sync(file)
            if path.exists() and path.stat().st_mode != staged.stat().st_mode:
                staged.chmod(stat.S_IMODE(path.stat().st_mode))
            staged.replace(path)


@contextmanager
def disk_errors(path: Path | str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        message = disk_full_message(error, path) or f"{path} cannot be read or written: {error.strerror or error}."
        raise StoreError(message) from error


@contextmanager
def staged_file(directory: Path, name: str) -> Generator[tuple[BinaryIO, Path]]:
    """A new file with a hidden name in ``directory``, deleted unless the body renames it. The umask
    decides who may access it, unlike that of `tempfile`."""
    staged = directory / f".{name[:48]}.{secrets.token_hex(8)}"  # names have a maximum length
    try:
        with staged.open("xb") as file:
            yield file, staged
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, timeout_s: float = -1, busy: Callable[[], str] = str) -> Generator[None]:
    """Lock a file. The operating system releases the lock when this process exits.

    Raises:
        BusyError: with the message ``busy()``, the lock is not released within ``timeout_s``.
        StoreError: the disk has no file locks.
    """
    lock = FileLock(path, timeout=timeout_s, fallback_to_soft=False)  # a soft one outlives a killed process
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:  # a subclass of OSError
            raise BusyError(busy()) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise StoreError(
                f"{path.parent} is on a disk without file locks ({error.strerror}); choose a directory on another disk."
            ) from None
    try:
        yield
    finally:
        lock.release()


def link_or_copy(file: Path, to: Path) -> None:
    """Make ``to`` a hard link of ``file``, or a copy on another disk or one without links."""
    try:
        to.hardlink_to(file.resolve())
    except OSError:  # the error for a disk without links depends on the system
        shutil.copyfile(file, to)


def sync(file: BinaryIO) -> None:
    """Flush to disk before a rename, so that a power failure cannot leave an empty file."""
    file.flush()
    os.fsync(file.fileno())


def scratch_name(owner: Path) -> str:
    """A short name for ``owner`` and this user, because socket paths have a limited length."""
    return "evernear-" + hashlib.sha256(f"{os.geteuid()}:".encode() + os.fsencode(owner)).hexdigest()[:12]


def make_private(directory: Path) -> None:
    """Create ``directory`` as an empty directory that only this user can access. An earlier one of
    this user is removed. Another user may have created one or a link under this predictable name,
    which raises `StoreError`."""
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
