"""Export a dataset (`evernear.data.export`), with a release's embeddings if named."""

import re
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from evernear.common.outputs import claim
from evernear.common.store import Store
from evernear.data.export import Embed, Format, export_dataset, require_folder_names, without_embeddings
from evernear.data.manifest import Manifest, find_manifest, manifest_key
from evernear.data.shards import Dataset
from evernear.data.snapshots import DATASETS, Snapshots
from evernear.errors import DataError, MissingObjectError, SettingsError
from evernear.release.archive_reader import ARCHIVE_FILE, open_release
from evernear.release.registry import Registry

_MIN_DIGITS = 8
_SHOWN = 5


def select_snapshot(store: Store, dataset: str, snapshot: str | None, release: str | None) -> Manifest:
    """The snapshot whose digest begins with ``snapshot``, otherwise the snapshot of ``release``,
    otherwise the newest one of ``dataset`` or, if that is empty, of the store's only dataset."""
    released = Registry(store).get(release).manifest if release else None
    if snapshot is None and released is not None:
        return _require_snapshot(store, released.dataset_name, released.dataset_digest)
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
    return _require_snapshot(store, *found[0])


def _require_snapshot(store: Store, name: str, digest: str) -> Manifest:
    manifest = find_manifest(store, name, digest)
    if manifest is None:
        raise MissingObjectError(
            f"{store.uri} no longer has the snapshot {digest[:12]} of the dataset {name}; choose another --snapshot."
        )
    return manifest


def export_snapshot(
    store: Store,
    manifest: Manifest,
    out: Store,
    form: Format,
    release: str | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a snapshot to ``out``, with the embeddings of ``release``. ``report`` receives the
    number of images so far."""
    dataset = Dataset(manifest, store)
    if form == "folder":
        require_folder_names(manifest)
    with _embedding(dataset, release) as embed:
        embedded = f" with the embeddings of release {release}" if release else ""
        claim(out, f"an export of the snapshot {manifest.digest[:12]} of {manifest.name} as {form}{embedded}")
        export_dataset(dataset, out, form, embed, report)


@contextmanager
def _embedding(dataset: Dataset, version: str | None) -> Generator[Embed]:
    """Add the embeddings of a release to the images, if it is named. Cached ones are used where
    available."""
    if version is None:
        yield without_embeddings
        return
    from evernear.embedding.embed import ExportedEmbedder  # an export without embeddings needs no torch

    with tempfile.TemporaryDirectory(prefix="evernear-") as directory:
        archive = Path(directory) / ARCHIVE_FILE
        Registry(dataset.store).fetch(version, archive)
        release = open_release(archive, Path(directory) / "parts")
        preprocessing = release.manifest.preprocessing
        if preprocessing.shape != dataset.shape:
            raise DataError(
                f"Release {version} takes images of {preprocessing.shape}, and those of the snapshot "
                f"{dataset.digest[:12]} are {dataset.shape}; leave out --release or --snapshot."
            )
        yield ExportedEmbedder(release.directory, dataset.store, read_only=True).embed
