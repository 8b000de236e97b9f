"""The references of a store name what its roots need:
with these objects alone, everything can be read."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.disk import sha256_bytes
from evernear.common.store import Store, open_store
from evernear.data.ingest import ingest_source
from evernear.data.shards import Dataset
from evernear.maintenance.references import Reference, Unreadable, references
from evernear.release.registry import Registry
from evernear.settings import DataSettings
from tests.releases import MakeRelease, PackedRelease, System


def write_images(directory: Path, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for label in "ab":
        (directory / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(directory / label / f"{seed}-{number}.png")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def releases(store: Store, system: System, make_release: MakeRelease) -> list[PackedRelease]:
    """Two published releases, with their snapshot copied into the store; the first one is the
    champion."""
    original = open_store(system.dataset.manifest.store_uri)
    for info in original.list("datasets/"):
        store.put(info.key, original.get(info.key))
    registry = Registry(store)
    made = [make_release(), make_release()]
    for release in made:
        registry.publish(release.archive)
    registry.set_champion(made[0].version, None)
    return made


def keys(found: list[Reference | Unreadable]) -> set[str]:
    return {reference.key for reference in found}


def test_earlier_snapshot_is_not_referenced(store: Store, tmp_path: Path) -> None:
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}")
    write_images(tmp_path / "images", 12, seed=0)
    first = ingest_source(settings, store.uri)
    write_images(tmp_path / "images", 12, seed=1)
    second = ingest_source(settings, store.uri)
    found = keys(list(references(store)))
    assert f"datasets/images/manifests/{first.digest}.json" not in found
    assert f"datasets/images/manifests/{second.digest}.json" in found
    for info in list(store.list("datasets/")):
        if info.key not in found:
            store.delete(info.key)
    assert sum(len(block) for block in Dataset(second, store).blocks("train")) == second.count("train")
    assert ingest_source(settings, store.uri).digest == second.digest


def test_hashes_are_those_of_the_content(store: Store, releases: list[PackedRelease]) -> None:
    hashed = [found for found in references(store) if isinstance(found, Reference) and found.sha256]
    assert {found.key.split("/")[-2] for found in hashed} == {"archives", "ledgers", "shards"}
    for found in hashed:
        assert sha256_bytes(store.get(found.key)) == found.sha256


def test_retired_release_needs_nothing(store: Store, releases: list[PackedRelease]) -> None:
    retired = keys(list(references(store, [releases[1].version])))
    assert keys(list(references(store))) - retired == {
        f"releases/manifests/{releases[1].version}.json",
        Registry(store).get(releases[1].version).archive_key,
    }


def test_release_references_its_snapshot_without_a_head(store: Store, releases: list[PackedRelease]) -> None:
    digest = releases[0].manifest.dataset_digest
    store.delete("datasets/digits/head.json")
    found = list(references(store))
    assert f"datasets/digits/manifests/{digest}.json" in keys(found)
    assert [one.key for one in found if isinstance(one, Unreadable)] == ["datasets/digits/head.json"]


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_unreadable_document_is_reported_and_the_rest_is_still_yielded(
    store: Store, releases: list[PackedRelease], damage: bytes | None
) -> None:
    key = f"releases/manifests/{releases[0].version}.json"
    store.delete(key) if damage is None else store.put(key, damage)
    found = list(references(store))
    unreadable = [one for one in found if isinstance(one, Unreadable)]
    assert {one.key for one in unreadable} == {key}
    assert Registry(store).get(releases[1].version).archive_key in keys(found)


def test_unfinished_ingest_is_referenced_until_the_head_moves(store: Store, tmp_path: Path) -> None:
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}")
    write_images(tmp_path / "images", 12, seed=0)
    manifest = ingest_source(settings, store.uri)
    unfinished, superseded = (f"datasets/images/parts/{parent}/1/0/parts.json" for parent in (manifest.digest, "first"))
    store.put(unfinished, b"")
    store.put(superseded, b"")
    found = keys(list(references(store)))
    assert unfinished in found
    assert superseded not in found
