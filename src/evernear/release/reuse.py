"""The champion's network, taken out of its release for another gallery."""

import shutil
import tempfile
from pathlib import Path

from evernear.data.shards import Dataset
from evernear.disk import disk_errors
from evernear.errors import DataError, StoreError
from evernear.evaluation.open_set import OpenSet
from evernear.index.description import describe_index
from evernear.release.archive_reader import open_release
from evernear.release.manifest import NETWORK_DESCRIPTION_FILE, NETWORK_FILE, ReleaseManifest
from evernear.release.registry import Registry
from evernear.store import Store


def reuse_network(store: Store, dataset: Dataset, network_dir: Path) -> tuple[ReleaseManifest, OpenSet]:
    """Copy the champion's network to ``network_dir``, as `evernear.embedding.export.export` leaves one there.

    Returns which release it is from, and the open-set threshold that comes with it. A threshold found on classes that
    no training saw is kept: it is about the network, and nobody trained that again. One that impostors stood in for
    (`evernear.index.calibrate.calibrate`) is about the gallery, and is left to be found again.

    Raises:
        StoreError: there is no champion, or the store cannot be reached.
        DataError: the champion was made from another dataset, of whose images nobody knows what the network has seen.
        IntegrityError: the champion's archive is damaged.
    """
    registry = Registry(store)
    champion = registry.champion()
    if champion is None:
        raise StoreError(
            f"There is no release in {store.uri} whose network could be used again; run the whole pipeline."
        )
    with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
        archive = Path(temporary) / "champion.mar"
        manifest = registry.fetch(champion.version, archive).manifest
        if manifest.dataset_name != dataset.manifest.name:
            raise DataError(
                f"Release {manifest.version} was made from the dataset {manifest.dataset_name!r}, and its network "
                f"cannot be used for {dataset.manifest.name!r}; run the whole pipeline."
            )
        parts = open_release(archive, Path(temporary) / "release")
        with disk_errors(network_dir):
            network_dir.mkdir(parents=True, exist_ok=True)
            for name in (NETWORK_FILE, NETWORK_DESCRIPTION_FILE):
                shutil.copyfile(parts.directory / name, network_dir / name)
        calibration = describe_index(parts.directory).calibration
    kept = calibration.threshold if calibration.found_by == "unseen classes" else None
    return manifest, OpenSet(held_out=(), threshold=kept)
