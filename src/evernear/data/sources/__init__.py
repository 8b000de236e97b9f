"""Sources of labeled images. `open_source` knows every kind of source. Those that are a path are
also in `PATH_KINDS` of the settings."""

from pathlib import Path, PurePosixPath

from evernear.common.store import FileStore, Store
from evernear.data.sources.base import ArrayBlock, ArraySource, FileEntry, FileSource, NameSample
from evernear.data.sources.digits import Digits
from evernear.data.sources.folder import DEFAULTS, Bucket, Folder, dataset_name
from evernear.data.sources.mnist import Mnist, download_mnist
from evernear.data.sources.webdataset import WebDataset
from evernear.errors import SettingsError
from evernear.settings import DataSettings
from evernear.settings.data import PATH_KINDS

__all__ = [
    "ArrayBlock",
    "ArraySource",
    "FileEntry",
    "FileSource",
    "NameSample",
    "name_of",
    "open_source",
    "require_outside",
]


def name_of(source: str) -> str:
    """The dataset name for a source, even if the source no longer exists."""
    kind, _, location = source.partition(":")
    if kind == "mnist" or not location:
        return kind
    if kind == "table":
        return dataset_name(PurePosixPath(location).stem)
    if kind == "s3" or location.startswith("s3://"):
        return dataset_name(location.removeprefix("s3://"))
    return dataset_name(Path(location).name)


def require_outside(out: Store, *sources: str, store_uri: str = "") -> None:
    """Require that ``out`` is neither in one of the sources nor in the store. A bucket is not
    compared with the store, which may be its root."""
    uri = out.root.resolve().as_uri() if isinstance(out, FileStore) else out.uri
    directory = store_uri if store_uri.startswith("file:") else ""
    for what, place in (*(("source", source) for source in sources), ("store", directory)):
        root = _root_uri(place)
        if root and f"{uri}/".startswith(f"{root}/"):
            raise SettingsError(f"{out.uri} is in the {what} {place}; choose a --out outside of it.")


def _root_uri(source: str) -> str:
    """The URI of the folder that a source lists, or an empty string if it lists none."""
    kind, _, location = source.partition(":")
    if kind in ("s3", "file"):
        return source.rstrip("/")
    if kind not in PATH_KINDS or kind == "table" or not location:
        return ""
    return location.rstrip("/") if location.startswith("s3://") else Path(location).resolve().as_uri()


def open_source(source: str, settings: DataSettings = DEFAULTS) -> ArraySource | FileSource:
    """Open the source in ``data.source``. ``settings`` determine the meaning of the folders in the
    source.

    Raises:
        SettingsError: the kind of the source is unknown.
        DataError: the directory of the source is missing, or its files are missing.
    """
    match source.partition(":"):
        case "digits", "", "":
            return Digits()
        case "mnist", "", "":
            return Mnist(download_mnist())
        case "mnist", _, directory if directory:
            return Mnist(Path(directory))
        case "folder", _, directory if directory:
            return Folder(Path(directory), settings)
        case "table", _, location if location:
            from evernear.data.sources.table import Table  # needs duckdb and pyarrow

            return Table(location, settings)
        case "webdataset", _, location if location:
            return WebDataset(location, settings)
        case "huggingface", _, location if location:
            from evernear.data.sources.huggingface import HuggingFace  # needs pyarrow

            return HuggingFace(location, settings)
        case "s3", _, path if path.startswith("//") and path.strip("/"):
            return Bucket(source, settings)
        case _:
            raise SettingsError(
                f"Unknown source {source!r}; known: digits, mnist, mnist:DIRECTORY, folder:DIRECTORY,"
                " s3://bucket/prefix, table:FILE, webdataset:DIRECTORY, huggingface:DIRECTORY."
            )
