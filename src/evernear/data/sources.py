"""Where images come from. Two kinds: files that are still to be decoded, and arrays that already are."""

import gzip
import math
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, runtime_checkable
from urllib.error import URLError

import numpy as np

from evernear.data.ledger import Listed
from evernear.data.manifest import SPLITS, Split, as_split
from evernear.data.preprocess import Pixels
from evernear.disk import disk_errors
from evernear.errors import DataError, SettingsError
from evernear.store import open_store

# Files of these kinds are taken for images by their name; whether they are PNG or JPEG their content tells.
_IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".heic", ".avif"}
)
# Two of these beside each other, in capitals or not, are no classes.
_SPLIT_WORDS = frozenset({*SPLITS, "val", "valid", "validation", "dev"})
_BLOCK = 1024
_MAX_NAMES = 5


@dataclass(frozen=True)
class Arrays:
    """A block of grey images that come decoded: ``images`` is uint8 (N, H, W)."""

    names: list[str]
    labels: list[str]
    given: Split | None
    images: Pixels


class ArraySource(Protocol):
    """A source whose images come decoded."""

    name: str
    hashed: tuple[Split, ...]

    def labels(self) -> list[str]:
        """The distinct labels."""
        ...

    def size_px(self) -> tuple[int, int]:
        """Height and width of all images."""
        ...

    def blocks(self) -> Iterator[Arrays]:
        """The images, in an order that is always the same, held-out splits first."""
        ...

    def listed(self) -> Iterator[Listed]:
        """The images without their pixels; no etag, for nothing else would tell that one was replaced."""
        ...


@runtime_checkable
class FileSource(Protocol):
    """A source of image files in class folders: ``<label>/<file>`` or ``<split>/<label>/<file>``.

    ``hashed`` are the splits that the content hash chooses from for files without a given split; it is known
    once `files` has been read to its end, and so are ``empty_folders`` and ``hidden_folders``: class folders that
    hold no image, and those that do but are left out because their names begin with a dot.
    """

    name: str
    hashed: tuple[Split, ...]
    empty_folders: list[str]
    hidden_folders: list[str]

    def files(self) -> Iterator[Listed]:
        """The image files, without reading them."""
        ...

    def read(self, name: str) -> bytes:
        """A file's content; called from many threads."""
        ...


def open_source(source: str) -> ArraySource | FileSource:
    """The source that ``data.source`` names.

    Raises:
        SettingsError: there is no such kind of source.
        DataError: the directory or its files are missing.
    """
    kind, _, place = source.partition(":")
    if source == "digits":
        return Digits()
    if source == "mnist":
        return Mnist(download_mnist())
    if kind == "mnist" and place:
        return Mnist(Path(place))
    if kind == "folder" and place:
        return Folder(Path(place))
    if source.startswith("s3://") and place.strip("/"):
        return Bucket(source)
    raise SettingsError(
        f"There is no source {source!r}; known: digits, mnist, mnist:DIRECTORY, folder:DIRECTORY, s3://bucket/prefix."
    )


