"""Releases in the object store, and the pointer to the champion, which is the live release.

::

    releases/manifests/<version>.json    description of the release, sha256 of its archive; never overwritten
    releases/archives/<sha256>.mar       the archive
    releases/champion.json               the version of the champion; moved by compare-and-swap
    releases/history/<number>.json       every state of the pointer; never overwritten
    releases/pruned/<version>.json       the record of a release whose archive was deleted, compressed with gzip
"""  # noqa: W505

import logging
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath

from evernear.common.disk import sha256_file
from evernear.common.store import Store
from evernear.common.store.base import owner_of
from evernear.common.store.patience import patient
from evernear.errors import ConflictError, IntegrityError, MissingObjectError, StoreError
from evernear.index.description import collection_owner
from evernear.release.archive_reader import read_release_manifest
from evernear.release.manifest import is_version
from evernear.release.promotions import Cause, Champion, ChampionPointer, How, Promotion
from evernear.release.records import ARCHIVES, MANIFESTS, PRUNED, Record, describe_archive, record_key

_log = logging.getLogger(__name__)


class Registry:
    """The releases of one store.

    Every method may raise `StoreError`, if the store fails or a named release does not exist or was
    pruned, and `IntegrityError` for a damaged record, archive or champion pointer. Methods that
    take the ``expected`` champion raise `ConflictError` if another process moved the pointer in the
    meantime. Nothing was changed then. If the store is unreachable, they wait for it
    (`evernear.common.store.patience`). After a `TransientStoreError`, the pointer may have moved.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.uri = store.uri
        self.pointer = ChampionPointer(store)

    def publish(self, archive: Path) -> Record:
        """Add a release. Publishing it again changes nothing.

        Raises:
            ConflictError: another archive of this version is published, or one was pruned.
        """
        record = describe_archive(archive)
        manifest = record.manifest
        key = record_key(MANIFESTS, manifest.version)
        if self.store.find(record_key(PRUNED, manifest.version)):
            raise ConflictError(f"Release {manifest.version} was pruned, and a version is never reused.")
        # the record is written last, so a killed process leaves no incomplete release
        self.store.put(record.archive_key, archive)
        try:
            self.store.put_if(key, record.to_json(), None)
        except ConflictError:
            if self.get(manifest.version).archive_sha256 != record.archive_sha256:
                raise ConflictError(f"Another release of version {manifest.version} is already published.") from None
        return record

    def list(self, *, include_pruned: bool = False) -> Iterator[str]:
        """All versions, oldest first. A version with a date after tomorrow sorts first, because the
        clock of its machine must have been set back after the release was created."""
        folders = (MANIFESTS, PRUNED) if include_pruned else (MANIFESTS,)
        names = {PurePosixPath(entry.key).stem for folder in folders for entry in self.store.list(folder)}
        tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%Y%m%d.%H%M%S}"  # other machines' clocks may be ahead
        yield from sorted(filter(is_version, names), key=lambda version: (version < tomorrow, version))

    def get(self, version: str, *, include_pruned: bool = False) -> Record:
        record = self._record(MANIFESTS, version)
        if record is not None:
            return record
        pruned = self._record(PRUNED, version)
        if pruned is not None and include_pruned:
            return pruned
        fault = "was pruned" if pruned else f"does not exist in {self.store.uri}"
        champion = self.champion()
        if champion is not None and champion.version == version:
            remedy = ", although it is the champion; promote another one with `evernear registry promote VERSION`."
        else:
            remedy = ". `evernear registry list` shows the releases."
        raise MissingObjectError(f"Release {version} {fault}{remedy}")

    def find(self, version: str) -> Record | None:
        """The record of a release, which may be pruned, or None if the store has none."""
        return self._record(MANIFESTS, version) or self._record(PRUNED, version)

    def records(self, *, include_pruned: bool = False) -> tuple[dict[str, Record], dict[str, str]]:
        """The records of all releases, and the error message for each damaged record, keyed by
        version in the order of `list`."""
        records: dict[str, Record] = {}
        faults: dict[str, str] = {}
        for version in self.list(include_pruned=include_pruned):
            try:
                records[version] = self.get(version, include_pruned=include_pruned)
            except IntegrityError as error:
                faults[version] = str(error)
        return records, faults

    def rebuild_record(self, version: str) -> None:
        """Rewrite the missing or damaged record of a release from its archive."""
        described = {record.archive_sha256 for record in self.records()[0].values()}
        with tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch:
            archive = Path(scratch) / "release.mar"
            for info in self.store.list(ARCHIVES):
                if (sha256 := PurePosixPath(info.key).stem) not in described:
                    with suppress(IntegrityError):  # this archive is damaged
                        self.store.fetch(info.key, archive, sha256)
                        record = describe_archive(archive)
                        if record.manifest.version == version:
                            self.store.put(record_key(MANIFESTS, version), record.to_json())
                            return
        raise IntegrityError(f"No archive in {self.store.uri} is intact and of the version {version}.")

    def owns(self, collection: str) -> bool:
        return collection_owner(collection) == owner_of(self.store)

    def is_published(self, version: str) -> bool:
        """Whether the release can be promoted: it exists and was not pruned."""
        return self.store.find(record_key(MANIFESTS, version)) is not None

    def contains(self, archive: Path) -> bool:
        """Whether ``archive`` is identical to a published release that was not pruned."""
        record = self._record(MANIFESTS, read_release_manifest(archive).version)
        return record is not None and record.archive_sha256 == sha256_file(archive)

    def fetch(self, version: str, path: Path) -> Record:
        """Download a release's archive to ``path`` and check its hash."""
        record = self.get(version)
        self.store.fetch(record.archive_key, path, sha256=record.archive_sha256)
        return record

    def explain_no_champion(self) -> str:
        versions = [*self.list()]
        if not versions:
            return f"No release has been promoted in {self.uri} yet; run `evernear run` first."
        newest, store = versions[-1], shlex.quote(self.uri)
        force = "" if self.get(newest).verdict.promote else " --force"
        return (
            f"No release has been promoted in {self.uri} yet. `evernear registry show {newest} --store {store}` shows "
            f"the verdict on the newest, and `evernear registry promote {newest}{force} --why REASON --store {store}` "
            "promotes it."
        )

    def require_champion(self) -> Champion:
        """The champion, which must exist."""
        champion = self.champion()
        if champion is None:
            raise StoreError(self.explain_no_champion())
        return champion

    def champion(self) -> Champion | None:
        """The champion, or None before the first promotion."""
        return self.pointer.find()

    def restore(self, version: str | None = None, cause: Cause | None = None) -> Champion:
        """Rewrite the lost or damaged champion pointer as a new promotion of ``version``. It
        defaults to the newest promotion in the history, whose rollback target then stays the same.

        Raises:
            StoreError: also if the pointer is intact, or the history contains no release.
        """
        damaged_etag = self.pointer.etag_if_damaged()
        highest, newest = self.pointer.newest_in_history()
        if version is None:
            if newest is None:
                raise StoreError(
                    f"The history in {self.store.uri} names no release; run `evernear registry restore VERSION`. "
                    "`evernear registry list` shows the versions."
                )
            version = newest.version
        if not self.is_published(version):
            raise MissingObjectError(f"Release {version} does not exist in {self.store.uri}, or was pruned.")
        previous, undo_to = (newest.version, newest.number) if newest else (None, None)
        anchor = (newest.anchor or newest.version) if newest else None
        if newest is not None and newest.version == version:
            previous, undo_to = newest.previous, newest.undo_to
        anchor = anchor if anchor and self.is_published(anchor) else None
        promotion = _promotion(version, "restore", highest + 1, previous, undo_to, anchor, cause)
        return self.pointer.write_again(promotion, damaged_etag)

    def set_champion(
        self,
        version: str,
        expected: Champion | None,
        how: How = "deploy",
        cause: Cause | None = None,
        anchor: str | None = None,
    ) -> Champion:
        """If the champion is still ``expected``, make a published release the champion. ``anchor``
        replaces the anchor. ``cause`` defaults to the user and host of this process."""
        if expected is None:
            promotion = _promotion(version, how, 1, None, None, anchor, cause)
        else:
            number = expected.pointer.number
            promotion = _promotion(version, how, number + 1, expected.version, number, anchor or expected.anchor, cause)
        return self._promote(promotion, expected)

    def record_settings(self, expected: Champion, cause: Cause | None = None) -> Champion:
        """If the champion is still ``expected``, record that its settings changed. Rollbacks skip
        this entry."""
        return self._record_again(expected, "apply", expected.anchor, cause)

    def set_anchor(self, version: str, expected: Champion, cause: Cause | None = None) -> Champion:
        """If the champion is still ``expected``, make a published release the anchor. Rollbacks
        skip this entry."""
        self.get(version)
        if version == expected.anchor:
            raise StoreError(f"Release {version} is the anchor already.")
        if version in expected.pointer.pruning:
            raise StoreError(f"Release {version} is being pruned from {self.store.uri}.")
        return self._record_again(expected, "anchor", version, cause)

    def _record_again(self, expected: Champion, how: How, anchor: str, cause: Cause | None) -> Champion:
        pointer = expected.pointer
        promotion = _promotion(
            pointer.version, how, pointer.number + 1, pointer.previous, pointer.undo_to, anchor, cause
        )
        return self._promote(promotion, expected)

    def roll_back(self, expected: Champion, cause: Cause | None = None) -> Champion:
        """If the champion is still ``expected``, restore its predecessor.

        A second rollback undoes the preceding promotion, and never restores a release that the
        previous rollback replaced. If the history entry of a promotion is lost, the promotion has
        no predecessor. The anchor changes only if it is the replaced release. The previous anchor
        is then restored.
        """
        undo_to = expected.pointer.undo_to
        restored = self.pointer.find_in_history(undo_to) if undo_to is not None else None
        previous, before = (restored.previous, restored.undo_to) if restored else (None, None)
        anchor = self._anchor_after_rollback(expected, restored)
        number = expected.pointer.number + 1
        promotion = _promotion(expected.rollback_target(), "rollback", number, previous, before, anchor, cause)
        return self._promote(promotion, expected)

    def _anchor_after_rollback(self, expected: Champion, restored: Promotion | None) -> str | None:
        if expected.anchor != expected.version:
            return expected.anchor
        anchor = restored.anchor if restored else None
        return anchor if anchor and self.is_published(anchor) else None

    def history(self) -> Iterator[Promotion]:
        return self.pointer.history()

    def _promote(self, promotion: Promotion, expected: Champion | None) -> Champion:
        """The release may already be live, so this waits for the store also outside of a step."""
        with patient(_log.warning):
            self.get(promotion.version)
            return self.pointer.move(promotion, expected)

    def _record(self, folder: str, version: str) -> Record | None:
        key = record_key(folder, version)
        entry = self.store.find(key) if is_version(version) else None
        return Record.from_json(entry[0], f"The record {key} in {self.store.uri}") if entry else None


def _promotion(
    version: str,
    how: How,
    number: int,
    previous: str | None,
    undo_to: int | None,
    anchor: str | None,
    cause: Cause | None,
) -> Promotion:
    """A promotion by ``cause``, now."""
    who = (cause or Cause.of_this_process()).model_dump()
    since = datetime.now(UTC)
    return Promotion(
        version=version, how=how, number=number, previous=previous, undo_to=undo_to, anchor=anchor, since=since, **who
    )
