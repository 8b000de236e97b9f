"""Delete the unneeded objects that accumulate in a store with every run.

`surplus` only reads. `prune_store` removes old releases (`prune_releases`) and then deletes, in
this order:

- run records, except the newest records and records of runs that made a remaining release
- training checkpoints that are older than the newest release or than `RESUMABLE`
- parts and results of steps other than ingest, by the same rule as checkpoints
- cached embeddings, or cached backbone features for a frozen network, if no remaining release has
  the network or the shard begins with a removed image
- pretrained weights that no remaining release uses, by the same rule as checkpoints
- unfinished ingests that cannot be resumed, and snapshots, tables and shards that no document
  references (see `references`)
- archives without a release

A document is deleted before the objects that it references, so that a kill never leaves a document
that references a missing object. The next prune deletes the leftover objects. A prune and a
pipeline never run at the same time (see `evernear.common.lease`).

All other objects remain: the champion's history, the records of pruned releases, the audit log,
answers, requests, and the labels of live queries. `watch.query_retention_s` is the retention time
of logged queries and of images that were submitted for review.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

from evernear.common.frozen import Frozen
from evernear.common.lease import Lease, StoreRecord
from evernear.common.output import quantity
from evernear.common.parts import PARTS
from evernear.common.run_record import ABANDONED_AFTER, EXIT_STEP, RUNS, STARTING, RunRecord, may_be_active, this_host
from evernear.common.step_results import CHECKPOINTS
from evernear.common.store import ObjectInfo, Store
from evernear.data.repair import stored_digests
from evernear.data.snapshots import DATASETS, Snapshots
from evernear.data.tables import TABLES
from evernear.embedding.embeddings import EMBEDDINGS_PREFIX
from evernear.errors import BusyError, IntegrityError
from evernear.maintenance.kinds import require_all_current
from evernear.maintenance.references import RESUMABLE, Unreadable, datasets, references
from evernear.release.pruning import prune_releases, surplus_releases
from evernear.release.records import ARCHIVES, MANIFESTS, RELEASES
from evernear.release.registry import Registry
from evernear.settings.train import WEIGHTS_FOLDER

PUBLISHING = timedelta(hours=1)
"""Age up to which an archive without a release record may belong to a release that is being
published."""
_LISTED = (RUNS, CHECKPOINTS, PARTS, EMBEDDINGS_PREFIX, WEIGHTS_FOLDER, DATASETS, MANIFESTS, ARCHIVES)


class Surplus(Frozen):
    what: str
    why: str
    size_bytes: int
    keys: tuple[str, ...]


class Pruning(Frozen):
    """The objects that `prune_store` deletes or has deleted."""

    releases: tuple[str, ...]
    """Versions of removed releases. Their records remain, as pruned."""
    surplus: tuple[Surplus, ...]
    kept: tuple[str, ...]
    """One sentence for each damaged document that prevents a deletion."""
    size_bytes: int
    listed: int

    def __str__(self) -> str:
        objects = sum(len(group.keys) for group in self.surplus)
        return f"{objects:,} of {self.listed:,} objects, {self.size_bytes:,} bytes"


@dataclass(frozen=True)
class _Needs:
    keys: frozenset[str]
    folders: tuple[str, ...]
    """They may contain objects that a damaged document references, so all remain."""
    reasons: tuple[str, ...]

    def __contains__(self, key: str) -> bool:
        return key in self.keys or key.startswith(self.folders)


def surplus(store: Store, keep: int) -> Pruning:
    """List the objects that `prune_store` would delete now.

    Raises:
        IntegrityError: the pointer to the champion is damaged or lost.
        FormatError: another version of evernear wrote the store.
        StoreError: the store is unreachable.
    """
    require_all_current(store)
    return _plan(store, keep, surplus_releases(Registry(store), keep))


def prune_store(store: Store, keep: int, ended: Collection[str] = ()) -> Pruning:
    """Remove all but the newest ``keep`` releases and run records, and delete unneeded objects. If
    the process is killed, call the function again.

    ``ended`` lists runs that were killed on a different machine and therefore have no recorded end.

    Raises:
        BusyError: a run or another prune is in progress. Nothing was deleted.
        ConflictError: the champion changed during the call, or this process was suspended for too
            long. Repeat the call.
        IntegrityError: the pointer to the champion is damaged or lost.
        StoreError: the store or Milvus fails. Repeat the call.
    """
    require_all_current(store)
    with Lease(
        StoreRecord(store, f"`evernear store prune` (process {os.getpid()} on {this_host().partition('/')[0]})")
    ) as lease:
        if active := active_runs(store, ended):
            raise BusyError(_explain(active))
        missing, pruning = _missing(store), _plan(store, keep, surplus_releases(Registry(store), keep))
        lease.require()
        prune_releases(Registry(store), keep)
        for key in [key for group in _plan(store, keep, ()).surplus for key in group.keys]:
            lease.require()
            store.delete(key)
        _require_all(store, missing)
    return pruning


def active_runs(store: Store, ended: Collection[str] = ()) -> dict[str, datetime]:
    """The runs that may be in progress, with the time of each run's last activity."""
    last: dict[str, datetime] = {}
    at_exit = set[str]()
    for info in store.list(RUNS):
        run, _, rest = info.key.removeprefix(RUNS).partition("/")
        if rest.startswith("steps/"):
            last[run] = max(info.modified, last.get(run, info.modified))
        if rest == f"steps/{EXIT_STEP}.json":
            at_exit.add(run)
    now = datetime.now(UTC)
    recent = {run for run, at in last.items() if now - at < ABANDONED_AFTER}
    return {
        run: at
        for run, at in last.items()
        if run not in ended
        and (run in recent or run not in at_exit)  # other runs need not be read
        and _is_active(RunRecord(store, run), run in recent)
    }


