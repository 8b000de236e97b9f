"""Open an untrusted archive. Each part is checked against the manifest before it is parsed. This
module only handles names, sizes and hashes. It never unpickles, loads or runs any content."""

import hashlib
import json
import shutil
import struct
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evernear.common.disk import disk_errors, open_regular, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.output import printable
from evernear.embedding import OPENVINO_WEIGHTS_FILE
from evernear.errors import IntegrityError
from evernear.index.description import LABELS_FILE, VECTORS_FILE
from evernear.release.manifest import (
    HANDLER_FILE,
    MODEL_CONFIG_FILE,
    NETWORK_FILE,
    QUOTED_MAX,
    SMOKE_FILE,
    PartName,
    ReleaseManifest,
)

ARCHIVE_FILE = "release.mar"
MANIFEST_FILE = "manifest.json"
TORCHSERVE_MANIFEST_FILE = "MAR-INF/MANIFEST.json"
LARGE_PARTS = frozenset({NETWORK_FILE, OPENVINO_WEIGHTS_FILE, VECTORS_FILE, LABELS_FILE})
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_SMALL_PART_BYTES = 16 * 2**20
MAX_RELEASE_BYTES = 16 * 2**30
MAX_READ_BYTES = MAX_MANIFEST_BYTES + 1  # also limits the list of members; a release has about twenty
_CHUNK_BYTES = 2**20
_UTF8_NAME = 0x800  # the only flag allowed: members are not encrypted, and their sizes precede the data


class SmokeQuery(Frozen):
    """An image in the query split, and its prediction when the release was archived."""

    file: PartName
    label: str
    pred: str
    dist: float
    unknown: bool
    settled: bool
    """Whether the label and the unknown flag would stay the same if distances changed by the
    tolerance."""


_SMOKE = TypeAdapter(tuple[SmokeQuery, ...])


@dataclass(frozen=True)
class ReleaseParts:
    """An unpacked release whose files match its manifest."""

    manifest: ReleaseManifest
    directory: Path

    def smoke_queries(self) -> list[tuple[bytes, SmokeQuery]]:
        queries = _SMOKE.validate_json((self.directory / SMOKE_FILE).read_bytes())
        return [(self.read(query.file), query) for query in queries]

    def read(self, name: str) -> bytes:
        """Raises `IntegrityError` if the release has no such part."""
        if name not in self.manifest.parts:
            raise IntegrityError(f"Release {self.manifest.version} has no part {name!r}.")
        return (self.directory / name).read_bytes()


def smoke_file(queries: tuple[SmokeQuery, ...]) -> bytes:
    return _SMOKE.dump_json(queries, indent=2)


def open_parts(directory: Path) -> ReleaseParts:
    """Open an unpacked release and check every part."""
    path = directory / MANIFEST_FILE
    if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{directory} is not a release: {MANIFEST_FILE} is missing or too large.")
    manifest = ReleaseManifest.from_json(path.read_bytes(), str(path))
    for name, part in manifest.parts.items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != part.sha256:
            raise _corrupt(name, directory)
    return ReleaseParts(manifest, directory)


def open_release(archive: Path, out_dir: Path, max_size_bytes: int = MAX_RELEASE_BYTES) -> ReleaseParts:
    """Unpack a ``.mar`` file into ``out_dir``, which must be an empty or new directory. On failure,
    it is deleted.

    Raises:
        IntegrityError: the archive is not a release or too large, a member is unknown, duplicate or
            compressed, a size or a hash does not match, or TorchServe's manifest specifies another
            version or handler.
    """
    with disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with _checked(archive, max_size_bytes) as (members, manifest), disk_errors(out_dir):
            for name in manifest.parts:
                with (out_dir / name).open("xb") as file:
                    file.writelines(_content(members, name, manifest, archive))
            (out_dir / MANIFEST_FILE).write_bytes(manifest.to_json())
    except BaseException:
        shutil.rmtree(out_dir, ignore_errors=True)
        raise
    return ReleaseParts(manifest, out_dir)


def read_release(archive: Path) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """The manifest of a ``.mar`` file and its JSON parts, keyed by name. All parts are hashed.
    Nothing is written to disk. Raises `IntegrityError` like `open_release`."""
    with _checked(archive, MAX_RELEASE_BYTES) as (members, manifest):
        texts: dict[str, bytes] = {}
        for name in manifest.parts:
            content = _content(members, name, manifest, archive)
            if name.endswith(".json"):
                texts[name] = b"".join(content)
            else:
                for _ in content:
                    pass
    return manifest, texts


def read_part(archive: Path, name: str) -> bytes | None:
    """Read one small part of a ``.mar`` file, and check its hash. Return None if the release has no
    such part. Raises `IntegrityError` like `open_release`."""
    with _checked(archive, MAX_RELEASE_BYTES) as (members, manifest):
        return b"".join(_content(members, name, manifest, archive)) if name in manifest.parts else None


def read_release_manifest(archive: Path) -> ReleaseManifest:
    """The manifest of a ``.mar``. Its parts are not checked."""
    with _zip(archive) as members:
        return _read_manifest(members, archive)


@contextmanager
def _checked(archive: Path, max_size_bytes: int) -> Generator[tuple[zipfile.ZipFile, ReleaseManifest]]:
    """Open an archive, and check the names and sizes of its members, but not their contents,
    against its manifest."""
    with _zip(archive) as members:
        manifest = _read_manifest(members, archive)
        _check_members(members, manifest, archive, max_size_bytes)
        yield members, manifest


