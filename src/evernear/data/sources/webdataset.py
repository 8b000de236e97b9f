"""WebDataset: tar files in which the members of a sample are adjacent and have the same name except
for the suffix, as in ``7.jpg`` and ``7.cls``.

The format is described at https://github.com/webdataset/webdataset. The label is the ``label``
field in ``.json``. Without this field, the label is the text in ``.cls``. The group is the
``group`` field in ``.json``. A sample has one image. An image with a compound suffix, as in
``7.mask.png``, is another field of the sample, unless it is the only image.
"""

import json
import lzma
import posixpath
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from evernear.common.disk import disk_errors, require_no_pointer
from evernear.common.output import named
from evernear.data.sources.base import FileEntry, field_text
from evernear.data.sources.names import has_image_suffix, skipped_path
from evernear.data.sources.packed import Member, PackedFiles
from evernear.errors import DataError
from evernear.settings.data import COLUMN

_MAX_LABEL_BYTES = 2**20
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")


class WebDataset(PackedFiles):
    suffixes = (".tar", ".tar.gz", ".tgz")
    kind = "tars"

    def _members(self, path: Path, file: str) -> Iterator[Member]:
        without_label, without_image, has_images = set[str](), dict[str, list[str]](), False
        with _opened(path, file) as tar:
            for key, infos in groupby(self._used(tar, file), key=lambda info: _split_name(info.name)[0]):
                images: list[tarfile.TarInfo] = []
                labels = _Labels(file, self._settings.group == COLUMN)
                names: list[str] = []
                for info in infos:
                    names.append(info.name)
                    stem, suffix = posixpath.splitext(info.name)
                    if suffix.lower() in (".cls", ".json"):
                        labels.add(stem, suffix.lower(), info.size, lambda info=info: _content(tar, info))
                    elif has_image_suffix(f"image{suffix}"):
                        images.append(info)
                has_images = has_images or bool(images)
                if labels and not images:
                    without_image.setdefault(key, names)
                for member in self._of_sample(file, key, images, labels):
                    if not member.label:
                        without_label.add(key)
                        self._advice = self._advice or _advice(file, key, names, member.name)
                    yield member
            _require_end(tar, file)
        if divided := without_label & without_image.keys():
            raise DataError(
                f"The members of the sample {min(divided)} of {file} are not adjacent, so its image has no label; write"
                " the tar again with its members sorted by name, as `tar --sort=name` does."
            )
        if without_image and not has_images:
            key, names = next(iter(without_image.items()))
            self._advice = (
                self._advice or f" The sample {key} of {file} has the members {named(names)}, and none is an image."
            )

    def _of_sample(self, file: str, key: str, images: list[tarfile.TarInfo], labels: "_Labels") -> Iterator[Member]:
        """The images of a sample. With dots in names, several samples share a key."""
        parts: defaultdict[str, list[tarfile.TarInfo]] = defaultdict(list)
        is_one, _ = labels.of(key) if images else ("", "")
        for image in images:
            parts[key if is_one else labels.stem_of(image.name, key)].append(image)
        for stem, own in parts.items():
            label, group = labels.of(stem)
            if label:
                image = self._choose(file, stem, own)
                yield Member(image.name, label, image.size, group)
            else:
                yield from (Member(image.name, "", image.size) for image in own)

    def _choose(self, file: str, stem: str, images: list[tarfile.TarInfo]) -> tarfile.TarInfo:
        """The image of a sample. Others, such as masks, show the same scene."""
        names = [image.name for image in images]
        if len(set(names)) < len(names):
            raise DataError(f"{file} contains two images called {max(names, key=names.count)}; rename one of them.")
        plain = [image for image in images if "." not in image.name[len(stem) + 1 :]] or images
        # A photograph is a JPEG, and its mask or depth map is not.
        photographs = [image for image in plain if image.name.lower().endswith(_JPEG_SUFFIXES)]
        chosen = photographs if len(photographs) == 1 else plain
        if len(chosen) > 1:
            name = posixpath.basename(stem)
            raise DataError(
                f"The sample {stem} of {file} has one label and several images: {named(names)}. They are one scene,"
                f" and one image of a scene is used: call it {name}.jpg or {name}.png, and the others"
                f" {name}.mask.png or the like. If they are different images, give each its label, such as"
                f" {posixpath.basename(posixpath.splitext(names[0])[0])}.cls, and remove the label of {stem}."
            )
        for image in images:
            if image is not chosen[0]:
                self._notes["not_an_image"].add(f"{file}/{image.name}")
        return chosen[0]

    def _images(self, path: Path, file: str, wanted: Mapping[str, FileEntry]) -> Iterator[tuple[str, bytes]]:
        with _opened(path, file) as tar:
            for info in _each(tar):
                if info.name in wanted and info.isreg():
                    # `evernear.data.decoding` rejects files that are larger than uncompressed
                    # pixels would be.
                    is_too_large = info.size > 8 * self._settings.max_pixels
                    yield info.name, b"" if is_too_large else _content(tar, info)

    def _used(self, tar: tarfile.TarFile, file: str) -> Iterator[tarfile.TarInfo]:
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