def _is_active(record: RunRecord, is_recent: bool) -> bool:
    try:
        return may_be_active(record.steps(), is_recent=is_recent)
    except IntegrityError:
        return is_recent


def _explain(active: dict[str, datetime]) -> str:
    run, at = max(active.items(), key=lambda item: item[1])
    more = f" ({len(active) - 1} more)" if len(active) > 1 else ""
    return (
        f"Run {run}{more} is in progress, last heard of at {at:%Y-%m-%d %H:%M:%S} UTC, so nothing was deleted. Wait "
        f"until it has ended; if it was killed, run `evernear store prune --ended {run}`."
    )


def _plan(store: Store, keep: int, retired: Sequence[str]) -> Pruning:
    listing = {folder: list(store.list(folder)) for folder in _LISTED}
    needs = _needs(store, retired)
    records = {v: record for v, record in Registry(store).records()[0].items() if v not in retired}
    networks = {record.manifest.network_identity for record in records.values()}
    groups = [
        _runs(store, listing[RUNS], keep, set(records)),
        _checkpoints(listing[CHECKPOINTS], listing[MANIFESTS]),
        _parts(listing[PARTS], listing[MANIFESTS]),
        *_embeddings(store, listing[EMBEDDINGS_PREFIX], networks),
        _weights(listing[WEIGHTS_FOLDER], listing[MANIFESTS], {r.manifest.pretrained_sha256 for r in records.values()}),
        *_datasets(listing[DATASETS], needs),
        _archives(listing[ARCHIVES], needs, {Registry(store).get(v, include_pruned=True).archive_key for v in retired}),
    ]
    groups = [group for group in groups if group.keys]
    return Pruning(
        releases=tuple(retired),
        surplus=tuple(groups),
        kept=needs.reasons,
        size_bytes=sum(group.size_bytes for group in groups),
        listed=sum(map(len, listing.values())),
    )


def _needs(store: Store, retired: Iterable[str]) -> _Needs:
    keys: set[str] = set()
    folders: dict[str, str] = {}
    for reference in references(store, retired):
        keys.add(reference.key)
        if isinstance(reference, Unreadable):
            affected = _affected_folders(reference.key)
            folders |= dict.fromkeys(affected, f"All of {' and '.join(affected)} stays: {reference.reason}")
    # The first release with a network names the network's training snapshot, even if the release is
    # pruned.
    for fault in Registry(store).records(include_pruned=True)[1].values():
        folders.setdefault(DATASETS, f"All of {DATASETS} stays: {fault}")
    return _Needs(frozenset(keys), tuple(folders), tuple(dict.fromkeys(folders.values())))


def _affected_folders(key: str) -> tuple[str, ...]:
    if key.startswith(DATASETS):
        return (f"{DATASETS}{key.split('/')[1]}/",)
    return (DATASETS, ARCHIVES) if key.startswith(MANIFESTS) else ()


def _runs(store: Store, listed: Sequence[ObjectInfo], keep: int, versions: Collection[str]) -> Surplus:
    last: dict[str, datetime] = {}
    archived: list[str] = []
    for info in listed:
        run, _, name = info.key.removeprefix(RUNS).partition("/")
        last[run] = max(info.modified, last.get(run, info.modified))
        if name == "archived.json":
            archived.append(run)
    last.pop(STARTING, None)
    kept = {STARTING, *sorted(last, key=lambda run: (last[run], run))[-keep:]}
    kept.update(run for run in archived if run not in kept and _version(store, run) in versions)
    going = [info for info in listed if info.key.removeprefix(RUNS).partition("/")[0] not in kept]
    return _group("records of runs", f"not of the newest {quantity(keep, 'run')} or of a remaining release", going)


