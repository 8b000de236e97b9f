"""Folders that evernear writes: exports, predictions, working directories and stores.

Each carries a `MARKER`. A source leaves out marked folders at any depth, because their files are
copies or results of other images. Its top folder may be marked, so a network can be trained on an
export. An export's marker also says which one it is, so that only the same command continues it.
"""

import os

from evernear.common.store import Store
from evernear.errors import ConflictError

MARKER = "_evernear.txt"
"""Name of the marker, which describes the folder. It sorts before all other names that evernear
writes to the top of a folder, so listings of a bucket reach it first."""
_EXPLANATION = "evernear wrote this folder. A source of images leaves it out if it contains it."


def marker(contents: str) -> bytes:
    """The marker of a folder with ``contents``, such as "a working directory"."""
    return f"{contents}\n{_EXPLANATION}\n".encode()


def claim(out: Store, contents: str) -> None:
    """Mark an empty folder, or one that is already claimed for the same contents.

    Raises:
        ConflictError: the folder has other contents.
    """
    stored = out.find(MARKER)
    if stored is None:
        if next(iter(out.children("")), None) is not None:
            raise ConflictError(f"{out.uri} is not empty, and evernear did not write it; choose another --out.")
        out.put_if(MARKER, marker(contents), None)
        return
    earlier = stored[0].decode(errors="replace").partition("\n")[0]
    if earlier != contents:
        raise ConflictError(f"{out.uri} has {earlier}; choose another --out.")


def mark(store: Store, contents: str) -> None:
    if store.find(MARKER) is None:
        store.put(MARKER, marker(contents))


def is_output(folder: str) -> bool:
    return os.path.lexists(os.path.join(folder, MARKER))  # noqa: PTH118 - for each folder of a source


class MarkedFolders:
    """The marked folders in a sorted listing of a bucket. ``root`` is the source's top folder."""

    def __init__(self, root: str = "") -> None:
        self.names: list[str] = []
        self._root = root
        self._prefix = ""

    def contain(self, key: str) -> bool:
        """Whether an object is marked or a marker. Call this for each, in the listing's order."""
        if self._prefix and key.startswith(self._prefix):
            return True
        folder, _, name = key.rpartition("/")
        if name == MARKER and folder != self._root:
            self._prefix = f"{folder}/"
            self.names.append(folder)
        return name == MARKER
