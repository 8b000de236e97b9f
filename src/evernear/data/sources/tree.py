"""A directory tree. Links to folders are followed. This module does not use pathlib, because
pathlib would take most of the time for listing files."""
# ruff: noqa: PTH115, PTH116, PTH120

import os
import stat
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from evernear.common.disk import disk_errors
from evernear.common.output import named
from evernear.common.outputs import is_output
from evernear.data.sources.names import is_skipped
from evernear.errors import StoreError

_Inode = tuple[int, int]


class Tree:
    """The folders and files below a directory. A link to a folder is followed, unless the target
    folder contains the link. The paths begin with the directory. They may pass through links."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._real_root = os.path.realpath(root)
        self._broken: dict[str, str] = {}
        self._listed: set[tuple[_Inode, Hashable]] = set()
        self.outputs: set[str] = set()
        """Names of folders that evernear wrote (`evernear.common.outputs`)."""
        self.outside: dict[str, str] = {}
        """Links to folders outside the directory. Maps the name of each link to its target."""

    def name(self, path: str) -> str:
        """The name of a path in the tree, with bytes that are not UTF-8 escaped."""
        return _shown(os.path.relpath(path, self._root))

    def folders(self, path: str) -> list[str]:
        above = self._containing(path)
        entries = (entry for entry, kind in self.scan(path) if kind == "folder")
        return sorted(entry.path for entry in entries if self._enters(entry, above))

    def files(self, folder: str, group: Callable[[str], Hashable]) -> Iterator[os.DirEntry[str]]:
        """Yield the files below a folder in no particular order, since sorting would need a whole
        folder in memory, and a skipped folder instead of its files. Folders for which ``group`` is
        None are left out, and so is a link to a folder that was listed for its group."""
        yield from self._files(folder, self._containing(folder), group)

    def scan(self, folder: str) -> Iterator[tuple[os.DirEntry[str], Literal["folder", "file", "skipped"]]]:
        """Yield folders, files and skipped entries. Broken links and outputs are recorded. A folder
        that was deleted after it was listed is empty."""
        with disk_errors(folder):
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:
                if folder == self._root:
                    raise
                return
        with disk_errors(folder), entries:
            for entry in entries:
                if is_skipped(entry.name):
                    yield entry, "skipped"
                elif entry.is_symlink():
                    try:
                        mode = entry.stat().st_mode
                    except OSError as error:  # missing, not permitted, a cycle of links, not connected
                        self._broken[self.name(entry.path)] = f"{_shown(os.readlink(entry.path))} ({error.strerror})"
                        continue
                    if stat.S_ISREG(mode):
                        yield entry, "file"
                    elif stat.S_ISDIR(mode) and not self._is_output(entry):
                        yield entry, "folder"
                elif entry.is_dir():
                    if not self._is_output(entry):
                        yield entry, "folder"
                elif entry.is_file():
                    yield entry, "file"

    def _is_output(self, folder: os.DirEntry[str]) -> bool:
        if not is_output(folder.path):
            return False
        self.outputs.add(self.name(folder.path))
        return True

    def require_no_broken_link(self) -> None:
        """Images must not leave the dataset when a disk is not mounted."""
        if self._broken:
            shown = [f"{name} -> {target}" for name, target in sorted(self._broken.items())]
            links = "a link that leads" if len(self._broken) == 1 else f"{len(self._broken):,} links that lead"
            raise StoreError(
                f"{self._root} contains {links} nowhere: {named(shown)}; mount or restore the target, or"
                " remove the link."
            )

    def _files(
        self, folder: str, above: frozenset[_Inode], group: Callable[[str], Hashable]
    ) -> Iterator[os.DirEntry[str]]:
        folders: list[os.DirEntry[str]] = []
        for entry, kind in self.scan(folder):
            if kind == "folder":
                folders.append(entry)
            else:
                yield entry
        for entry in sorted(folders, key=lambda entry: (entry.is_symlink(), entry.name)):
            inode, key = _inode(entry.path), group(entry.path)
            if inode is None or key is None or not self._enters(entry, above):
                continue
            if entry.is_symlink() and (inode, key) in self._listed:
                continue
            self._listed.add((inode, key))
            yield from self._files(entry.path, above | {inode}, group)

    def _enters(self, entry: os.DirEntry[str], above: frozenset[_Inode]) -> bool:
        """False for one of the folders ``above``, and for one that was deleted. A link out of the
        tree is recorded."""
        inode = _inode(entry.path)
        if inode is None or inode in above:
            return False
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath([self._real_root, target]) != self._real_root:
                self.outside[self.name(entry.path)] = _shown(os.readlink(entry.path))
        return True

    def _containing(self, folder: str) -> frozenset[_Inode]:
        """The inodes of a folder, and of all folders that contain it or the tree."""
        paths = [self._real_root, *map(str, Path(self._real_root).parents)]
        while len(folder) > len(self._root):
            paths.append(folder)
            folder = os.path.dirname(folder)
        inodes: set[_Inode] = set()
        for path in paths:
            with suppress(StoreError):
                if inode := _inode(path):
                    inodes.add(inode)
        return frozenset(inodes)


def _inode(folder: str) -> _Inode | None:
    """None if the folder no longer exists."""
    with disk_errors(folder):
        try:
            status = os.stat(folder)
        except FileNotFoundError:
            return None
    return status.st_dev, status.st_ino


def _shown(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")
