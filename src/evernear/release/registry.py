"""Releases in the object store, and the pointer to the champion, the live release.

::

    releases/manifests/<version>.json    description of the release, sha256 of its archive; never overwritten
    releases/archives/<sha256>.mar       the archive
    releases/champion.json               the version of the champion; moved by compare-and-swap
    releases/history/<number>.json       every state of the pointer; never overwritten
    releases/pruned/<version>.json       the record of a release whose archive was deleted, compressed with gzip
"""

import getpass
import gzip
import logging
import shlex
import socket
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from pydantic import AwareDatetime, Field

from evernear.common.disk import sha256_file
from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.common.store.identity import owner_of
from evernear.errors import ConflictError, IntegrityError, StoreError, TransientStoreError
from evernear.evaluation.verdict import Verdict
from evernear.index.description import Collection as VectorCollection
from evernear.plugins import index_backend
from evernear.release.archive_reader import read_release, read_release_manifest
from evernear.release.manifest import VERDICT_FILE, ReleaseManifest, Sha256, Version, is_version

RELEASES = "releases/"
MANIFESTS = f"{RELEASES}manifests/"
ARCHIVES = "releases/archives/"
CHAMPION = "releases/champion.json"
HISTORY = "releases/history/"
PRUNED = "releases/pruned/"
_GZIP = b"\x1f\x8b"
"""The first bytes of gzip."""
CHAMPION_ALONE = "is the champion; servers load it when they start"
"""The state of a release that was promoted in the registry without a server."""
How = Literal["deploy", "promote", "force", "apply", "anchor", "rollback", "restore"]

# The release is live before the pointer moves, and a store may take minutes to restart.
_RETRY_TIMEOUT_S = 300.0
_PAUSE_S = (1.0, 15.0)
# The etag of a superseded state of the pointer: no update from it can succeed.
_SUPERSEDED = "superseded"
_log = logging.getLogger(__name__)


class Decision(Frozen):
    """Summary of the verdict. The archive contains the full one."""

    promote: bool
    reasons: tuple[str, ...]


class Record(Frozen):
    """One published release."""

    remedy = "run `evernear store check --repair`"

    manifest: ReleaseManifest
    archive_sha256: Sha256
    archive_size_bytes: int
    verdict: Decision

    @property
    def archive_key(self) -> str:
        """The key of the archive in the store."""
        return f"{ARCHIVES}{self.archive_sha256}.mar"

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str, remedy: str | None = None) -> Self:
        """As `Frozen.from_json`; records of pruned releases are compressed, except those of earlier versions."""
        if isinstance(data, bytes) and data.startswith(_GZIP):
            with suppress(OSError, EOFError, zlib.error):  # it is damaged, and no JSON either
                data = gzip.decompress(data)
        return super().from_json(data, source, remedy)


class Cause(Frozen):
    """Why the champion changes: who or what decided it, the reason, and the pipeline run that did it."""

    by: str
    why: str = ""
    run: str = ""
    """The ID of the pipeline run; empty for a command."""

    @classmethod
    def of_this_process(cls, why: str = "") -> "Cause":
        """The user and host of this process; see `whoami`."""
        return cls(by=whoami(), why=why)


class Promotion(Frozen):
    """A state of the champion's pointer and its cause. ``previous`` is the target of a rollback."""

    remedy = "`evernear registry promote VERSION` makes a release the champion without it"

    version: Version
    previous: Version | None
    since: AwareDatetime
    number: int = Field(default=1, ge=1)
    """The sequence number of the promotion, from 1."""
    undo_to: int | None = None
    """The number of the promotion that a rollback restores; None if no promotion precedes the current one."""
    anchor: Version | None = None
    """The release that the gate also compares candidates with. None: ``version``, as after the first promotion."""
    how: How = "deploy"
    by: str = ""
    why: str = ""
    run: str = ""
    """The ID of the pipeline run; empty for a command."""


class _Pointer(Promotion):
    """The object at `CHAMPION`: the last promotion, and the releases that are being pruned.

    A prune writes them here before it removes anything. A process that read the pointer earlier then loses the
    compare-and-swap, so it cannot promote a release that is about to be removed. The next prune finishes a killed one.
    ``prunes`` counts prunes, so that the object never returns to an earlier content (etag).
    """

    remedy = "run `evernear registry restore`"

    pruning: dict[Version, Sha256] = {}
    """Releases whose record and archive are being removed, and the sha256 of the archive."""
    prunes: int = 0


