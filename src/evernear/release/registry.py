"""Releases in the object store, and the pointer to the one that serves.

::

    releases/manifests/<version>.json    what the release is, and the sha256 of its archive; never overwritten
    releases/archives/<sha256>.mar       the archive
    releases/champion.json               the version that serves; moved by compare-and-swap
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from evernear.errors import Conflict, IntegrityError, StoreError
from evernear.release.manifest import ReleaseManifest, Sha256, Version, is_version
from evernear.store import Store, sha256_file

MANIFESTS = "releases/manifests/"
ARCHIVES = "releases/archives/"
CHAMPION = "releases/champion.json"


class Record(BaseModel):
    """One published release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: ReleaseManifest
    archive_sha256: Sha256
    archive_size_bytes: int

    @property
    def archive_key(self) -> str:
        """Where the archive lies in the store."""
        return f"{ARCHIVES}{self.archive_sha256}.mar"


class _Pointer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Version
    previous: Version | None
    since: AwareDatetime


@dataclass(frozen=True)
class Champion:
    """The release that serves. ``etag`` is the state of the pointer that a next move builds on."""

    version: str
    previous: str | None
    since: datetime
    etag: str


class Registry:
    """The releases of one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, archive: Path, manifest: ReleaseManifest) -> Record:
        """Keep a release for good; publishing the same one again changes nothing.

        Raises:
            Conflict: another archive has this version already.
        """
        record = Record(
            manifest=manifest, archive_sha256=sha256_file(archive), archive_size_bytes=archive.stat().st_size
        )
        key = f"{MANIFESTS}{manifest.version}.json"
        # The record comes last, and the archive is named by its content: no kill leaves half a release.
        self._store.put(record.archive_key, archive)
        try:
            self._store.put_if(key, record.model_dump_json(indent=2).encode(), None)
        except Conflict:
            if self.show(manifest.version) != record:
                raise Conflict(f"Another release of version {manifest.version} is published already.") from None
        return record

    def list(self) -> Iterator[str]:
        """All versions, oldest first."""
        for found in self._store.list(MANIFESTS):
            version = PurePosixPath(found.key).name.removesuffix(".json")
            if is_version(version):
                yield version

    def show(self, version: str) -> Record:
        """What is known of a release.

        Raises:
            StoreError: there is no such release.
            IntegrityError: its record is damaged.
        """
        key = f"{MANIFESTS}{version}.json"
        found = self._store.find(key) if is_version(version) else None
        if found is None:
            raise StoreError(f"There is no release {version} in {self._store.uri}.")
        try:
            return Record.model_validate_json(found[0])
        except ValidationError:
            raise IntegrityError(f"The record {key} in {self._store.uri} is damaged.") from None

    def fetch(self, version: str, path: Path) -> Record:
        """Bring a release's archive to ``path``, hash checked.

        Raises:
            StoreError: there is no such release.
            IntegrityError: the archive is not the one that was published.
        """
        record = self.show(version)
        self._store.fetch(record.archive_key, path, sha256=record.archive_sha256)
        return record

    def champion(self) -> Champion | None:
        """The release that serves; None before the first.

        Raises:
            IntegrityError: the pointer is damaged.
        """
        found = self._store.find(CHAMPION)
        if found is None:
            return None
        try:
            pointer = _Pointer.model_validate_json(found[0])
        except ValidationError:
            raise IntegrityError(f"{CHAMPION} in {self._store.uri} is damaged.") from None
        return Champion(pointer.version, pointer.previous, pointer.since, found[1])

    def set_champion(self, version: str, expected: Champion | None) -> Champion:
        """Make a published release the champion, if ``expected`` still is it.

        Raises:
            Conflict: the pointer has moved meanwhile; nothing was changed.
            StoreError: there is no such release.
        """
        self.show(version)
        previous = expected.version if expected else None
        pointer = _Pointer(version=version, previous=previous, since=datetime.now(UTC))
        try:
            etag = self._store.put_if(CHAMPION, pointer.model_dump_json().encode(), expected.etag if expected else None)
        except Conflict:
            raise Conflict(f"The champion changed while {version} was about to become it; run again.") from None
        return Champion(pointer.version, pointer.previous, pointer.since, etag)
