"""A store is checked by hash, and repaired from its sources."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.disk import sha256_bytes
from evernear.common.store import Store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import SPLITS, Manifest, manifest_key
from evernear.data.repair import lost_names
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.tables import table_key
from evernear.data.writer import shard_key
from evernear.errors import IntegrityError
from evernear.evaluation.evaluate import count_leakage
from evernear.maintenance.check import Damage, check_store, explained, repair
from evernear.maintenance.references import Reference, Unreadable, references
from evernear.release.promotions import CHAMPION
from evernear.release.registry import Registry
from evernear.settings import DataSettings
from tests.real.maintenance.conftest import publish, write_images
from tests.releases import PackedRelease, System


def splits(manifest: Manifest, store: Store) -> dict[bytes, str]:
    dataset = Dataset(manifest, store)
    return {digest.tobytes(): split for split in SPLITS for block in dataset.blocks(split) for digest in block.digests}


@pytest.fixture
def folder_source(tmp_path: Path) -> DataSettings:
    write_images(tmp_path / "images", 30, seed=0)
    return DataSettings(source=f"folder:{tmp_path / 'images'}")


def with_history(settings: DataSettings, store: Store) -> Manifest:
    """A dataset of which ingests added, removed, relabeled and renamed images."""
    images = Path(settings.source.removeprefix("folder:"))
    ingest_source(settings, store.uri)
    write_images(images, 8, seed=1)
    ingest_source(settings, store.uri)
    (images / "a" / "0-3.png").unlink()
    (images / "a" / "0-4.png").rename(images / "b" / "moved.png")
    (images / "a" / "1-5.png").rename(images / "a" / "renamed.png")
    ingest_source(settings, store.uri)
    (images / "0").mkdir()
    for number in range(5):
        (images / "a" / f"0-{20 + number}.png").rename(images / "0" / f"{number}.png")
    write_images(images, 3, seed=2)
    return ingest_source(settings, store.uri)


def damaged(found: list[Damage]) -> set[str]:
    return {damage.key for damage in found if not damage.repaired}


def lose(store: Store, key: str, how: str) -> None:
    if how == "lost":
        store.delete(key)
    else:
        store.put(key, b"" if how == "empty" else b"x" + store.get(key)[1:])


@pytest.mark.parametrize("how", ["lost", *(pytest.param(how, marks=pytest.mark.slow) for how in ("empty", "changed"))])
def test_lost_shards_are_found_and_read_again_into_the_same_splits(store, folder_source, how) -> None:
    manifest = with_history(folder_source, store)
    assert check_store(store) == []
    before = splits(manifest, store)
    keys = {shard_key(manifest.name, shard.sha256) for shard in manifest.shards}
    for key in keys:
        lose(store, key, how)
    found = check_store(store)
    assert damaged(found) == keys
    assert all("store check --repair" in damage.consequence for damage in found)
    repaired = repair(store, folder_source, moved=False)
    assert {damage.key for damage in repaired if damage.repaired} == keys
    assert all("reads them again" in damage.repaired for damage in repaired)
    assert check_store(store) == []
    assert splits(ingest_source(folder_source, store.uri), store) == before
    assert check_store(store) == []


@pytest.mark.parametrize("source", ["arrays", "renamed files"])
def test_shards_are_read_again_from(store: Store, tmp_path: Path, folder_source: DataSettings, source: str) -> None:
    folder_source = DataSettings(source="digits") if source == "arrays" else folder_source
    manifest = ingest_source(folder_source, store.uri)
    before = splits(manifest, store)
    for number, path in enumerate(sorted((tmp_path / "images").rglob("*.png"))):
        path.rename(path.with_name(f"renamed-{number}.png"))
    for shard in manifest.shards:
        store.delete(shard_key(manifest.name, shard.sha256))
    assert damaged(repair(store, folder_source, moved=False)) == set()
    assert splits(ingest_source(folder_source, store.uri), store) == before
    assert check_store(store) == []


def test_shards_are_read_again_from_a_source_that_moved(
    store: Store, tmp_path: Path, folder_source: DataSettings
) -> None:
    manifest = ingest_source(folder_source, store.uri)
    before = splits(manifest, store)
    shutil.move(tmp_path / "images", tmp_path / "elsewhere")
    store.delete(shard_key(manifest.name, manifest.shards[0].sha256))
    (damage,) = repair(store, folder_source, moved=False)
    assert "does not exist" in damage.repaired
    assert damaged([damage]) == set()
    moved = folder_source.model_copy(update={"source": f"folder:{tmp_path / 'elsewhere'}", "dataset": manifest.name})
    assert splits(ingest_source(moved, store.uri, moved_from=folder_source.source), store) == before
    store.delete(shard_key(manifest.name, manifest.shards[0].sha256))
    assert damaged(repair(store, moved, moved=True)) == set()


def test_images_that_the_source_lost_as_well_are_left_out_of_the_newest_snapshot(store, folder_source) -> None:
    images = Path(folder_source.source.removeprefix("folder:"))
    manifest = ingest_source(folder_source, store.uri)
    before = splits(manifest, store)
    lost = next(shard for shard in manifest.shards if shard.split == "train")
    store.delete(shard_key(manifest.name, lost.sha256))
    for number in range(10):
        (images / "a" / f"0-{number}.png").unlink()
    shutil.copy(images / "b" / "0-11.png", images / "b" / "0-12.png")  # other content under the name of an image
    (damage,) = repair(store, folder_source, moved=False)
    assert "without these images" in damage.repaired
    gone = [name for name in (f"a/0-{number}.png" for number in range(10)) if name in damage.repaired]
    assert 0 < len(gone) <= 5
    assert f"The source no longer has {gone[0]}" in damage.repaired
    assert check_store(store) == []
    head = Snapshots(store, manifest.name).head()
    assert head.count("train") == manifest.count("train") - lost.count
    after = ingest_source(folder_source, store.uri)
    kept = splits(after, store)
    assert len(kept) == len(before) - 11
    assert all(before[digest] == split for digest, split in kept.items() if digest in before)


def test_images_that_are_read_again_stand_in_for_lost_ones_of_an_earlier_snapshot(store, folder_source) -> None:
    images = Path(folder_source.source.removeprefix("folder:"))
    first = ingest_source(folder_source, store.uri)
    earlier, snapshots = Dataset(first, store), Snapshots(store, first.name)
    seen = count_leakage(earlier, earlier, SPLITS)
    (lost,) = earlier.shards("test")
    key = shard_key(first.name, lost.sha256)
    of_release = Damage(key=key, reason="It is lost.", needed_by=("release 1",))
    digests = {digest.tobytes() for block in earlier.blocks("test") for digest in block.digests}
    names = {f"{label}/0-{number}.png" for label in "ab" for number in range(30)}
    store.delete(key)
    repair(store, folder_source, moved=False)
    assert count_leakage(earlier, earlier, SPLITS) == seen
    assert len(lost_names(snapshots, lost.sha256)) == lost.count
    gone = lost_names(snapshots, lost.sha256)[0]
    assert gone in names
    (images / gone).unlink()
    newest = Dataset(ingest_source(folder_source, store.uri), store)
    assert {digest.tobytes() for block in newest.blocks("test") for digest in block.digests} < digests
    assert count_leakage(newest, earlier, SPLITS) == {"train": 0, "test": lost.count - 1, "gallery": 0, "query": 0}
    (damage,) = explained(store, [of_release])
    assert f"1 image of release 1 cannot be shown: {gone}." in damage.consequence
    assert "holds" not in damage.consequence
    image = np.random.default_rng(9).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(image).save(images / "a" / "other.png")
    ingest_source(folder_source, store.uri)
    assert len([*explained(store, [of_release])]) == 1


def test_earlier_snapshot_whose_images_are_all_read_again_is_not_damaged(
    store: Store, folder_source: DataSettings
) -> None:
    first = ingest_source(folder_source, store.uri)
    (lost,) = Dataset(first, store).shards("gallery")
    key = shard_key(first.name, lost.sha256)
    store.put(key, b"x" + store.get(key)[1:])
    repair(store, folder_source, moved=False)
    of_release = Damage(key=key, reason="It is damaged.", needed_by=("release 1",))
    assert len([*explained(store, [of_release])]) == 1
    ingest_source(folder_source, store.uri)
    assert [*explained(store, [of_release])] == []


@pytest.mark.parametrize("damage", [b"", None])
def test_lost_head_returns_to_the_newest_intact_snapshot(store, folder_source, damage) -> None:
    manifest = with_history(folder_source, store)
    key = f"datasets/{manifest.name}/head.json"
    store.delete(key) if damage is None else store.put(key, damage)
    assert damaged(check_store(store)) == {key}
    repair(store, folder_source, moved=False)
    assert check_store(store) == []
    assert ingest_source(folder_source, store.uri).digest == manifest.digest


def test_lost_manifest_returns_to_an_earlier_snapshot(store: Store, folder_source: DataSettings) -> None:
    manifest = with_history(folder_source, store)
    before = splits(manifest, store)
    store.put(manifest_key(manifest.name, manifest.digest), b"{")
    repair(store, folder_source, moved=False)
    assert check_store(store) == []
    head = Snapshots(store, manifest.name).head()
    assert head.digest == manifest.parent
    after = splits(ingest_source(folder_source, store.uri), store)
    assert after.keys() == before.keys()


def test_dataset_without_an_intact_snapshot_starts_over(
    store: Store, tmp_path: Path, folder_source: DataSettings
) -> None:
    manifest = ingest_source(folder_source, store.uri)
    store.put(manifest_key(manifest.name, manifest.digest), b"")
    (damage,) = repair(store, folder_source, moved=False)
    assert "starts over" in damage.repaired
    assert ingest_source(folder_source, store.uri).digest == manifest.digest


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(), ("b/0-3.png", "b/0-4.png")])
def test_lost_tables_are_made_again_with_the_same_splits(store: Store, folder_source: DataSettings, gone) -> None:
    manifest = with_history(folder_source, store)
    before = splits(manifest, store)
    for table, partitions in manifest.tables.items():
        for partition in partitions:
            store.delete(table_key(manifest.name, table, partition.sha256))
    with pytest.raises(IntegrityError, match="run `evernear store check --repair`"):
        ingest_source(folder_source, store.uri)
    repair(store, folder_source, moved=False)
    assert check_store(store) == []
    for name in gone:
        Path(folder_source.source.removeprefix("folder:"), name).unlink()
    after = ingest_source(folder_source, store.uri)
    assert splits(after, store).items() <= before.items()
    assert len(splits(after, store)) == len(before) - len(gone)
    assert after.problem_counts == manifest.problem_counts


def test_unfinished_first_ingest_is_no_damage(store: Store, tmp_path: Path, folder_source: DataSettings) -> None:
    manifest = ingest_source(folder_source, store.uri)
    store.delete(f"datasets/{manifest.name}/head.json")
    assert check_store(store) == []
    store.delete(manifest_key(manifest.name, manifest.digest))
    assert check_store(store) == []


@pytest.fixture
def promoted_releases(store: Store, published_releases: list[PackedRelease]) -> list[PackedRelease]:
    """Two promoted releases and their snapshot."""
    Registry(store).set_champion(published_releases[1].version, Registry(store).champion())
    return published_releases


def test_registry_is_repaired_or_its_damage_explained(store: Store, promoted_releases: list[PackedRelease]) -> None:
    settings = DataSettings(source="digits")
    registry = Registry(store)
    record = f"releases/manifests/{promoted_releases[0].version}.json"
    for damage in (lambda: store.put(record, b""), lambda: store.delete(record)):
        intact = store.get(record)
        damage()
        assert damaged(check_store(store)) == {record}
        assert damaged(repair(store, settings, moved=False)) == set()
        assert store.get(record) == intact
    assert check_store(store) == []
    unrepairable: list[tuple[str, str]] = [
        (registry.get(promoted_releases[1].version).archive_key, "registry promote"),
        ("releases/history/00000001.json", "registry promote"),
        (CHAMPION, "registry restore"),
    ]
    for key, step in unrepairable:
        intact = store.get(key)
        store.put(key, b"")
        (damage,) = repair(store, settings, moved=False)
        assert damaged([damage]) == {key}
        assert step in damage.consequence
        store.put(key, intact)
    assert check_store(store) == []


def test_lost_snapshot_of_a_release_is_explained(store: Store, promoted_releases: list[PackedRelease]) -> None:
    manifest = promoted_releases[0].manifest
    store.delete(manifest_key(manifest.dataset_name, manifest.dataset_digest))
    store.delete(f"datasets/{manifest.dataset_name}/head.json")
    found = repair(store, DataSettings(source="digits"), moved=False)
    (snapshot,) = [damage for damage in found if "/manifests/" in damage.key]
    assert "holds every new release until a person promotes one" in snapshot.consequence


# What the roots of a store need


@pytest.fixture
def published_releases(store: Store, system: System, releases: tuple[PackedRelease, ...]) -> list[PackedRelease]:
    return publish(store, system, list(releases[:2]))


def keys(found: list[Reference | Unreadable]) -> set[str]:
    return {reference.key for reference in found}


def test_hashes_are_those_of_the_content(store: Store, published_releases: list[PackedRelease]) -> None:
    hashed = [found for found in references(store) if isinstance(found, Reference) and found.sha256]
    assert {found.key.split("/")[-2] for found in hashed} == {"archives", "files", "images", "shards"}
    for found in hashed:
        assert sha256_bytes(store.get(found.key)) == found.sha256


def test_retired_release_needs_nothing(store: Store, published_releases: list[PackedRelease]) -> None:
    retired = keys(list(references(store, [published_releases[1].version])))
    assert keys(list(references(store))) - retired == {
        f"releases/manifests/{published_releases[1].version}.json",
        Registry(store).get(published_releases[1].version).archive_key,
    }


def test_release_references_its_snapshot_without_a_head(store: Store, published_releases: list[PackedRelease]) -> None:
    digest = published_releases[0].manifest.dataset_digest
    store.delete("datasets/digits/head.json")
    found = list(references(store))
    assert f"datasets/digits/manifests/{digest}.json" in keys(found)
    assert [one.key for one in found if isinstance(one, Unreadable)] == ["datasets/digits/head.json"]


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_unreadable_document_is_reported_and_the_rest_is_still_yielded(store, published_releases, damage) -> None:
    key = f"releases/manifests/{published_releases[0].version}.json"
    store.delete(key) if damage is None else store.put(key, damage)
    found = list(references(store))
    unreadable = [one for one in found if isinstance(one, Unreadable)]
    assert {one.key for one in unreadable} == {key}
    assert Registry(store).get(published_releases[1].version).archive_key in keys(found)
