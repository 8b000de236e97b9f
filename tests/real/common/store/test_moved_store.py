"""A store names nothing outside itself: it can be moved, renamed and copied."""

from pathlib import Path

import pytest

from evernear.common.frozen import FORMAT
from evernear.common.store import Store, open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest, find_manifest, manifest_key
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources.folder import Folder
from evernear.errors import IntegrityError
from evernear.settings import DataSettings
from tests.dataset_images import write_images


def copy(source: Store, target: Store) -> None:
    for info in source.list(""):
        target.put(info.key, source.get(info.key))


def images(dataset: Dataset) -> int:
    return sum(len(block) for split in ("train", "test", "gallery", "query") for block in dataset.blocks(split))


def test_moved_store_is_read_and_updated(tmp_path: Path) -> None:
    before, after = (open_store((tmp_path / name).as_uri()) for name in ("before", "after"))
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}")
    write_images(tmp_path / "images", 24, size=(8, 8))
    first = ingest_source(settings, before.uri)
    copy(before, after)
    for info in list(before.list("")):
        before.delete(info.key)
    assert not any(before.uri.encode() in after.get(info.key) for info in after.list("") if info.key.endswith(".json"))
    found = Dataset.find(after, first.name, first.digest)
    assert found is not None
    assert found.manifest.store_uri == after.uri
    assert images(found) == 24
    unchanged = ingest_source(settings, after.uri)
    assert (unchanged.digest, unchanged.store_uri) == (first.digest, after.uri)
    write_images(tmp_path / "images", 6, 24, size=(8, 8))
    second = ingest_source(settings, after.uri)
    assert images(Dataset(second, open_store(second.store_uri))) == 30
    assert not list(before.list(""))


def test_unfinished_ingest_continues_in_a_moved_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (open_store((tmp_path / name).as_uri()) for name in ("before", "after"))
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}", size_px=8)
    write_images(tmp_path / "images", 24, size=(8, 8))
    with monkeypatch.context() as killing:
        killing.setattr(Snapshots, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ingest_source(settings, before.uri)
    copy(before, after)
    assert not any(before.uri.encode() in after.get(info.key) for info in after.list(""))
    monkeypatch.setattr(Folder, "read", interrupt)
    assert images(Dataset(ingest_source(settings, after.uri), after)) == 24


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def ingested(tmp_path: Path) -> tuple[DataSettings, Store, Manifest]:
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}")
    write_images(tmp_path / "images", 24, size=(8, 8))
    store = open_store((tmp_path / "store").as_uri())
    return settings, store, ingest_source(settings, store.uri)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": %d, "digest": 1}' % FORMAT])
def test_damaged_head_and_manifest_name_the_command_that_repairs_them(damage: bytes, tmp_path: Path) -> None:
    settings, store, manifest = ingested(tmp_path)
    head = f"datasets/{manifest.name}/head.json"
    for key in (manifest_key(manifest.name, manifest.digest), head):
        intact = store.get(key)
        store.put(key, damage)
        with pytest.raises(IntegrityError, match="run `evernear store check --repair`"):
            ingest_source(settings, store.uri)
        store.put(key, intact)
    assert ingest_source(settings, store.uri) == manifest


def test_another_snapshot_under_the_name_of_a_digest_is_detected(tmp_path: Path) -> None:
    _, store, manifest = ingested(tmp_path)
    other: Manifest = manifest.model_copy(update={"labels": manifest.labels[::-1]})
    store.put(manifest_key(manifest.name, manifest.digest), other.to_store())
    with pytest.raises(IntegrityError, match="does not describe the snapshot"):
        find_manifest(store, manifest.name, manifest.digest)


def test_lost_head_is_not_taken_for_a_new_dataset(tmp_path: Path) -> None:
    settings, store, first = ingested(tmp_path)
    store.delete(f"datasets/{first.name}/head.json")  # as a first ingest that was killed leaves it
    assert ingest_source(settings, store.uri).digest == first.digest
    write_images(tmp_path / "images", 6, 24, size=(8, 8))
    ingest_source(settings, store.uri)
    store.delete(f"datasets/{first.name}/head.json")
    with pytest.raises(IntegrityError, match=r"head\.json does not exist .*`evernear store check --repair`"):
        ingest_source(settings, store.uri)
