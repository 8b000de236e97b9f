"""Reuse of the champion's network and threshold.

tests/slow/scenarios/test_main_job.py tests complete reindex runs.
"""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from evernear.common.store import Store, open_store
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, load_network, training_dataset
from evernear.errors import DataError, IntegrityError, StoreError
from evernear.evaluation.open_set import EXPECTED_FALSE_ACCEPTS
from evernear.index.build import build_index
from evernear.index.description import MAX_DISTANCE
from evernear.release.archive import Candidate
from evernear.release.champion import reuse_network
from evernear.release.registry import Registry
from evernear.settings import IndexSettings
from tests.releases import MakeRelease, PackedRelease, System, pack_release, release_maker


def promote(store: Store, release: MakeRelease) -> str:
    packed = release()
    registry = Registry(store)
    registry.publish(packed.archive)
    registry.set_champion(packed.version, registry.champion())
    return packed.version


def renamed(dataset: Dataset, **changes: object) -> Dataset:
    manifest = dataset.manifest.model_copy(update=changes)
    return Dataset(manifest, open_store(manifest.store_uri))


def test_reuse_extracts_the_network_unchanged(
    system: System, make_release: MakeRelease, store: Store, tmp_path: Path
) -> None:
    version = promote(store, make_release)
    release, open_set = reuse_network(store, system.dataset, tmp_path / "network")
    assert release.version == version
    assert describe_network(tmp_path / "network") == describe_network(system.network_dir)
    load_network(tmp_path / "network")
    # This index was built without a probe, so its threshold was calibrated on gallery impostors and
    # is not reused.
    assert open_set.threshold is None


def test_threshold_of_unseen_classes_is_reused(system: System, store: Store, tmp_path: Path) -> None:
    embed_dataset(system.network_dir, system.dataset, tmp_path / "embeddings")
    vectors = Embeddings.open(tmp_path / "embeddings")
    build_index(vectors, system.dataset.labels, IndexSettings(), tmp_path / "index", threshold=0.375)
    probed = System(system.dataset, system.network_dir, tmp_path / "index")
    (tmp_path / "release").mkdir()
    promote(store, release_maker(probed, lambda: tmp_path / "release"))
    _, open_set = reuse_network(store, system.dataset, tmp_path / "network")
    assert open_set.threshold == 0.375
    assert open_set.auroc is None
    assert open_set.describe_kept_threshold() == ""


def test_reuse_expects_more_classes_to_accept_more(system: System, store: Store, tmp_path: Path) -> None:
    """With twice the classes, an unseen image is called unknown only if both halves refuse it."""
    embed_dataset(system.network_dir, system.dataset, tmp_path / "embeddings")
    labels = system.dataset.labels
    build_index(Embeddings.open(tmp_path / "embeddings"), labels, IndexSettings(), tmp_path / "index", threshold=0.375)
    probed = System(system.dataset, system.network_dir, tmp_path / "index")
    (tmp_path / "release").mkdir()
    stated = {f"{EXPECTED_FALSE_ACCEPTS}{end}": value for end, value in (("", 0.2), ("_low", 0.1), ("_high", 0.5))}

    def pack(candidate: Candidate, out_dir: Path, created: datetime) -> PackedRelease:
        return pack_release(replace(candidate, metrics={**candidate.metrics, **stated}), out_dir, created)

    promote(store, release_maker(probed, lambda: tmp_path / "release", pack))
    doubled = renamed(system.dataset, labels=(*labels, *(f"new {label}" for label in labels)))
    _, open_set = reuse_network(store, doubled, tmp_path / "network")
    assert open_set.describe_kept_threshold() == (
        "Of images of unseen classes, expect 36% (19% to 75%) to be accepted as known: the threshold stays, and each "
        "class that is added accepts more."
    )
    switched_off = open_set.model_copy(update={"threshold": MAX_DISTANCE})
    assert switched_off.describe_kept_threshold().startswith("Unknown stays switched off")


def test_reuse_requires_a_champion(system: System, store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"A reindex needs the network of a champion"):
        reuse_network(store, system.dataset, tmp_path / "network")


def test_reuse_rejects_another_dataset(system: System, make_release: MakeRelease, store: Store, tmp_path: Path) -> None:
    promote(store, make_release)
    with pytest.raises(DataError, match="built from the dataset 'digits', and its network cannot be used for 'lette"):
        reuse_network(store, renamed(system.dataset, name="letters"), tmp_path / "network")
    assert not (tmp_path / "network").exists()


def test_missing_training_snapshot_is_an_error(system: System, tmp_path: Path) -> None:
    shutil.copytree(system.network_dir, tmp_path / "network")
    store = open_store(system.dataset.manifest.store_uri)
    assert training_dataset(tmp_path / "network", system.dataset, store) is system.dataset
    later = renamed(system.dataset, labels=(*system.dataset.labels, "new"))
    result = training_dataset(tmp_path / "network", later, store)
    assert result.digest == system.dataset.digest != later.digest
    described = json.loads((tmp_path / "network/network.json").read_text())
    (tmp_path / "network/network.json").write_text(json.dumps(described | {"dataset_digest": "0" * 64}))
    with pytest.raises(IntegrityError, match="the images that it was trained on are unknown"):
        training_dataset(tmp_path / "network", later, store)
