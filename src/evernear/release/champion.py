"""Open the live release and the anchor, to measure them together with a candidate or to reuse the
network."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evernear.common.disk import disk_errors
from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding import OPENVINO_FILES
from evernear.errors import DataError, IntegrityError, StoreError, TransientStoreError
from evernear.evaluation.evaluate import ReleasedSystem, UnavailableSystem
from evernear.evaluation.measure import NO_CHANGES
from evernear.evaluation.open_set import (
    OpenSet,
    expected_by_more_classes,
    stated_added_recognized,
    stated_false_accepts,
)
from evernear.index.description import describe_index
from evernear.release.archive_reader import open_release
from evernear.release.manifest import NETWORK_DESCRIPTION_FILE, NETWORK_FILE, ReleaseManifest
from evernear.release.registry import Registry
from evernear.settings import ClassSettings

if TYPE_CHECKING:
    from evernear.evaluation.recognizer import Recognizer


@contextmanager
def open_champion(store: Store, classes: ClassSettings = NO_CHANGES) -> Generator[ReleasedSystem | None]:
    """Open the champion, if any, and apply the removed and renamed ``classes``. Its files are in a
    temporary directory, which is deleted on exit."""
    champion = Registry(store).champion()
    if champion is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
        try:
            system = _open_system(store, champion.version, classes, Path(temporary))
        except IntegrityError as error:
            raise IntegrityError(
                f"The champion {champion.version} cannot be opened for comparison: {str(error).removesuffix('.')}; "
                "restore the file or promote another release (`evernear registry promote VERSION`), and run again."
            ) from error
        yield system


def champion_labels(store: Store, dataset: Dataset) -> tuple[str, ...]:
    """The labels that the champion knows, or an empty tuple without a champion. The form of the
    images is checked here, because the evaluation would check it only after hours of training."""
    registry = Registry(store)
    champion = registry.champion()
    if champion is None:
        return ()
    release = registry.get(champion.version).manifest
    dataset.require_shape(release.preprocessing.shape, champion.version)
    dataset.require_bit_depth(release.preprocessing.bit_depth, champion.version)
    return release.labels


def live_classes(store: Store, classes: ClassSettings = NO_CHANGES) -> tuple[str, ...]:
    """The current names of the champion's classes, without retired ones. Empty without a
    champion."""
    registry = Registry(store)
    champion = registry.champion()
    return classes.current_labels(registry.get(champion.version).manifest.labels) if champion else ()


@contextmanager
def open_anchor(
    store: Store, classes: ClassSettings = NO_CHANGES
) -> Generator[ReleasedSystem | UnavailableSystem | None]:
    """As `open_champion`, or None if the anchor is the champion. One that cannot be read is an
    `UnavailableSystem`, unless the store is unreachable (`TransientStoreError`)."""
    champion = Registry(store).champion()
    if champion is None or champion.anchor == champion.version:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="evernear-anchor-") as temporary:
        try:
            system = _open_system(store, champion.anchor, classes, Path(temporary))
        except TransientStoreError:
            raise
        except (IntegrityError, StoreError) as error:
            system = UnavailableSystem(champion.anchor, str(error))
        yield system


def _open_system(store: Store, version: str, classes: ClassSettings, scratch: Path) -> ReleasedSystem:
    manifest = Registry(store).get(version).manifest
    recognizer = open_released(store, version, scratch)
    try:
        dataset, fault = Dataset.find(store, manifest.dataset_name, manifest.dataset_digest), None
    except IntegrityError as error:
        dataset, fault = None, str(error)
    return ReleasedSystem(recognizer, dataset, classes, fault, stated_false_accepts(manifest.metrics))


def open_released(store: Store, version: str, scratch: Path) -> "Recognizer":
    """Open the recognizer of a release, which is unpacked in ``scratch``."""
    from evernear.evaluation.recognizer import Recognizer  # torch takes seconds to import

    archive = scratch / "release.mar"
    Registry(store).fetch(version, archive)
    parts = open_release(archive, scratch / "release")
    return Recognizer.open(parts.directory, parts.directory, version, store)


def reuse_network(store: Store, dataset: Dataset, network_dir: Path) -> tuple[ReleaseManifest, OpenSet]:
    """Copy the champion's network to ``network_dir``, in the format of
    `evernear.embedding.export.export_network`.

    Return the champion's manifest and its open-set threshold. One that was measured on unseen
    classes is a property of the network, so it is reused. One that was calibrated on impostors
    (`evernear.index.calibrate.calibrate`) is a property of the gallery, so it is None, and the
    caller calibrates again.
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
            converted = [name for name in OPENVINO_FILES if name in manifest.parts]
            for name in (NETWORK_FILE, NETWORK_DESCRIPTION_FILE, *converted):
                shutil.copyfile(parts.directory / name, network_dir / name)
        index = describe_index(parts.directory)
    classes = len(dataset.labels) / len(index.known_labels)
    threshold = index.threshold if index.calibration.found_by == "unseen classes" else None
    return manifest, OpenSet(
        held_out=(),
        threshold=threshold,
        expected_false_accepts=None if threshold is None else expected_by_more_classes(manifest.metrics, classes),
        added_recognized=stated_added_recognized(manifest.metrics),
    )
