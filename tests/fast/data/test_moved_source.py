"""A source that moved: deletions, new labels and splits survive, whatever was tried before."""

import shutil
from pathlib import Path

import pytest

from evernear.common.store import Store
from evernear.data.ingest import ingest_source
from evernear.data.list import require_moved
from evernear.data.manifest import Manifest
from evernear.data.snapshots import Snapshots
from evernear.data.source_diff import diff_source
from evernear.errors import DataError, SettingsError
from evernear.maintenance.forget import find
from evernear.review.suspects import newest_dataset
from evernear.settings import DataSettings, Settings
from tests.dataset_images import write_files
from tests.small_ingest import dataset_of


@pytest.fixture
def first(tmp_path: Path, store: Store, make_image) -> Manifest:
    """A dataset of 40 images from ``old/images``."""
    images = {f"{'ab'[number % 2]}/{number}.png": make_image(number) for number in range(40)}
    return dataset_of(write_files(tmp_path / "old" / "images", images), store).manifest


def move(tmp_path: Path, target: str) -> str:
    """Move the images, delete four, and give one another label; return the new source."""
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(tmp_path / "old" / "images", tmp_path / target)
    for number in range(4):
        (tmp_path / target / "ab"[number % 2] / f"{number}.png").unlink()
    (tmp_path / target / "a" / "10.png").rename(tmp_path / target / "b" / "10.png")
    return f"folder:{tmp_path / target}"


@pytest.mark.parametrize("target", ["new/images", "new/pictures"])
@pytest.mark.parametrize("other_hint", [True, False])
def test_deletions_and_labels_count_after_a_move(tmp_path, store, first, contents, target, other_hint) -> None:
    old, new = f"folder:{tmp_path / 'old' / 'images'}", move(tmp_path, target)
    before = contents(first)
    if other_hint:
        ingest_source(DataSettings(source=new, dataset="images"), store.uri)
    moved = ingest_source(DataSettings(source=new), store.uri, moved_from=old)
    after = contents(moved)
    assert moved.name == "images"
    assert len(after) == 36
    assert after.split.items() <= before.split.items()
    assert sum(label != before.label[digest] for digest, label in after.label.items()) == 1
    assert not moved.problem_counts.get("conflicting_labels")
    assert ingest_source(DataSettings(source=new), store.uri, moved_from=old) == moved  # once more
    assert ingest_source(DataSettings(source=new, dataset="images"), store.uri) == moved
    assert find(store).images == 4


def test_unchanged_images_are_new_to_nobody_after_a_move(tmp_path: Path, store: Store, first: Manifest) -> None:
    """The digest of the snapshot is equal; its tables and manifest name the new source."""
    shutil.move(tmp_path / "old" / "images", tmp_path / "images")
    new = f"folder:{tmp_path / 'images'}"
    settings = DataSettings(source=new, dataset="images")
    moved = ingest_source(settings, store.uri, moved_from=f"folder:{tmp_path / 'old' / 'images'}")
    assert (moved.digest, moved.source) == (first.digest, new)
    (diff,) = diff_source(settings, store, [moved])
    assert (diff.new, diff.removed) == (0, 0)
    assert newest_dataset(store, Settings(data=settings)).digest == first.digest
    head = Snapshots(store, "images").head()
    assert head.source == new


def test_mistyped_earlier_location_draws_no_new_splits(tmp_path: Path, store: Store, first: Manifest) -> None:
    new, mistyped = move(tmp_path, "new/images"), f"folder:{tmp_path / 'old' / 'imagse'}"
    for name, found in ("", "The store has no dataset 'imagse'"), ("images", f"'images' was made from {first.source}"):
        with pytest.raises(SettingsError, match=rf"{found}, so no image has moved from {mistyped}\. Correct --moved-f"):
            ingest_source(DataSettings(source=new, dataset=name), store.uri, moved_from=mistyped)
    assert Snapshots(store, "images").head() == first
    assert Snapshots(store, "imagse").head() is None
    require_moved(first.model_copy(update={"decoders": {}}), "images", new, mistyped)  # a repair forgets the sources


def test_message_offers_the_move(tmp_path: Path, store: Store, first: Manifest) -> None:
    with pytest.raises(DataError, match=f"If the images have moved, add --moved-from {first.source}\\."):
        ingest_source(DataSettings(source=move(tmp_path, "new/images")), store.uri)