class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; values 0..16 are spread over 0..255."""

    name = "digits"
    hashed: tuple[Split, ...] = SPLITS

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        self._images = np.rint(np.reshape(pixels, (-1, 8, 8)) * (255 / 16)).astype(np.uint8)
        self._labels = [str(label) for label in labels]

    def labels(self) -> list[str]:
        """0 to 9."""
        return sorted(set(self._labels))

    def size_px(self) -> tuple[int, int]:
        """8 x 8."""
        return self._images.shape[1], self._images.shape[2]

    def blocks(self) -> Iterator[Arrays]:
        """All of them."""
        yield Arrays([image.name for image in self.listed()], self._labels, None, self._images)

    def listed(self) -> Iterator[Listed]:
        """All of them."""
        yield from (Listed(f"digits[{i}]", "", label, None, 0) for i, label in enumerate(self._labels))


class Mnist:
    """The four IDX files of MNIST, or of a set that comes as it does; gzip or plain.

    The 10,000 official test images stay the test split. Format: http://yann.lecun.com/exdb/mnist.
    """

    name = "mnist"
    hashed: tuple[Split, ...] = ("train", "gallery", "query")
    _PARTS: tuple[tuple[str, Split | None], ...] = (("t10k", "test"), ("train", None))

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def labels(self) -> list[str]:
        """Those that occur in the label files."""
        found: set[int] = set()
        for part in ("t10k", "train"):
            with _open_idx(self._find(f"{part}-labels", "idx1-ubyte")) as labels:
                found.update(np.unique(labels.read(labels.shape[0])).tolist())
        return [str(label) for label in sorted(found)]

    def size_px(self) -> tuple[int, int]:
        """As the header of the training images says."""
        path = self._find("train-images", "idx3-ubyte")
        with _open_idx(path) as images:
            if len(images.shape) != 3 or 0 in images.shape:
                raise DataError(f"{path} holds no images; download it again.")
            return images.shape[1], images.shape[2]

    def blocks(self) -> Iterator[Arrays]:
        """1,024 images at a time; the test images first."""
        for part, given in self._PARTS:
            images_path = self._find(f"{part}-images", "idx3-ubyte")
            labels_path = self._find(f"{part}-labels", "idx1-ubyte")
            with _open_idx(images_path) as images, _open_idx(labels_path) as labels:
                if len(images.shape) != 3 or labels.shape != images.shape[:1]:
                    raise DataError(
                        f"{images_path} and {labels_path} do not belong together: they hold arrays of shape"
                        f" {images.shape} and {labels.shape}; download both again."
                    )
                for start in range(0, images.shape[0], _BLOCK):
                    pixels, names = images.read(_BLOCK), labels.read(_BLOCK)
                    numbers = range(start, start + len(pixels))
                    yield Arrays([f"{part}[{i}]" for i in numbers], [str(n) for n in names.tolist()], given, pixels)

    def listed(self) -> Iterator[Listed]:
        """As the label files say."""
        for part, given in self._PARTS:
            with _open_idx(self._find(f"{part}-labels", "idx1-ubyte")) as labels:
                for i, label in enumerate(labels.read(labels.shape[0]).tolist()):
                    yield Listed(f"{part}[{i}]", "", str(label), given, 0)

    def _find(self, stem: str, kind: str) -> Path:
        with disk_errors(self._directory):
            for directory in (self._directory, self._directory / "MNIST" / "raw"):
                for name in (f"{stem}-{kind}", f"{stem}-{kind}.gz", f"{stem}.{kind}", f"{stem}.{kind}.gz"):
                    if (directory / name).is_file():
                        return directory / name
        raise DataError(f"{self._directory} holds no {stem}-{kind}, plain or .gz; name a directory with the IDX files.")


@contextmanager
def _open_idx(path: Path) -> Generator["_Idx"]:
    with ExitStack() as stack:
        with disk_errors(path):
            file = stack.enter_context(path.open("rb"))
        if path.suffix == ".gz":
            yield _Idx(stack.enter_context(gzip.GzipFile(fileobj=file)), path)
        else:
            yield _Idx(file, path)


class _Idx:
    """An IDX file of unsigned bytes, read from front to back."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, path: Path) -> None:
        self._file, self._path = file, path
        zeros, kind, dimensions = struct.unpack(">HBB", self._take(4))
        if zeros != 0 or kind != 8 or dimensions == 0:
            raise DataError(f"{path} is not an IDX file of bytes; download it again.")
        self.shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", self._take(4 * dimensions))
        self._left = self.shape[0]

    def read(self, count: int) -> Pixels:
        """The next ``count`` items, or what is left."""
        count = min(count, self._left)
        self._left -= count
        shape = (count, *self.shape[1:])
        return np.frombuffer(self._take(math.prod(shape)), np.uint8).reshape(shape)

    def _take(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self._path} is broken ({error}); download it again.") from None
        if len(data) != size:
            raise DataError(f"{self._path} is cut short; download it again.")
        return data