class _Labels:
    """A member is parsed only if its label is needed, since .json may contain anything."""

    def __init__(self, file: str, uses_groups: bool) -> None:
        self._file, self._uses_groups = file, uses_groups
        self._contents: defaultdict[str, dict[str, bytes | int]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._contents)

    def add(self, stem: str, suffix: str, size: int, read: Callable[[], bytes]) -> None:
        self._contents[stem][suffix] = size if size > _MAX_LABEL_BYTES else read()

    def stem_of(self, name: str, key: str) -> str:
        """The longest stem of a label that ``name`` begins with, or ``key``."""
        stem = name
        while len(stem) > len(key) and stem not in self._contents:
            stem = stem.rpartition(".")[0]
        return stem

    def of(self, stem: str) -> tuple[str, str]:
        """Label and group, perhaps empty. A name in .json precedes the number in .cls."""
        fields = self._fields(stem)
        label = self._field(fields, "label", stem) or self._text(stem, ".cls")
        is_group = self._uses_groups or isinstance(fields.get("group"), str | int)
        return label, self._field(fields, "group", stem) if is_group else ""

    def _field(self, fields: Mapping[str, Any], name: str, stem: str) -> str:
        return field_text(fields.get(name), f"The field {name} of {self._file}/{stem}.json")

    def _fields(self, stem: str) -> Mapping[str, Any]:
        text = self._text(stem, ".json")
        try:
            fields: Any = json.loads(text or "{}")
        except (ValueError, RecursionError):
            raise DataError(f"{self._file}/{stem}.json is not JSON; write it again.") from None
        return fields if isinstance(fields, dict) else {}

    def _text(self, stem: str, suffix: str) -> str:
        content, where = self._contents.get(stem, {}).get(suffix, b""), f"{self._file}/{stem}{suffix}"
        if isinstance(content, int):
            raise DataError(f"{where} has {content:,} bytes, and a label has at most {_MAX_LABEL_BYTES:,}.")
        try:
            return content.decode("utf-8-sig")
        except ValueError:
            raise DataError(f"{where} is not UTF-8; write it again.") from None


def _advice(file: str, key: str, members: list[str], image: str) -> str:
    return (
        f" The sample {key} of {file} has the members {named(members)}, and none is the label of {image}: add"
        f" {posixpath.splitext(image)[0]}.cls with its class, or a .json of this name with the field label, next to the"
        " image."
    )


def _each(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Unlike in `tarfile`, the list of all members is not kept in memory."""
    while info := tar.next():
        yield info
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - absent from the type stubs


def _split_name(name: str) -> tuple[str, str]:
    """The sample's name, and the rest after the first dot in the file name."""
    folder, base = posixpath.split(name)
    stem, _, rest = base.partition(".")
    return posixpath.join(folder, stem), rest.lower()


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(info)
    return stream.read() if stream else b""


@contextmanager
def _opened(path: Path, file: str) -> Generator[tarfile.TarFile]:
    require_no_pointer(path, file)
    with disk_errors(path):
        try:
            with tarfile.open(path) as tar:
                yield tar
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = str(error).splitlines()[0].rstrip(":")  # the others say why each compression does not fit
            raise DataError(f"{file} is not a complete tar ({reason}); write it again.") from None


def _require_end(tar: tarfile.TarFile, file: str) -> None:
    """`tarfile` treats a broken header or a truncated file as the end of the archive."""
    assert tar.fileobj is not None  # noqa: S101 - it is open
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise DataError(f"{file} is damaged after {tar.offset:,} bytes; write it again.")
    tar.fileobj.seek(tar.offset)
    if len(tar.fileobj.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise DataError(f"{file} is truncated: it has no end mark after {tar.offset:,} bytes; write it again.")
