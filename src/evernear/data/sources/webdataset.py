"""WebDataset: tar files in which the members of a sample are adjacent and have the same
name except for the suffix, as in ``7.jpg`` and ``7.cls``.

The format is described at https://github.com/webdataset/webdataset. The label is the
``label`` field in ``.json``. Without this field, the label is the text in ``.cls``. The
group is the ``group`` field in ``.json``.
"""

import json
import posixpath
import tarfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from evernear.common.disk import disk_errors
from evernear.data.image_file import has_image_suffix
from evernear.data.sources.base import FileEntry
from evernear.data.sources.names import skipped_path
from evernear.data.sources.packed import Member, PackedFiles
from evernear.data.sources.table_file import cell_text
from evernear.errors import DataError

_MAX_LABEL_BYTES = 2**20


class WebDataset(PackedFiles):
    """Tar files that contain images and their labels."""

    suffixes = (".tar", ".tar.gz", ".tgz")
    kind = "tars"

    def _members(self, path: Path, file: str) -> Iterator[Member]:
        unlabeled = ""
        with _opened(path, file) as tar:
            for key, members in groupby(self._used(tar, file), key=lambda info: _sample(info.name)[0]):
                text: str | None = None
                fields: dict[str, Any] = {}
                images: list[tarfile.TarInfo] = []
                for info in members:
                    kind = _sample(info.name)[1]
                    if kind == "cls":
                        text = _text(tar, info, file)
                    elif kind == "json":
                        fields = _fields(tar, info, file)
                    elif has_image_suffix(f"image.{kind}"):
                        images.append(info)
                # If .json contains the class name, .cls contains the class number,
                # which the webdataset loader expects.
                label = cell_text(fields.get("label")) or text
                if images and label is None:
                    unlabeled = unlabeled or key
                group = _group(fields)
                yield from (Member(info.name, label or "", info.size, group) for info in images)
            _require_end(tar, file)
        if unlabeled:
            raise DataError(
                f"The sample {unlabeled} of {file} has no label: add {unlabeled}.cls with its class, or"
                f" {unlabeled}.json with the field label, next to the image."
            )

    def _images(self, path: Path, file: str, wanted: Mapping[str, FileEntry]) -> Iterator[tuple[str, bytes]]:
        with _opened(path, file) as tar:
            for info in _each(tar):
                if info.name in wanted and info.isreg():
                    # `evernear.data.decoding` rejects files that are larger than
                    # uncompressed pixels would be.
                    is_too_large = info.size > 8 * self._settings.max_pixels
                    yield info.name, b"" if is_too_large else _content(tar, info)

    def _used(self, tar: tarfile.TarFile, file: str) -> Iterator[tarfile.TarInfo]:
        """Yield the regular members, except files that operating systems left
        behind.
        """
        for info in _each(tar):
            try:
                info.name.encode()
            except UnicodeEncodeError:
                raise DataError(f"The name of {info.name!a} in {file} is not UTF-8; rename it.") from None
            if skipped := skipped_path(info.name.removeprefix("./")):
                self._notes["litter"].add(f"{file}/{skipped}")
            elif info.isreg():
                yield info
            elif not info.isdir():
                self._notes["not_an_image"].add(f"{file}/{info.name}")


def _text(tar: tarfile.TarFile, info: tarfile.TarInfo, file: str) -> str:
    """The text of a member."""
    try:
        return _label_content(tar, info, file).decode("utf-8-sig")
    except ValueError:
        raise DataError(f"{file}/{info.name} is not UTF-8; write it again.") from None


def _fields(tar: tarfile.TarFile, info: tarfile.TarInfo, file: str) -> dict[str, Any]:
    """The fields of a JSON member, or nothing if the member is not an object."""
    try:
        fields: Any = json.loads(_label_content(tar, info, file).decode("utf-8-sig"))
    except ValueError:
        raise DataError(f"{file}/{info.name} is not JSON; write it again.") from None
    return fields if isinstance(fields, dict) else {}


def _label_content(tar: tarfile.TarFile, info: tarfile.TarInfo, file: str) -> bytes:
    if info.size > _MAX_LABEL_BYTES:
        where = f"{file}/{info.name}"
        raise DataError(f"{where} has {info.size:,} bytes, and a label has at most {_MAX_LABEL_BYTES:,}.")
    return _content(tar, info)


def _group(fields: Mapping[str, Any]) -> str:
    """The group that the fields name. A value that is neither text nor a number has
    another meaning.
    """
    value = fields.get("group")
    return cell_text(value) if isinstance(value, str | int | float) else ""


def _each(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members in order. Unlike in `tarfile`, the list of all members is not
    kept in memory.
    """
    while info := tar.next():
        yield info
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - absent from the type stubs


def _sample(name: str) -> tuple[str, str]:
    """Split a member's name into the name of the sample and the rest. The rest follows
    the first dot in the file name.
    """
    folder, base = posixpath.split(name)
    stem, _, rest = base.partition(".")
    return posixpath.join(folder, stem), rest.lower()


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(info)
    return stream.read() if stream else b""


@contextmanager
def _opened(path: Path, file: str) -> Generator[tarfile.TarFile]:
    with disk_errors(path):
        try:
            with tarfile.open(path) as tar:
                yield tar
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise DataError(f"{file} is not a complete tar ({error}); write it again.") from None


def _require_end(tar: tarfile.TarFile, file: str) -> None:
    """Check that a tar file is complete, because `tarfile` treats a broken header or a
    truncated file as the end of the archive.
    """
    assert tar.fileobj is not None  # noqa: S101 - it is open
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise DataError(f"{file} is damaged after {tar.offset:,} bytes; write it again.")
    tar.fileobj.seek(tar.offset)
    if len(tar.fileobj.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise DataError(f"{file} is truncated: it has no end mark after {tar.offset:,} bytes; write it again.")
