"""Check every object that a release, a dataset head or the champion pointer needs, and repair the
damaged objects that can be recreated.

The check includes the labels of live queries, because lost labels cannot be recreated.

`check_store` reads every needed object and verifies the object's hash. `repair` leaves damaged
shards out of a dataset's newest snapshot, so that the next run reads their images again, and
rebuilds tables from shards and release records from archives. If the manifest of the newest
snapshot is damaged, `repair` returns to an earlier snapshot. Nothing is deleted. Other damage is
only reported, with its consequence.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.lease import Lease, StoreRecord
from evernear.common.output import named, quantity
from evernear.common.store import FileStore, Store
from evernear.data.repair import drop_shards, gone_names, lost_names, rebuild_tables
from evernear.data.snapshots import DATASETS, Snapshots
from evernear.data.tables import TABLES
from evernear.errors import DataError, IntegrityError, MissingObjectError, StoreError
from evernear.maintenance.kinds import require_all_current
from evernear.maintenance.references import NEWEST, Unreadable, references
from evernear.release.promotions import CHAMPION, HISTORY
from evernear.release.records import ARCHIVES, MANIFESTS
from evernear.release.registry import Registry
from evernear.review.live_labels import LIVE_LABELS, labeled_queries
from evernear.settings import DataSettings

Report = Callable[[str], None]
_PROMOTE = "`evernear registry promote VERSION`"
_LIVE = "live accuracy"


class Damage(Frozen):
    key: str
    reason: str
    needed_by: tuple[str, ...]
    """Such as "release 20261120.162250.af2fb66c" or "the newest snapshot of birds"."""
    repaired: str = ""
    """The action that `repair` took, or empty if the object is still missing or damaged."""
    consequence: str = ""
    """The effect of the damage, and the next step for the operator."""

    @property
    def in_newest(self) -> bool:
        return any(owner.startswith(NEWEST) for owner in self.needed_by)

    @property
    def is_repairable(self) -> bool:
        """Whether `repair` can act on it. Other damage has a `consequence` that says what helps."""
        return not self.repaired and (self.in_newest or self.key.startswith(MANIFESTS))

    @property
    def dataset(self) -> str:
        """The dataset that the object belongs to, or empty."""
        return self.key.split("/")[1] if self.key.startswith(DATASETS) else ""


def check_store(store: Store) -> list[Damage]:
    """Raises `FormatError` if another version of evernear wrote the store."""
    require_all_current(store)
    return [*explained(store, _damages(store, set(), lambda _: None))]


def repair(store: Store, settings: DataSettings, *, moved: bool, report: Report = lambda _: None) -> list[Damage]:
    """Repair damaged objects where possible, and return all damage, repaired or not. If the process
    is killed, call the function again.

    Images that their sources no longer list are named. If ``moved`` is true, ``settings.source`` is
    listed instead.

    Raises:
        BusyError: a prune or another repair is in progress.
        ConflictError: an ingest or a promotion finished during the repair. Repeat the call.
        FormatError: another version of evernear wrote the store. Nothing was changed.
        StoreError: the store is unreachable.
    """
    require_all_current(store)
    with Lease(StoreRecord(store, "`evernear store check --repair`")):
        return _repair(store, settings, moved, report)


def _repair(store: Store, settings: DataSettings, moved: bool, report: Report) -> list[Damage]:
    repairing = _Repair(store, settings, moved, report)
    intact: set[str] = set()
    handled: dict[str, Damage] = {}
    # A repaired document may reference objects that have not been checked yet.
    while found := [damage for damage in _damages(store, intact, report) if damage.key not in handled]:
        for damage in found:
            handled[damage.key] = repairing.repair(damage)
        for damage in repairing.leave_out_lost_shards():
            handled[damage.key] = damage
    unrepaired = [damage for damage in handled.values() if not damage.repaired]
    return [*(damage for damage in handled.values() if damage.repaired), *explained(store, unrepaired)]


def _damages(store: Store, intact: set[str], report: Report) -> list[Damage]:
    """Sorted by `_order`. Objects whose key is in ``intact`` are not read again."""
    owners: defaultdict[str, dict[str, None]] = defaultdict(dict)
    hashes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for reference in references(store):
        owners[reference.key][reference.owner] = None
        if isinstance(reference, Unreadable):
            reasons[reference.key] = reference.reason
        elif reference.sha256 is not None:
            hashes[reference.key] = reference.sha256
    for key, reason in labeled_queries(store).damaged.items():
        owners[key][_LIVE] = None
        reasons[key] = reason
    with tempfile.TemporaryDirectory(prefix="evernear-check-") as scratch:
        unread = [key for key in hashes if key not in intact]
        for number, key in enumerate(unread):
            report(f"{number:,} of {len(unread):,} objects")
            if fault := _fault(store, key, hashes[key], Path(scratch)):
                reasons[key] = fault
            else:
                intact.add(key)
    return [Damage(key=key, reason=reasons[key], needed_by=tuple(owners[key])) for key in sorted(reasons, key=_order)]


def _fault(store: Store, key: str, sha256: str, scratch: Path) -> str | None:
    try:
        if isinstance(store, FileStore):
            path = store.path(key)
            with disk_errors(path):
                if not path.is_file():
                    return f"{key} does not exist in {store.uri}."
                return None if sha256_file(path) == sha256 else f"{key} does not have its sha256."
        store.fetch(key, scratch / "object", sha256).unlink()
    except (IntegrityError, MissingObjectError) as error:
        return str(error)
    return None


def _order(key: str) -> tuple[int, str]:
    """Documents precede what they reference, and tables shards, which they leave out."""
    folders = (CHAMPION, MANIFESTS, HISTORY, ARCHIVES, "head.json", "/manifests/", ".parquet", "/shards/")
    return next((number for number, folder in enumerate(folders) if folder in key), len(folders)), key


class _Repair:
    def __init__(self, store: Store, settings: DataSettings, moved: bool, report: Report) -> None:
        self._store, self._settings, self._moved, self._report = store, settings, moved, report
        self._lost: list[Damage] = []

    def repair(self, damage: Damage) -> Damage:
        """Return ``damage`` with the action taken, or with the reason why repair is impossible."""
        if damage.key == CHAMPION:  # a person decides which release is live
            return damage
        if "/shards/" in damage.key:
            self._lost += [damage] if damage.in_newest else []
            return damage
        self._report(f"repairing {damage.key}")
        try:
            repaired = self._act(damage)
        except (IntegrityError, StoreError) as error:
            return damage.model_copy(update={"reason": f"{damage.reason} {error}"})
        return damage.model_copy(update={"repaired": repaired})

    def leave_out_lost_shards(self) -> Iterator[Damage]:
        """Make each damaged newest snapshot readable by leaving out its damaged shards."""
        for dataset in sorted({damage.dataset for damage in self._lost}):
            lost = [damage for damage in self._lost if damage.dataset == dataset]
            snapshots = Snapshots(self._store, dataset)
            try:
                done = self._leave_out(snapshots, [PurePosixPath(damage.key).stem for damage in lost])
            except IntegrityError as error:
                yield from (damage.model_copy(update={"reason": f"{damage.reason} {error}"}) for damage in lost)
                continue
            for damage in lost:
                others = tuple(owner for owner in damage.needed_by if not owner.startswith(NEWEST))
                left = explained(self._store, [damage.model_copy(update={"needed_by": others})]) if others else ()
                consequence = " ".join(each.consequence for each in left)
                yield damage.model_copy(update={"repaired": done, "consequence": consequence})
        self._lost = []

    def _leave_out(self, snapshots: Snapshots, lost: list[str]) -> str:
        try:
            gone = gone_names(snapshots, lost, self._settings, self._moved)
            absent = f" The source no longer has {named(gone)}." if gone else ""
        except (DataError, StoreError) as error:
            absent = f" Whether the source still has them is unknown, since it cannot be read: {error}"
        manifest = drop_shards(snapshots, lost)
        return (
            f"The newest snapshot of {snapshots.name} is now {manifest.digest[:12]}, without these images; the next run"
            f" reads them again from the source, into the same splits.{absent}"
        )

    def _act(self, damage: Damage) -> str:
        """Return the action taken. Raises `IntegrityError` if no repair is possible."""
        folder, name = PurePosixPath(damage.key).parent.name, PurePosixPath(damage.key).stem
        snapshots = Snapshots(self._store, damage.dataset)
        if damage.key.startswith(MANIFESTS):
            Registry(self._store).rebuild_record(name)
            return "The record was written again from the release's archive."
        if damage.key.endswith("/head.json") or (folder == "manifests" and damage.dataset and damage.in_newest):
            return self._reset_head(snapshots)
        if folder in TABLES and damage.in_newest:
            rebuild_tables(snapshots)
            return "The tables were made again; the next run reads all images again, into the same splits."
        raise IntegrityError("It cannot be made again from anything else in the store or the source.")

    def _reset_head(self, snapshots: Snapshots) -> str:
        """To the newest intact snapshot, or to none, so that the dataset starts over."""
        intact = dict(snapshots.manifests())
        parents = {manifest.parent for manifest in intact.values()}
        last = max(intact, key=lambda digest: (digest not in parents, intact[digest].created), default=None)
        snapshots.move_head(last)
        if last is None:
            return (
                f"The dataset {snapshots.name} has no intact snapshot and starts over; the next run reads the source."
            )
        return (
            f"The newest snapshot of {snapshots.name} is now {last[:12]} of {intact[last].created}; the next run adds "
            "what is newer in the source."
        )


def explained(store: Store, damages: Iterable[Damage]) -> Iterator[Damage]:
    """A lost shard is no damage if newer images stand in for all of its images."""
    for damage in damages:
        consequence = _consequence(damage)
        if "/shards/" in damage.key and not damage.in_newest:
            with suppress(IntegrityError):  # the images are unknown
                names = lost_names(Snapshots(store, damage.dataset), PurePosixPath(damage.key).stem)
                if not names:
                    continue
                consequence = (
                    f"{quantity(len(names), 'image')} of {' and '.join(damage.needed_by)} cannot be shown:"
                    f" {named(names)}. Those that a run reads again stand in for them. The gate knows all of them"
                    " from the tables."
                )
        yield damage.model_copy(update={"consequence": consequence})


def _consequence(damage: Damage) -> str:
    name = PurePosixPath(damage.key).stem
    if damage.key == CHAMPION:
        return "No release can be promoted, served or rolled back until `evernear registry restore` writes it again."
    if damage.key.startswith(HISTORY):
        return f"A rollback cannot go back beyond it; {_PROMOTE} makes any release the champion."
    if damage.key.startswith(MANIFESTS):
        return f"Release {name} can be neither shown nor served. If it is the champion, {_PROMOTE} replaces it."
    if damage.key.startswith(ARCHIVES):
        return (
            "The release can be neither served by a server that starts, nor promoted. If it is the champion, "
            f"{_PROMOTE} replaces it."
        )
    if damage.key.startswith(LIVE_LABELS):
        return "Its labels do not count. Delete the file, and import the labels again with `evernear labels import`."
    if damage.in_newest:
        return (
            f"Every run with the dataset {damage.dataset} fails until `evernear store check --repair` has left it out "
            "and a run has read its images again."
        )
    return (
        "The gate holds every new release until a person promotes one of them, with `evernear registry promote VERSION "
        f"--force --why REASON`, because the images behind {' and '.join(damage.needed_by)} are unknown. Servers and "
        "rollbacks are not affected."
    )