def download_mnist() -> Path:
    """A directory with MNIST's files; torchvision, which holds their checksums, downloads them once.

    Raises:
        DataError: the download failed.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evernear" / "mnist"
    if not directory.is_dir():
        from torchvision.datasets import MNIST

        with disk_errors(directory.parent):
            directory.parent.mkdir(parents=True, exist_ok=True)
            # Moved into place when it is whole: a killed download must not look like a finished one.
            with tempfile.TemporaryDirectory(prefix=".mnist-", dir=directory.parent) as partial:
                try:
                    MNIST(partial, download=True)
                except (URLError, RuntimeError) as error:
                    reason = " ".join(str(error).split())
                    raise DataError(
                        f"MNIST cannot be downloaded ({reason}); name a directory that holds it: mnist:DIRECTORY."
                    ) from error
                (Path(partial) / "MNIST" / "raw").rename(directory)
    return directory


class _ClassFolders:
    """What folder and bucket share: reading label and split from a path."""

    hashed: tuple[Split, ...] = SPLITS
    empty_folders: list[str]
    hidden_folders: list[str]

    def __init__(self, name: str) -> None:
        self.name = _slug(name)
        self.empty_folders = []
        self.hidden_folders = []
        self._splits_given = False

    def _set_layout(self, top: set[str]) -> None:
        """See from the folders at the top whether splits are given, and which the content hash decides."""
        given = {name for name in top if name in SPLITS}
        self._splits_given = bool(top) and given == top
        if self._splits_given:
            if "train" not in given:
                raise DataError(f"{self.name} has given splits ({', '.join(sorted(given))}) but no train folder.")
            self.hashed = ("train", *(split for split in SPLITS[1:] if split not in given))
        elif len(words := sorted(name for name in top if name.lower() in _SPLIT_WORDS)) > 1:
            # Read as classes, they would give a network that tells train from test.
            others = sorted(top - given)
            raise DataError(
                f"{self.name} has folders {', '.join(words)}, as if splits were given, which takes train, test,"
                " gallery and query with nothing beside them; rename, move or remove"
                f" {', '.join(others[:_MAX_NAMES])}{' and more' * (len(others) > _MAX_NAMES)}."
            )

    def _listed(self, path: str, etag: str, size_bytes: int) -> Listed | None:
        """A file by its path in the source; None for what is no image in a class folder."""
        parts = PurePosixPath(path).parts
        given = as_split(parts[0]) if self._splits_given else None
        folders = parts[1:-1] if given else parts[:-1]
        hidden = any(part.startswith(".") for part in parts)
        if hidden or not folders or not _is_image_name(path):
            return None
        return Listed(path, etag, folders[0], None if given in self.hashed else given, size_bytes)


class Folder(_ClassFolders):
    """A directory tree of image files."""

    def __init__(self, directory: Path) -> None:
        with disk_errors(directory):
            super().__init__(directory.resolve().name)
            self._directory = directory
            if not directory.is_dir():
                raise DataError(f"There is no directory {directory} to read images from.")

    def files(self) -> Iterator[Listed]:
        """The image files; an etag is size and time of change."""
        tops = _visible_folders(self._directory)
        self._set_layout({top.name for top in tops})
        classes = [folder for top in tops for folder in _visible_folders(top)] if self._splits_given else tops
        for folder in classes:
            yield from self._files_of(folder)
        for parent in [self._directory, *(tops if self._splits_given else ())]:
            self._note_hidden_folders(parent)

    def _files_of(self, folder: Path) -> Iterator[Listed]:
        count = 0
        for entry in _walk(folder):
            name = Path(entry.path).relative_to(self._directory).as_posix()
            if listed := self._listed(name, "", 0):
                _check_utf8(name)
                with disk_errors(entry.path):
                    stat = entry.stat()
                count += 1
                yield listed._replace(etag=f"{stat.st_size}-{stat.st_mtime_ns}", size_bytes=stat.st_size)
        if not count:
            self.empty_folders.append(folder.relative_to(self._directory).as_posix())

    def _note_hidden_folders(self, parent: Path) -> None:
        for folder in _folders(parent):
            if folder.name.startswith(".") and any(_is_image_name(entry.name) for entry in _walk(folder)):
                self.hidden_folders.append(_printable(folder.relative_to(self._directory)))

    def read(self, name: str) -> bytes:
        """A file's content."""
        path = self._directory / name
        with disk_errors(path):
            return path.read_bytes()


class Bucket(_ClassFolders):
    """The image files under a prefix of an S3 bucket."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.removeprefix("s3://"))
        self._store = open_store(uri)

    def files(self) -> Iterator[Listed]:
        """The image files; an etag is S3's."""
        self._set_layout(set(self._store.folders()))
        hidden: set[str] = set()
        for info in self._store.list(""):
            if listed := self._listed(info.key, info.etag, info.size_bytes):
                yield listed
            elif _is_image_name(info.key):
                hidden.update(self._hidden_folder(PurePosixPath(info.key).parts))
        self.hidden_folders = sorted(hidden)

    def _hidden_folder(self, parts: tuple[str, ...]) -> Iterator[str]:
        """The class folder of a key, where its name begins with a dot."""
        for depth in (1, 2) if self._splits_given else (1,):
            if len(parts) > depth and parts[depth - 1].startswith("."):
                yield "/".join(parts[:depth])
                return

    def read(self, name: str) -> bytes:
        """A file's content."""
        return self._store.get(name)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files below a folder as the disk has them: a sorted listing would hold a whole folder in memory.

    A link to nothing is among them: its image must not leave the dataset because a disk is not mounted.
    """
    with disk_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            elif entry.is_file() or not Path(entry.path).exists():
                yield entry


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"The name of {os.fsencode(name)!r} is not UTF-8; rename it.") from None


def _is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in _IMAGE_SUFFIXES


def _folders(directory: Path) -> list[Path]:
    with disk_errors(directory):
        return sorted(p for p in directory.iterdir() if p.is_dir())


def _visible_folders(directory: Path) -> list[Path]:
    folders = [folder for folder in _folders(directory) if not folder.name.startswith(".")]
    for folder in folders:
        _check_utf8(folder.name)
    return folders


def _printable(path: Path) -> str:
    """A path that need not be UTF-8, as text that is."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].rstrip("-") or "dataset"