def _version(store: Store, run: str) -> str | None:
    """The version of the release that a run archived, or None if the version is unknown."""
    with suppress(ValueError):
        return RunRecord(store, run).load("archived").get("version")
    return None


def _checkpoints(listed: Sequence[ObjectInfo], releases: Sequence[ObjectInfo]) -> Surplus:
    resumable = _resumable(releases)
    going = [info for info in listed if info.modified < resumable]
    why = f"older than the newest release, or than {RESUMABLE.days} days: its training ended or was given up"
    return _group("training checkpoints", why, going)


def _parts(listed: Sequence[ObjectInfo], releases: Sequence[ObjectInfo]) -> Surplus:
    """All parts of a step are deleted together, because the step needs all parts to continue."""
    resumable = _resumable(releases)
    step = {info.key: info.key.split("/", 3)[:3] for info in listed}
    continued = {tuple(step[info.key]) for info in listed if info.modified >= resumable}
    going = [info for info in listed if tuple(step[info.key]) not in continued]
    why = f"older than the newest release, or than {RESUMABLE.days} days: its run ended or was given up"
    return _group("parts of steps", why, going)


def _resumable(releases: Sequence[ObjectInfo]) -> datetime:
    """Objects modified since this time may belong to an interrupted training."""
    newest = max((info.modified for info in releases), default=None)
    return max(filter(None, [newest, datetime.now(UTC) - RESUMABLE]))


def _weights(listed: Sequence[ObjectInfo], releases: Sequence[ObjectInfo], needed: Collection[str | None]) -> Surplus:
    resumable = _resumable(releases)
    going = [info for info in listed if info.modified < resumable and PurePosixPath(info.key).stem not in needed]
    return _group("pretrained weights", "of no remaining release; a run copies them again", going)


def _embeddings(store: Store, listed: Sequence[ObjectInfo], networks: Collection[str | None]) -> Iterator[Surplus]:
    def network(info: ObjectInfo) -> str:
        return info.key.removeprefix(EMBEDDINGS_PREFIX).partition("/")[0]

    going = [info for info in listed if network(info) not in networks]
    yield _group("cached embeddings", "of networks of no remaining release", going)
    remaining = [info for info in listed if network(info) in networks]
    if remaining and (images := _images(store)) is not None:
        going = [info for info in remaining if PurePosixPath(info.key).stem not in images]
        yield _group("cached embeddings", "of shards that begin with a removed image", going)


def _images(store: Store) -> set[str] | None:
    """The image digests in all newest snapshots, or None if a snapshot is unreadable."""
    images: set[str] = set()
    try:
        for name in datasets(store):
            snapshots = Snapshots(store, name)
            if (head := snapshots.head()) is not None:
                images.update(digest.hex() for digest in stored_digests(snapshots, head))
    except IntegrityError:
        return None
    return images


def _datasets(listed: Sequence[ObjectInfo], needs: _Needs) -> Iterator[Surplus]:
    unneeded: defaultdict[str, list[ObjectInfo]] = defaultdict(list)
    for info in listed:
        if info.key not in needs:
            unneeded[info.key.removeprefix(DATASETS).split("/")[1]].append(info)
    why = f"another ingest has finished since, or nobody has continued them for {RESUMABLE.days} days"
    yield _group("unfinished ingests", why, unneeded["parts"])
    yield _group("snapshots", "neither the newest nor of a remaining release", unneeded["manifests"])
    yield _group("tables", "of no remaining snapshot", [info for table in TABLES for info in unneeded[table]])
    yield _group("shards", "of no remaining snapshot", unneeded["shards"])


def _archives(listed: Sequence[ObjectInfo], needs: _Needs, retired: Collection[str]) -> Surplus:
    before = datetime.now(UTC) - PUBLISHING
    unneeded = [info for info in listed if info.key not in needs]
    going = [info for info in unneeded if info.key in retired or info.modified < before]
    return _group("archives", "of no remaining release", going)


def _group(what: str, why: str, going: Sequence[ObjectInfo]) -> Surplus:
    size_bytes = sum(info.size_bytes for info in going)
    return Surplus(what=what, why=why, size_bytes=size_bytes, keys=tuple(info.key for info in going))


def _missing(store: Store) -> set[str]:
    stored = {info.key for folder in (DATASETS, RELEASES) for info in store.list(folder)}
    return {found.key for found in references(store)} - stored


def _require_all(store: Store, missing: Collection[str]) -> None:
    if lost := sorted(_missing(store).difference(missing)):
        raise IntegrityError(
            f"{lost[0]} in {store.uri} was deleted although it is needed ({len(lost)} in all); run `evernear store "
            "check --repair`."
        )
