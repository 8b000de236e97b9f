"""Open an archive that nobody vouches for: all is checked against the manifest before anything parses it.

Only names, sizes and hashes are looked at here; nothing is unpickled, loaded or run.
"""

import hashlib
import json
import shutil
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from evernear.errors import IntegrityError
from evernear.release.manifest import PartName, ReleaseManifest, parse_manifest
from evernear.store import disk_errors, sha256_file

ARCHIVE_FILE = "release.mar"
MANIFEST_FILE = "manifest.json"
TORCHSERVE_MANIFEST_FILE = "MAR-INF/MANIFEST.json"
HANDLER_FILE = "handler.py"
PREPROCESSING_FILE = "preprocessing.json"
SMOKE_FILE = "smoke.json"
VERDICT_FILE = "verdict.json"
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_RELEASE_BYTES = 16 * 2**30
_CHUNK_BYTES = 2**20


class SmokeQuery(BaseModel):
    """An image of the query split and what the release answered for it when it was archived."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: PartName
    label: str
    pred: str
    dist: float
    unknown: bool


_SMOKE = TypeAdapter(tuple[SmokeQuery, ...])


@dataclass(frozen=True)
class ReleaseParts:
    """A release whose files, in ``directory``, are the ones that its manifest names."""

    manifest: ReleaseManifest
    directory: Path

    def smoke_queries(self) -> list[tuple[bytes, SmokeQuery]]:
        """Images (PNG) and their known answers."""
        queries = _SMOKE.validate_json((self.directory / SMOKE_FILE).read_bytes())
        return [(self.read(query.file), query) for query in queries]

    def read(self, name: str) -> bytes:
        """The content of a part.

        Raises:
            IntegrityError: the release has no such part.
        """
        if name not in self.manifest.parts:
            raise IntegrityError(f"Release {self.manifest.version} has no part {name!r}.")
        return (self.directory / name).read_bytes()


def smoke_file(queries: tuple[SmokeQuery, ...]) -> bytes:
    """The content of `SMOKE_FILE`."""
    return _SMOKE.dump_json(queries, indent=2)


def open_parts(directory: Path) -> ReleaseParts:
    """An unpacked release, all parts checked.

    Raises:
        IntegrityError: it is no release, or a part is missing or was changed.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{directory} is no release: it holds no {MANIFEST_FILE} of a sound size.")
    manifest = parse_manifest(path.read_bytes(), str(path))
    for name, part in manifest.parts.items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != part.sha256:
            raise _changed(name, directory)
    return ReleaseParts(manifest, directory)


def open_release(archive: Path, out_dir: Path, max_size_bytes: int = MAX_RELEASE_BYTES) -> ReleaseParts:
    """Unpack a ``.mar`` into ``out_dir``, an empty or new directory; on failure nothing stays there.

    Raises:
        IntegrityError: it is no release archive; it holds a member that its manifest does not name, or one
            twice; a size or a hash does not match; it is larger than ``max_size_bytes``; or TorchServe would
            be told another version or handler than the manifest's.
        StoreError: ``out_dir`` cannot be written.
    """
    with disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as members, disk_errors(out_dir):
            manifest = _read_manifest(members, archive)
            _check_members(members, manifest, archive, max_size_bytes)
            for name in manifest.parts:
                _extract(members, name, manifest, archive, out_dir)
            (out_dir / MANIFEST_FILE).write_bytes(manifest.to_json())
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError, ValueError) as error:
        shutil.rmtree(out_dir, ignore_errors=True)
        raise IntegrityError(f"{archive} cannot be read as a release: {error}.") from None
    except BaseException:
        shutil.rmtree(out_dir, ignore_errors=True)
        raise
    return ReleaseParts(manifest, out_dir)


def read_release_manifest(archive: Path) -> ReleaseManifest:
    """The manifest of a ``.mar``; nothing else of it is looked at.

    Raises:
        IntegrityError: the archive cannot be read or holds no manifest.
    """
    try:
        with zipfile.ZipFile(archive) as members:
            return _read_manifest(members, archive)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise IntegrityError(f"{archive} cannot be read as a release: {error}.") from None


def _read_manifest(members: zipfile.ZipFile, archive: Path) -> ReleaseManifest:
    return parse_manifest(_read_small(members, MANIFEST_FILE, archive), f"{MANIFEST_FILE} in {archive}")


def _read_small(members: zipfile.ZipFile, name: str, archive: Path) -> bytes:
    try:
        with members.open(name) as member:
            data = member.read(MAX_MANIFEST_BYTES + 1)
    except KeyError:
        raise IntegrityError(f"{archive} is no release: it holds no {name}.") from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{name} in {archive} is larger than {MAX_MANIFEST_BYTES} bytes.")
    return data


def _check_members(members: zipfile.ZipFile, manifest: ReleaseManifest, archive: Path, max_size_bytes: int) -> None:
    infos = members.infolist()
    expected = {*manifest.parts, MANIFEST_FILE, TORCHSERVE_MANIFEST_FILE}
    found = [info.filename for info in infos]
    if sorted(found) != sorted(expected):
        odd = sorted(expected.symmetric_difference(found)) or ["a name twice"]
        raise IntegrityError(f"{archive} does not hold what its manifest names: {', '.join(odd[:3])}.")
    for info in infos:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise IntegrityError(f"{info.filename} in {archive} is not a plain file.")
        part = manifest.parts.get(info.filename)
        if part is not None and part.size_bytes != info.file_size:
            raise _changed(info.filename, archive)
    if sum(part.size_bytes for part in manifest.parts.values()) > max_size_bytes:
        raise IntegrityError(f"{archive} unpacks to more than {max_size_bytes} bytes.")
    _check_torchserve_manifest(_read_small(members, TORCHSERVE_MANIFEST_FILE, archive), manifest, archive)


def _check_torchserve_manifest(data: bytes, manifest: ReleaseManifest, archive: Path) -> None:
    """What TorchServe acts on must be what was checked: this version, this handler, nothing to install."""
    try:
        told: Any = json.loads(data)
        model: dict[str, Any] = told["model"]
        actual = (told["runtime"], model.pop("modelVersion"), model.pop("handler"), set(model))
    except (ValueError, KeyError, TypeError, AttributeError):
        actual = ()
    if actual != ("python", manifest.version, HANDLER_FILE, {"modelName"}):
        raise IntegrityError(f"{TORCHSERVE_MANIFEST_FILE} in {archive} does not describe {manifest.version}.")


def _extract(members: zipfile.ZipFile, name: str, manifest: ReleaseManifest, archive: Path, out_dir: Path) -> None:
    part = manifest.parts[name]
    digest = hashlib.sha256()
    left = part.size_bytes
    with members.open(name) as member, (out_dir / name).open("xb") as file:
        while chunk := member.read(_CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise _changed(name, archive)
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != part.sha256:
        raise _changed(name, archive)


def _changed(name: str, place: Path) -> IntegrityError:
    return IntegrityError(f"{name} in {place} is missing or not the file that its manifest describes.")