@dataclass(frozen=True)
class Champion:
    """The champion. ``etag`` identifies the state of the pointer that the next update replaces."""

    pointer: _Pointer
    etag: str

    @property
    def version(self) -> str:
        """The version of the champion."""
        return self.pointer.version

    @property
    def previous(self) -> str | None:
        """The target of a rollback."""
        return self.pointer.previous

    def rollback_target(self) -> str:
        """The version that a rollback restores.

        Raises:
            StoreError: no previous champion exists.
        """
        if self.previous is None:
            raise StoreError(f"There is nothing to roll back to: {self.version} has no previous champion.")
        return self.previous

    @property
    def anchor(self) -> str:
        """The version of the anchor, the release that the gate also compares candidates with."""
        return self.pointer.anchor or self.version

    @property
    def promotion(self) -> Promotion:
        """How it became the champion."""
        return Promotion.model_validate(self.pointer.model_dump(include=set(Promotion.model_fields)))


def whoami() -> str:
    """``user@host`` of this process, for the history."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without an entry in passwd
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


class Registry:
    """The releases of one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri

    def publish(self, archive: Path) -> Record:
        """Add a release. Publishing the same one again changes nothing.

        Raises:
            ConflictError: another archive has this version, or a release of this version was pruned.
            IntegrityError: the archive is not a valid release.
        """
        record = _describe(archive)
        manifest = record.manifest
        key = _key(MANIFESTS, manifest.version)
        if self._store.find(_key(PRUNED, manifest.version)):
            raise ConflictError(f"Release {manifest.version} was pruned, and a version is never reused.")
        # The archive is named by its content and the record is written last, so a killed publish leaves no release.
        self._store.put(record.archive_key, archive)
        try:
            self._store.put_if(key, record.to_json(), None)
        except ConflictError:
            if self.get(manifest.version).archive_sha256 != record.archive_sha256:
                raise ConflictError(f"Another release of version {manifest.version} is already published.") from None
        return record

    def list(self, *, include_pruned: bool = False) -> Iterator[str]:
        """All versions, oldest first; with ``include_pruned`` also of pruned releases.

        A version that is dated after tomorrow is older than the others: its machine's clock was set back since.
        """
        folders = (MANIFESTS, PRUNED) if include_pruned else (MANIFESTS,)
        names = {PurePosixPath(entry.key).stem for folder in folders for entry in self._store.list(folder)}
        tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%Y%m%d.%H%M%S}"  # other machines' clocks may be ahead
        yield from sorted(filter(is_version, names), key=lambda version: (version < tomorrow, version))

    def get(self, version: str, *, include_pruned: bool = False) -> Record:
        """The record of a release, with ``include_pruned`` also of a pruned one.

        Raises:
            StoreError: the release does not exist, or was pruned.
            IntegrityError: its record is damaged.
        """
        record = self._record(MANIFESTS, version)
        if record is not None:
            return record
        pruned = self._record(PRUNED, version)
        if pruned is not None and include_pruned:
            return pruned
        fault = "was pruned" if pruned else f"does not exist in {self._store.uri}"
        champion = self.champion()
        if champion is not None and champion.version == version:
            fault += ", although it is the champion; promote another one with `evernear registry promote VERSION`"
        raise StoreError(f"Release {version} {fault}.")

    def find(self, version: str) -> Record | None:
        """The record of a release, also of a pruned one; None if the store has neither.

        Raises:
            IntegrityError: the record is damaged.
        """
        return self._record(MANIFESTS, version) or self._record(PRUNED, version)

    def records(self, *, include_pruned: bool = False) -> tuple[dict[str, Record], dict[str, str]]:
        """The records of all releases by version, in the order of `list`, and the faults of those that are damaged."""
        records: dict[str, Record] = {}
        faults: dict[str, str] = {}
        for version in self.list(include_pruned=include_pruned):
            try:
                records[version] = self.get(version, include_pruned=include_pruned)
            except IntegrityError as error:
                faults[version] = str(error)
        return records, faults

    def rebuild_record(self, version: str) -> None:
        """Write the missing or damaged record of a release again, from its archive.

        Raises:
            IntegrityError: the store has no archive of this version.
        """
        described = {record.archive_sha256 for record in self.records()[0].values()}
        with tempfile.TemporaryDirectory(prefix="evernear-repair-") as scratch:
            archive = Path(scratch) / "release.mar"
            for info in self._store.list(ARCHIVES):
                if (sha256 := PurePosixPath(info.key).stem) not in described:
                    with suppress(IntegrityError):  # this archive is damaged
                        self._store.fetch(info.key, archive, sha256)
                        record = _describe(archive)
                        if record.manifest.version == version:
                            self._store.put(_key(MANIFESTS, version), record.to_json())
                            return
        raise IntegrityError(f"No archive in {self._store.uri} is intact and of the version {version}.")

    def owns(self, collection: VectorCollection) -> bool:
        """Whether a collection belongs to this store, or may: collections of earlier versions do not say."""
        return collection.owner in (None, owner_of(self._store))

    def is_published(self, version: str) -> bool:
        """Whether the release can be promoted: it exists, and was not pruned."""
        return self._store.find(_key(MANIFESTS, version)) is not None

    def contains(self, archive: Path) -> bool:
        """Whether ``archive`` is byte for byte a published release that was not pruned.

        Raises:
            IntegrityError: it is not a release.
        """
        record = self._record(MANIFESTS, read_release_manifest(archive).version)
        return record is not None and record.archive_sha256 == sha256_file(archive)

    def fetch(self, version: str, path: Path) -> Record:
        """Download a release's archive to ``path`` and check its hash.

        Raises:
            StoreError: the release does not exist, or was pruned.
            IntegrityError: the archive is not the one that was published.
        """
        record = self.get(version)
        self._store.fetch(record.archive_key, path, sha256=record.archive_sha256)
        return record

    def explain_no_champion(self) -> str:
        """Explain that there is no champion, and which command changes that."""
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

    def champion(self) -> Champion | None:
        """The champion; None before the first promotion.

        Raises:
            IntegrityError: the pointer is damaged or lost.
        """
        entry = self._store.find(CHAMPION)
        if entry is None and next(iter(self._store.list(HISTORY)), None) is not None:
            entry = self._store.find(CHAMPION)  # the first promotion may have happened between the two requests
            if entry is None:
                raise IntegrityError(
                    f"{CHAMPION} does not exist in {self._store.uri}, although releases were promoted there; "
                    f"{_Pointer.remedy}."
                )
        if entry is None:
            return None
        return Champion(_Pointer.from_json(entry[0], f"{CHAMPION} in {self._store.uri}"), entry[1])

    def restore(self, version: str | None = None, cause: Cause | None = None) -> Champion:
        """Write the lost or damaged pointer again, as a new promotion of ``version``.

        The default is the release of the newest promotion in the history. A rollback then leads where it led before.

        Raises:
            StoreError: the pointer is intact, the history names no release, or the release does not exist.
            ConflictError: another process wrote the pointer in the meantime; nothing was changed.
        """
        stored = self._store.find(CHAMPION)
        if stored is not None:
            with suppress(IntegrityError):
                pointer = _Pointer.from_json(stored[0], CHAMPION)
                raise StoreError(f"The champion is {pointer.version}, and its pointer is intact: nothing to restore.")
        highest, newest = self._newest_promotion()
        if version is None:
            if newest is None:
                raise StoreError(
                    f"The history in {self._store.uri} names no release; run `evernear registry restore VERSION`. "
                    "`evernear registry list` shows the versions."
                )
            version = newest.version
        if not self.is_published(version):
            raise StoreError(f"Release {version} does not exist in {self._store.uri}, or was pruned.")
        previous, undo_to = (newest.version, newest.number) if newest else (None, None)
        anchor = (newest.anchor or newest.version) if newest else None
        if newest is not None and newest.version == version:
            previous, undo_to = newest.previous, newest.undo_to
        promotion = Promotion(
            version=version,
            previous=previous,
            since=datetime.now(UTC),
            number=highest + 1,
            undo_to=undo_to,
            anchor=anchor if anchor and self.is_published(anchor) else None,
            how="restore",
            **(cause or Cause.of_this_process()).model_dump(),
        )
        pointer = _Pointer.model_validate(promotion.model_dump())
        etag = self._store.put_if(CHAMPION, pointer.to_json(), stored[1] if stored else None)
        self._record_in_history(promotion)
        return Champion(pointer, etag)

    def _newest_promotion(self) -> tuple[int, Promotion | None]:
        """The highest number in the history, and the newest promotion in it that can be read."""
        highest, newest = 0, None
        for entry in self._store.list(HISTORY):
            if (name := PurePosixPath(entry.key).stem).isdecimal():
                highest = max(highest, int(name))
                newest = self._find_in_history(int(name)) or newest
        return highest, newest

    def set_champion(
        self,
        version: str,
        expected: Champion | None,
        how: How = "deploy",
        cause: Cause | None = None,
        anchor: str | None = None,
    ) -> Champion:
        """Make a published release the champion, if the champion is still ``expected``. ``anchor`` replaces the anchor.

        ``cause`` (default: this process) is recorded in the history. An unreachable store is retried for 5 minutes.

        Raises:
            ConflictError: the pointer moved in the meantime; nothing was changed.
            TransientStoreError: the store cannot be reached; the pointer may have moved.
            StoreError: the release does not exist, or is being pruned.
        """
        promotion = Promotion(
            version=version,
            previous=expected.version if expected else None,
            since=datetime.now(UTC),
            number=expected.pointer.number + 1 if expected else 1,
            undo_to=expected.pointer.number if expected else None,
            anchor=anchor or (expected.anchor if expected else None),
            how=how,
            **(cause or Cause.of_this_process()).model_dump(),
        )
        return self._move_pointer(promotion, expected)

    def record_settings(self, expected: Champion, cause: Cause | None = None) -> Champion:
        """Record that the champion got other settings, if the champion is still ``expected``; rollbacks pass over it.

        Raises:
            ConflictError, TransientStoreError, StoreError: as in `set_champion`.
        """
        return self._record_again(expected, "apply", expected.anchor, cause)

    def set_anchor(self, version: str, expected: Champion, cause: Cause | None = None) -> Champion:
        """Make a published release the anchor, if the champion is still ``expected``; rollbacks pass over it.

        Raises:
            StoreError: the release does not exist, is being pruned, or is the anchor already.
            ConflictError, TransientStoreError: as in `set_champion`.
        """
        self.get(version)
        if version == expected.anchor:
            raise StoreError(f"Release {version} is the anchor already.")
        if version in expected.pointer.pruning:
            raise StoreError(f"Release {version} is being pruned from {self._store.uri}.")
        return self._record_again(expected, "anchor", version, cause)

    def _record_again(self, expected: Champion, how: How, anchor: str, cause: Cause | None) -> Champion:
        promotion = Promotion(
            version=expected.version,
            previous=expected.previous,
            since=datetime.now(UTC),
            number=expected.pointer.number + 1,
            undo_to=expected.pointer.undo_to,
            anchor=anchor,
            how=how,
            **(cause or Cause.of_this_process()).model_dump(),
        )
        return self._move_pointer(promotion, expected)

    def roll_back(self, expected: Champion, cause: Cause | None = None) -> Champion:
        """Restore the champion before ``expected``, if the champion is still ``expected``.

        A rollback undoes the last promotion, and a second one the promotion before it: it never returns to the release
        that it just left. Nothing precedes a promotion whose entry in the history is lost. An unreachable store is
        retried for 5 minutes. The anchor stays, unless it is the release that is left: then it is the one that was the
        anchor before.

        Raises:
            ConflictError: the pointer moved in the meantime; nothing was changed.
            TransientStoreError: the store cannot be reached; the pointer may have moved.
            StoreError: no previous champion exists, or it was pruned.
        """
        undo_to = expected.pointer.undo_to
        restored = self._find_in_history(undo_to) if undo_to is not None else None
        promotion = Promotion(
            version=expected.rollback_target(),
            previous=restored.previous if restored else None,
            since=datetime.now(UTC),
            number=expected.pointer.number + 1,
            undo_to=restored.undo_to if restored else None,
            anchor=self._anchor_after_rollback(expected, restored),
            how="rollback",
            **(cause or Cause.of_this_process()).model_dump(),
        )
        return self._move_pointer(promotion, expected)

    def _anchor_after_rollback(self, expected: Champion, restored: Promotion | None) -> str | None:
        if expected.anchor != expected.version:
            return expected.anchor
        anchor = restored.anchor if restored else None
        return anchor if anchor and self.is_published(anchor) else None

    def history(self) -> Iterator[Promotion]:
        """All promotions and rollbacks that can be read, oldest first. The last one is the current state."""
        champion = self.champion()
        if champion is None:
            return
        for entry in self._store.list(HISTORY):
            if entry.key < _history_key(champion.pointer.number):  # the current state is listed as well
                with suppress(IntegrityError):  # `evernear store check` names it
                    yield Promotion.from_json(self._store.get(entry.key), f"{entry.key} in {self._store.uri}")
        yield champion.promotion

    def prune(self, keep: int) -> tuple[str, ...]:
        """Remove all but the newest ``keep`` releases; returns the removed versions.

        `surplus` says which. The records of removed releases remain available to `get` with
        ``include_pruned``. Collections in Milvus that no remaining release names are deleted.

        Raises:
            ConflictError: the champion changed in the meantime; nothing was removed.
            StoreError: Milvus is unreachable; run it again.
        """
        champion = self.champion()
        return self._prune(self._surplus(keep, champion), champion) if champion else ()

    def surplus(self, keep: int) -> tuple[str, ...]:
        """The versions that `prune` would remove.

        The champion, its parent, the target of a rollback and the anchor are never removed, nor is a release whose
        record is damaged; without a champion, nothing is.
        """
        champion = self.champion()
        if champion is None:
            return ()
        return tuple(sorted({*self._surplus(keep, champion), *champion.pointer.pruning}))

    def _surplus(self, keep: int, champion: Champion) -> tuple[str, ...]:
        records, faults = self.records()
        versions = [*records]
        parent = self.get(champion.version).manifest.parent
        retained = {champion.version, champion.previous, champion.anchor, parent, *faults}
        retained.update(versions[max(0, len(versions) - keep) :])
        return tuple(version for version in versions if version not in retained)

    def remove(self, versions: Collection[str]) -> tuple[str, ...]:
        """Remove releases as `prune`, even targets of a rollback, but not the champion; returns the removed versions.

        If one of them is the anchor, the champion becomes the anchor.

        Raises:
            ConflictError: the champion is one of them, or changed in the meantime; nothing was removed.
            StoreError: there is no champion, or the store or Milvus fails; repeat it.
        """
        champion = self.champion()
        if not versions:
            return ()
        if champion is None:
            raise StoreError(f"Releases are removed only while another one is live. {self.explain_no_champion()}")
        if champion.version in versions:
            raise ConflictError(f"Release {champion.version} is the champion; promote another one first.")
        if champion.anchor in versions:
            cause = Cause.of_this_process(f"The anchor {champion.anchor} was removed.")
            champion = self.set_anchor(champion.version, champion, cause)
        return self._prune(versions, champion)

    def _prune(self, versions: Collection[str], champion: Champion) -> tuple[str, ...]:
        pruning = {version: self.get(version).archive_sha256 for version in versions}
        pruning |= champion.pointer.pruning  # left by a killed prune
        if not pruning:
            return ()
        champion = self._write(champion.pointer.model_copy(update={"pruning": pruning}), champion)
        records, faults = self.records()
        remaining = [record for version, record in records.items() if version not in pruning]
        shared = {record.archive_sha256 for record in remaining}
        used = [record.manifest.collection for record in remaining]
        for version, archive_sha256 in pruning.items():
            with suppress(IntegrityError):  # its record was damaged since a prune was killed
                collection = self.get(version, include_pruned=True).manifest.collection
                # A release whose record is damaged may use the same collection.
                if collection is not None and collection not in used and not faults:
                    self._drop(collection)
            self._remove(version, archive_sha256 if archive_sha256 not in shared else None)
        changes: dict[str, object] = {"pruning": {}, "prunes": champion.pointer.prunes + 1}
        with suppress(ConflictError):  # a concurrent promotion copied the list; the next prune finds nothing to remove
            self._write(champion.pointer.model_copy(update=changes), champion)
        return tuple(sorted(pruning))

    def _drop(self, collection: VectorCollection) -> None:
        """Delete a collection, unless it may belong to the store that this one was copied or moved from."""
        if self.owns(collection):
            with index_backend(collection.backend) as backend:
                backend.drop(collection)
        else:
            _log.warning(
                "The collection %s in %s is left, because the store was copied or moved since it was filled; drop it "
                "there if no other store needs it.",
                collection.name,
                collection.backend,
            )

    def _remove(self, version: str, archive_sha256: str | None) -> None:
        """Remove a release, and its archive unless ``archive_sha256`` is None. A killed removal can be repeated."""
        entry = self._store.find(_key(MANIFESTS, version))
        if entry is not None:
            # Every release that ever was leaves one; most of it are names and settings.
            self._store.put(_key(PRUNED, version), gzip.compress(entry[0], mtime=0))
        self._store.delete(_key(MANIFESTS, version))
        if archive_sha256 is not None:
            self._store.delete(f"{ARCHIVES}{archive_sha256}.mar")

    def _move_pointer(self, promotion: Promotion, expected: Champion | None) -> Champion:
        """Retry `_try_move_pointer` until the store can be reached, for at most `_RETRY_TIMEOUT_S`."""
        deadline_s, (pause_s, longest_s) = time.monotonic() + _RETRY_TIMEOUT_S, _PAUSE_S
        while True:
            try:
                return self._try_move_pointer(promotion, expected)
            except TransientStoreError as error:
                if time.monotonic() + pause_s > deadline_s:
                    raise
                _log.warning("The champion is not recorded yet: %s Retrying in %.0f s.", error, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _try_move_pointer(self, promotion: Promotion, expected: Champion | None) -> Champion:
        self.get(promotion.version)
        pointer = _Pointer.model_validate(promotion.model_dump())
        if expected is not None:
            if promotion.version in expected.pointer.pruning:
                raise StoreError(f"Release {promotion.version} is being pruned from {self._store.uri}.")
            # The current state is in the history before the pointer moves, so that a kill leaves no gap.
            self._record_in_history(expected.promotion)
            prune_state = {"pruning": expected.pointer.pruning, "prunes": expected.pointer.prunes}
            pointer = pointer.model_copy(update=prune_state)
        try:
            moved = self._write(pointer, expected)
        except ConflictError:
            # An earlier attempt may have moved the pointer although its response was lost. A later update by another
            # process has then added this one to the history.
            champion = self.champion()
            if champion is not None and champion.promotion == promotion:
                return champion
            past = self._store.find(_history_key(promotion.number))
            if (
                past
                and Promotion.from_json(past[0], f"{_history_key(promotion.number)} in {self._store.uri}") == promotion
            ):
                return Champion(pointer, _SUPERSEDED)
            raise
        with suppress(StoreError):  # the pointer has moved, and the next promotion records it
            self._record_in_history(promotion)
        return moved

    def _record_in_history(self, promotion: Promotion) -> None:
        with suppress(ConflictError):  # it is there already
            self._store.put_if(_history_key(promotion.number), promotion.to_json(), None)

    def _write(self, pointer: _Pointer, expected: Champion | None) -> Champion:
        try:
            etag = self._store.put_if(CHAMPION, pointer.to_json(), expected.etag if expected else None)
        except ConflictError:
            raise ConflictError(
                "The champion changed in the meantime, so nothing was done;"
                " see `evernear registry history` and run again."
            ) from None
        return Champion(pointer, etag)

    def _find_in_history(self, number: int) -> Promotion | None:
        """A promotion; None if its entry is missing or damaged."""
        key = _history_key(number)
        with suppress(IntegrityError):
            stored = self._store.find(key)
            return Promotion.from_json(stored[0], f"{key} in {self._store.uri}") if stored else None
        return None

    def _record(self, folder: str, version: str) -> Record | None:
        entry = self._store.find(_key(folder, version)) if is_version(version) else None
        return Record.from_json(entry[0], f"The record {_key(folder, version)} in {self._store.uri}") if entry else None


def _describe(archive: Path) -> Record:
    """The record of an archive."""
    manifest, texts = read_release(archive)
    verdict = Verdict.from_json(texts[VERDICT_FILE], f"{VERDICT_FILE} in {archive}")
    return Record(
        manifest=manifest,
        archive_sha256=sha256_file(archive),
        archive_size_bytes=archive.stat().st_size,
        verdict=Decision(promote=verdict.promote, reasons=tuple(verdict.reasons)),
    )


def _key(folder: str, version: str) -> str:
    return f"{folder}{version}.json"


def _history_key(number: int) -> str:
    return f"{HISTORY}{number:08d}.json"