class _BoundedReader(BufferedReader):
    """Limits the size of each read. `zipfile` reads the whole list of members at once, and needs 20
    times its size in memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_READ_BYTES:
            raise zipfile.BadZipFile(f"its list of members has {size} bytes, more than {MAX_READ_BYTES}")
        return super().read(size)


@contextmanager
def _zip(archive: Path) -> Generator[zipfile.ZipFile]:
    try:
        with _BoundedReader(open_regular(archive).detach()) as file, zipfile.ZipFile(file) as members:
            yield members
    except (zipfile.BadZipFile, OSError, RuntimeError, EOFError, ValueError, struct.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise IntegrityError(f"{archive} cannot be read as a release: {printable(reason, QUOTED_MAX)}.") from None


def _read_manifest(members: zipfile.ZipFile, archive: Path) -> ReleaseManifest:
    return ReleaseManifest.from_json(_read_small(members, MANIFEST_FILE, archive), f"{MANIFEST_FILE} in {archive}")


def _read_small(members: zipfile.ZipFile, name: str, archive: Path) -> bytes:
    try:
        info = members.getinfo(name)
    except KeyError:
        raise IntegrityError(f"{archive} is not a release: {name} is missing.") from None
    _require_plain(info, archive)
    with members.open(info) as member:
        data = member.read(MAX_READ_BYTES)
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{name} in {archive} is larger than {MAX_MANIFEST_BYTES} bytes.")
    return data


def _check_members(members: zipfile.ZipFile, manifest: ReleaseManifest, archive: Path, max_size_bytes: int) -> None:
    infos = members.infolist()
    expected = {*manifest.parts, MANIFEST_FILE, TORCHSERVE_MANIFEST_FILE}
    names = [info.filename for info in infos]
    if sorted(names) != sorted(expected):
        mismatched = sorted(expected.symmetric_difference(names)) or ["a duplicate name"]
        quoted = ", ".join(printable(name, QUOTED_MAX) for name in mismatched[:3])
        raise IntegrityError(f"{archive} does not contain the files that its manifest names: {quoted}.")
    for info in infos:
        _require_plain(info, archive)
        part = manifest.parts.get(info.filename)
        if part is not None and part.size_bytes != info.file_size:
            raise _corrupt(info.filename, archive)
        if part is not None and info.filename not in LARGE_PARTS and part.size_bytes > MAX_SMALL_PART_BYTES:
            raise IntegrityError(f"{info.filename} in {archive} is larger than {MAX_SMALL_PART_BYTES} bytes.")
    if sum(info.file_size for info in infos) > max_size_bytes:
        raise IntegrityError(f"{archive} unpacks to more than {max_size_bytes} bytes.")
    _check_layout(members, archive)
    _check_torchserve_manifest(_read_small(members, TORCHSERVE_MANIFEST_FILE, archive), manifest, archive)


def _check_layout(members: zipfile.ZipFile, archive: Path) -> None:
    """Check that the file consists only of the listed members, in order, with the headers that
    `zipfile` writes. TorchServe uses Java's ``ZipInputStream``, which ignores the list at the end
    of the file, and would also unpack an unlisted member."""
    scattered = IntegrityError(f"{archive} must consist of its listed members only, one after another.")
    end = 0
    with open_regular(archive) as file:
        for info in members.infolist():
            bare = copy(info)
            bare.extra = b""
            headers = [bare.FileHeader(zip64) for zip64 in (False, True)]  # beyond 2 GiB: sizes in an extra field
            file.seek(end)
            start = file.read(len(headers[1]))
            header = next((header for header in headers if start.startswith(header)), None)
            if info.header_offset != end or header is None:
                raise scattered
            end += len(header) + info.file_size
    if end != members.start_dir:
        raise scattered


def _require_plain(info: zipfile.ZipInfo, archive: Path) -> None:
    name = printable(info.filename, QUOTED_MAX)
    # no decompression bombs: an uncompressed member cannot be larger than the archive
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ~_UTF8_NAME:
        raise IntegrityError(f"{name} in {archive} is compressed or encrypted.")


def _check_torchserve_manifest(data: bytes, manifest: ReleaseManifest, archive: Path) -> None:
    """Check that TorchServe's manifest specifies the release's version and handler, and no
    requirements to install."""
    try:
        described: Any = json.loads(data)
        model: dict[str, Any] = described["model"]
        actual = (
            described["runtime"],
            model.pop("modelVersion"),
            model.pop("handler"),
            model.pop("configFile"),
            set(model),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        actual = ()
    if actual != ("python", manifest.version, HANDLER_FILE, MODEL_CONFIG_FILE, {"modelName"}):
        raise IntegrityError(f"{TORCHSERVE_MANIFEST_FILE} in {archive} does not describe {manifest.version}.")


def _content(members: zipfile.ZipFile, name: str, manifest: ReleaseManifest, archive: Path) -> Iterator[bytes]:
    """The chunks of a part. After the last one, raise an error if the hash differs from the
    manifest's."""
    part = manifest.parts[name]
    digest = hashlib.sha256()
    with members.open(name) as member:
        while chunk := member.read(_CHUNK_BYTES):
            digest.update(chunk)
            yield chunk
    if digest.hexdigest() != part.sha256:
        raise _corrupt(name, archive)


def _corrupt(name: str, path: Path) -> IntegrityError:
    return IntegrityError(f"{name} in {path} is missing or does not match the manifest.")
