"""Choose the snapshot to export."""

import re
from pathlib import PurePosixPath

from evernear.common.store import Store
from evernear.data.manifest import Manifest, find_manifest, manifest_key
from evernear.data.snapshots import DATASETS, Snapshots
from evernear.errors import DataError, MissingObjectError, SettingsError

_MIN_DIGITS = 8
_SHOWN = 5


def choose_snapshot(store: Store, dataset: str, snapshot: str | None) -> Manifest:
    """Select the snapshot whose digest begins with ``snapshot``, or the newest snapshot
    of ``dataset`` if ``snapshot`` is None.

    If ``dataset`` is empty, the newest snapshot comes from the store's only dataset.

    Raises:
        DataError: the store has no matching snapshot or more than one.
        SettingsError: ``snapshot`` is not the beginning of a digest, or ``dataset`` is
            empty and the store has several datasets.
    """
    names = [dataset] if dataset else sorted(name[:-1] for name in store.children(DATASETS[:-1]) if name[-1] == "/")
    if snapshot is not None:
        return _beginning_with(store, names, snapshot)
    if len(names) > 1:
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise SettingsError(f"{store.uri} has the datasets {listed}; choose one with --set data.dataset={names[0]}.")
    manifest = Snapshots(store, names[0]).head() if names else None
    if manifest is None:
        raise DataError(f"{store.uri} has no dataset{f' {dataset!r}' if dataset else ''}; `evernear run` makes one.")
    return manifest


def _beginning_with(store: Store, names: list[str], snapshot: str) -> Manifest:
    if not re.fullmatch(rf"[0-9a-f]{{{_MIN_DIGITS},64}}", snapshot):
        raise SettingsError(
            f"--snapshot {snapshot!r} is not the digest of a snapshot, nor its first {_MIN_DIGITS} or more digits."
        )
    found = [
        (name, PurePosixPath(info.key).stem)
        for name in names
        for info in store.list(manifest_key(name, snapshot).removesuffix(".json"))
    ]
    if not found:
        raise DataError(f"{store.uri} has no snapshot {snapshot}.")
    if len(found) > 1:
        raise DataError(f"{len(found)} snapshots in {store.uri} begin with {snapshot}; add digits.")
    return require_snapshot(store, *found[0])


def require_snapshot(store: Store, name: str, digest: str) -> Manifest:
    """The snapshot ``digest`` of the dataset ``name``.

    Raises:
        MissingObjectError: the store no longer has the snapshot.
    """
    manifest = find_manifest(store, name, digest)
    if manifest is None:
        raise MissingObjectError(
            f"{store.uri} no longer has the snapshot {digest[:12]} of the dataset {name}; choose another --snapshot."
        )
    return manifest
