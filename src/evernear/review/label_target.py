"""The source, a folder or a bucket, as a target for labeled images."""

import errno
from datetime import UTC, datetime
from pathlib import Path

from evernear.common.disk import disk_errors, missing_directory, write_atomically
from evernear.common.output import printable
from evernear.common.store import open_store
from evernear.data.sources import open_source
from evernear.data.sources.folder import DEFAULTS, Bucket, Folder
from evernear.data.sources.layout import SPLIT_WORDS, Layout
from evernear.data.sources.names import answer_in, is_skipped
from evernear.errors import DataError, SettingsError, StoreError
from evernear.settings import DataSettings

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Error numbers for a path that does not exist and cannot exist at this time."""
_MAX_NAME_BYTES = 200


class FolderTarget:
    """A folder of images, in whose files labels are written. ``labels`` are the classes that have
    an image of the source itself. The others consist of answers."""

    def __init__(self, directory: Path, settings: DataSettings) -> None:
        self._open = lambda: Folder(directory, settings)
        self.labels, self.layout = _layout(self._open())
        self._directory = directory

    def files(self, label: str) -> list[str]:
        return _files(self._open(), label)

    def move(self, old: str, new: str) -> None:
        """A repeated move has no effect. Fails if another image has the name ``new``."""
        if _image_to_move(self, old, new) is None:
            return
        path = self._directory / new
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            (self._directory / old).replace(path)  # keeps the time of the file
        self.remove(old, prune=True)

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
                    f"{path.name} is too long a name for the file system; shorten the name of the image, then start a"
                    " run."
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

    def modified(self, name: str) -> datetime | None:
        path = self._directory / name
        with disk_errors(path):
            return datetime.fromtimestamp(path.stat().st_mtime, UTC) if _exists(path) else None


class BucketTarget:
    """A bucket prefix. A folder in a bucket exists only while it contains an object."""

    def __init__(self, uri: str, settings: DataSettings) -> None:
        self._open = lambda: Bucket(uri, settings)
        self.labels, self.layout = _layout(self._open())
        self._store = open_store(uri)

    def files(self, label: str) -> list[str]:
        return _files(self._open(), label)

    def move(self, old: str, new: str) -> None:
        """A repeated move has no effect. Fails if another image has the name ``new``."""
        image = _image_to_move(self, old, new)
        if image is not None:
            self._store.put(new, image)
            self._store.delete(old)

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

    def modified(self, name: str) -> datetime | None:
        return next((info.modified for info in self._store.list(name) if info.key == name), None)


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


def require_folder_name(label: str) -> None:
    """Require that ``label`` can be the name of a class folder."""
    shown = printable(label, 100)
    if not label or label != label.strip() or is_skipped(label) or label.lower() in SPLIT_WORDS:
        remedy = "use a name that means no hidden, system or split folder"
    elif len(label.encode()) > _MAX_NAME_BYTES:
        remedy = f"shorten it to {_MAX_NAME_BYTES} bytes"
    elif "/" in label or "\\" in label:
        remedy = "use a name without slashes"
    elif printable(label) != label:  # a joiner within an emoji is printable
        remedy = "use a name without invisible characters"
    else:
        return
    raise SettingsError(f"'{shown}' cannot be the name of a class; {remedy}.")


def _files(source: Folder | Bucket, label: str) -> list[str]:
    return [entry.name for entry in source.entries() if entry.label == label]


def _image_to_move(target: "FolderTarget | BucketTarget", old: str, new: str) -> bytes | None:
    """None if an earlier move has moved it. Fails if another image has the name ``new``."""
    image = target.read(old)
    if image is not None and target.read(new) not in (None, image):
        raise DataError(f"{old} cannot be moved to {new}, because another image has that name.")
    return image


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
