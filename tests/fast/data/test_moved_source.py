"""A source that moved: deletions, new labels and splits survive, whatever was tried before."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import Store, open_store
from evernear.console.suspects import newest_dataset
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.source_diff import diff_source, fetch_ledger
from evernear.errors import DataError
from evernear.maintenance.forget import find
from evernear.settings import DataSettings, Settings


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def first(tmp_path: Path, store: Store) -> Manifest:
    """A dataset of 40 images from ``old/images``."""
    rng = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "old" / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(path)
    return ingest_source(DataSettings(source=f"folder:{tmp_path / 'old' / 'images'}"), store.uri)


def move(tmp_path: Path, target: str) -> str:
    """Move the images, delete two of each class, and give one another label; return the new
    source."""
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(tmp_path / "old" / "images", tmp_path / target)
    for number in range(4):
        (tmp_path / target / "ab"[number % 2] / f"{number}.png").unlink()
    (tmp_path / target / "a" / "10.png").rename(tmp_path / target / "b" / "10.png")
    return f"folder:{tmp_path / target}"


def splits(manifest: Manifest, store: Store) -> dict[bytes, tuple[str, str]]:
    dataset = Dataset(manifest, store)
    return {
        digest.tobytes(): (split, dataset.labels[label])
        for split in ("train", "test", "gallery", "query")
        for block in dataset.blocks(split)
        for digest, label in zip(block.digests, block.labels, strict=True)
    }


@pytest.mark.parametrize("target", ["new/images", "new/pictures"])
@pytest.mark.parametrize("followed_the_other_hint", [True, False])
def test_deletions_and_labels_count_after_a_move(
    tmp_path: Path, store: Store, first: Manifest, target: str, followed_the_other_hint: bool
) -> None:
    old, new = f"folder:{tmp_path / 'old' / 'images'}", move(tmp_path, target)
    before = splits(first, store)
    if followed_the_other_hint:
        ingest_source(DataSettings(source=new, dataset="images"), store.uri)
    moved = ingest_source(DataSettings(source=new), store.uri, moved_from=old)
    after = splits(moved, store)
    assert moved.name == "images"
    assert len(after) == 36
    assert all(split == before[digest][0] for digest, (split, _) in after.items())
    assert sum(label != before[digest][1] for digest, (_, label) in after.items()) == 1
    assert not moved.problem_counts.get("conflicting_labels")
    assert ingest_source(DataSettings(source=new), store.uri, moved_from=old) == moved  # once more
    assert ingest_source(DataSettings(source=new, dataset="images"), store.uri) == moved
    assert find(store).images == 4


def test_unchanged_images_are_new_to_nobody_after_a_move(tmp_path: Path, store: Store, first: Manifest) -> None:
    """The content is equal, so is the digest of the snapshot; its ledger and manifest name the new
    source."""
    shutil.move(tmp_path / "old" / "images", tmp_path / "images")
    new = f"folder:{tmp_path / 'images'}"
    settings = DataSettings(source=new, dataset="images")
    moved = ingest_source(settings, store.uri, moved_from=f"folder:{tmp_path / 'old' / 'images'}")
    assert (moved.digest, moved.source) == (first.digest, new)
    ledger = fetch_ledger(store, moved, tmp_path)
    (diff,) = diff_source(settings, [ledger])
    assert (diff.new, diff.removed) == (0, 0)
    assert newest_dataset(store, Settings(data=settings)).digest == first.digest
    head = Snapshots(store, "images").head()
    assert head is not None
    assert head.source == new


def test_message_offers_the_move(tmp_path: Path, store: Store, first: Manifest) -> None:
    with pytest.raises(DataError, match=f"If the images have moved, add --moved-from {first.source}\\."):
        ingest_source(DataSettings(source=move(tmp_path, "new/images")), store.uri)
