"""Reuse the champion's network with a different gallery."""

import shutil
import tempfile
from pathlib import Path

from evernear.common.disk import disk_errors
from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.errors import DataError, StoreError
from evernear.evaluation.open_set import OpenSet
from evernear.index.description import describe_index
from evernear.release.archive_reader import open_release
from evernear.release.manifest import NETWORK_DESCRIPTION_FILE, NETWORK_FILE, ReleaseManifest
from evernear.release.registry import Registry


def reuse_network(store: Store, dataset: Dataset, network_dir: Path) -> tuple[ReleaseManifest, OpenSet]:
    """Copy the champion's network to ``network_dir``, in the format of
    `evernear.embedding.export.export_network`.

    Return the champion's manifest and its open-set threshold. A threshold that was measured on
    unseen classes is a property of the network, so it is reused. One that was calibrated on
    impostors (`evernear.index.calibrate.calibrate`) is a property of the gallery. None is then
    returned, and the caller calibrates again.

    Raises:
        DataError: the champion was built from a different dataset, so the training images of
            its network are unknown.
    """
    registry = Registry(store)
    champion = registry.champion()
    if champion is None:
        raise StoreError(f"A reindex needs the network of a champion. {registry.explain_no_champion()}")
    with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
        archive = Path(temporary) / "champion.mar"
        manifest = registry.fetch(champion.version, archive).manifest
        if manifest.dataset_name != dataset.manifest.name:
            raise DataError(
                f"Release {manifest.version} was built from the dataset {manifest.dataset_name!r}, and its network "
                f"cannot be used for {dataset.manifest.name!r}; run the whole pipeline."
            )
        parts = open_release(archive, Path(temporary) / "release")
        with disk_errors(network_dir):
            network_dir.mkdir(parents=True, exist_ok=True)
            for name in (NETWORK_FILE, NETWORK_DESCRIPTION_FILE):
                shutil.copyfile(parts.directory / name, network_dir / name)
        calibration = describe_index(parts.directory).calibration
    threshold = calibration.threshold if calibration.found_by == "unseen classes" else None
    return manifest, OpenSet(held_out=(), threshold=threshold)
