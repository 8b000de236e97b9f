"""The source, a folder or a bucket, as a target for labeled images."""

import errno
from pathlib import Path

from evernear.common.disk import disk_errors, missing_directory, write_atomically
from evernear.common.store import open_store
from evernear.data.sources import open_source
from evernear.data.sources.folder import DEFAULTS, Bucket, Folder
from evernear.data.sources.layout import Layout
from evernear.data.sources.names import answer_in
from evernear.errors import DataError, SettingsError, StoreError
from evernear.settings import DataSettings

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Error numbers for a path that does not exist and cannot exist at this time."""


class FolderTarget:
    """A folder of images, in whose files labels are written. ``labels`` are the classes that have
    an image of the source itself. The others consist of answers."""

    def __init__(self, directory: Path, settings: DataSettings) -> None:
        self.labels, self.layout = _layout(Folder(directory, settings))
        self._directory = directory

    def has_folder(self, name: str) -> bool:
        folder = (self._directory / name).parent
        with disk_errors(folder):
            return folder.is_dir()

    def add(self, name: str, image: bytes) -> None:
        """Write the file atomically."""
        if not self._directory.is_dir():  # creating the directory could hide an empty mount point
            raise missing_directory("image directory", self._directory)
        path = self._directory / name
        try:
            write_atomically(path, image)
        except StoreError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENAMETOOLONG:
                raise DataError(
                    f"{path.name} is too long a name for the file system; shorten the name of the image, then run"
                    " `evernear labels check` again."
                ) from None
            raise

    def remove(self, name: str, prune: bool) -> None:
        """With ``prune``, also remove folders that become empty."""
        path = self._directory / name
        with disk_errors(path):
            if _exists(path):  # a read-only file system does not report a missing file
                path.unlink()
            folder = path.parent
            while prune and folder != self._directory and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent

    def read(self, name: str) -> bytes | None:
        path = self._directory / name
        with disk_errors(path):
            return path.read_bytes() if _exists(path) else None


class BucketTarget:
    """A bucket prefix. A folder in a bucket exists only while it contains an object."""

    def __init__(self, uri: str, settings: DataSettings) -> None:
        self.labels, self.layout = _layout(Bucket(uri, settings))
        self._store = open_store(uri)

    def has_folder(self, name: str) -> bool:
        """Always True, because empty folders in a bucket do not have to be removed."""
        return True

    def add(self, name: str, image: bytes) -> None:
        self._store.put(name, image)

    def remove(self, name: str, prune: bool) -> None:
        if self.read(name) is not None:  # needs no permission to delete an object that was never written
            self._store.delete(name)

    def read(self, name: str) -> bytes | None:
        stored = self._store.find(name)
        return stored[0] if stored else None


LabelTarget = FolderTarget | BucketTarget


def open_label_target(source: str, settings: DataSettings = DEFAULTS) -> LabelTarget:
    """Open ``source`` for writing, and list its files once to find the classes. ``settings``
    determine the meaning of its folders."""
    match source.partition(":"):
        case "folder", _, directory if directory:
            return FolderTarget(Path(directory), settings)
        case "s3", _, _:
            return BucketTarget(source, settings)
        case _:
            open_source(source)
            raise SettingsError(
                f"Labels cannot be written to {source}: correct them where it was made; review needs"
                " folder:DIRECTORY or s3://bucket/prefix, whose files it can move."
            )


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        if error.errno in _MISSING:
            return False
        raise
    return True


def _layout(source: Folder | Bucket) -> tuple[list[str], Layout]:
    """The classes with an image that does not come from review, and the layout."""
    labels = sorted({entry.label for entry in source.entries() if not answer_in(entry.name)})
    return labels, source.layout
