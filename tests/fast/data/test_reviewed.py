"""Images that came by review are in train and gallery only, also those that had a place before."""

import hashlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.validate import validate_dataset
from evernear.settings import ValidationSettings


def name_of_review(number: int) -> str:
    return f"review-{hashlib.sha256(str(number).encode()).hexdigest()[:16]}.png"


@pytest.fixture
def reviewed(tree: Path, make_image) -> dict[int, str]:
    """30 images of class 1 that came by review, by number; 30 of the person's own are in ``tree``
    besides."""
    for number in range(500, 530):
        (tree / "1" / name_of_review(number)).write_bytes(make_image(number))
    return {number: name_of_review(number) for number in range(500, 530)}


def under_own_names(run_ingest, tree: Path) -> Manifest:
    """Ingest the images that came by review before they have the names of review."""
    files = sorted(tree.rglob("review-*"))
    for file in files:
        file.rename(file.with_name(f"own-{file.name.removeprefix('review-')}"))
    manifest = run_ingest(tree)
    for file in files:
        file.with_name(f"own-{file.name.removeprefix('review-')}").rename(file)
    return manifest


@pytest.fixture
def earlier(run_ingest, tree: Path, reviewed) -> Manifest:
    return under_own_names(run_ingest, tree)


@pytest.fixture
def digests(reviewed, make_image, digest_of) -> set[bytes]:
    return {digest_of(make_image(number)) for number in reviewed}


def test_images_of_existing_test_and_query_splits_move_to_train(earlier, tree, run_ingest, contents, digests) -> None:
    before = contents(earlier)
    measured = {digest for digest in digests if before.split[digest] in ("test", "query")}
    assert {before.split[digest] for digest in measured} == {"test", "query"}, "as they are without this"
    manifest = run_ingest(tree)
    after = contents(manifest)
    moved = {digest for digest in after.split if after.split[digest] != before.split[digest]}
    assert moved == measured
    assert {after.split[digest] for digest in moved} == {"train"}
    assert {d: after.label[d] for d in after.label} == {d: before.label[d] for d in before.label}
    assert all((after.image[d] == before.image[d]).all() for d in before.image)
    assert manifest.reviewed == len(digests)
    left = {split: sum(before.split[digest] == split for digest in digests) for split in ("test", "query")}
    assert {split: sum(labels.values()) for split, labels in manifest.reviewed_left_out.items()} == left
    assert contents(earlier).split == before.split, "the earlier snapshot is unchanged"
    assert run_ingest(tree) == manifest


def test_renamed_image_stays_out_of_the_measurement(earlier, tree, run_ingest, contents, reviewed, digests) -> None:
    run_ingest(tree)
    for number, name in reviewed.items():
        (tree / "1" / name).rename(tree / "1" / f"mine-{number}.png")
    manifest = run_ingest(tree)
    assert {contents(manifest).split[digest] for digest in digests} <= {"train", "gallery"}
    assert manifest.reviewed == len(digests)


def test_removed_and_restored_image_does_not_return_to_the_test_split(
    earlier, tree, run_ingest, contents, digests, tmp_path
) -> None:
    run_ingest(tree)
    shutil.copytree(tree, tmp_path / "copy")
    for file in (tree / "1").glob("review-*"):
        file.unlink()
    assert digests.isdisjoint(contents(run_ingest(tree)).split)
    for number, file in enumerate((tmp_path / "copy" / "1").glob("review-*")):
        shutil.copy(file, tree / "1" / f"again-{number}.png")
    assert {contents(run_ingest(tree)).split[digest] for digest in digests} <= {"train", "gallery"}


def test_folder_of_the_test_split_does_not_make_a_reviewed_image_measured(
    tmp_path, make_image, digest_of, run_ingest, contents
) -> None:
    for number in range(80):
        path = tmp_path / "tree" / ("test" if number % 4 == 0 else "train") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(number))
    run_ingest(tmp_path / "tree")
    (tmp_path / "tree" / "test" / "a" / name_of_review(900)).write_bytes(make_image(900))
    manifest = run_ingest(tmp_path / "tree")
    assert contents(manifest).split[digest_of(make_image(900))] in ("train", "gallery")
    assert manifest.reviewed_left_out == {"test": {"a": 1}}


def test_own_image_with_the_same_pixels_stays_in_its_split(
    monkeypatch, tree, run_ingest, make_image, digest_of, contents, tmp_path
) -> None:
    before = contents(run_ingest(tree))
    own = next(number for number in range(0, 120, 3) if before.split[digest_of(make_image(number))] == "test")
    (tree / "1" / name_of_review(own)).write_bytes(make_image(own))
    manifest = run_ingest(tree)
    assert contents(manifest).split[digest_of(make_image(own))] == "test"
    assert (manifest.reviewed, manifest.reviewed_left_out) == (0, {})


def test_images_that_are_decoded_again_do_not_return_either(
    monkeypatch, earlier, tree, run_ingest, contents, digests
) -> None:
    monkeypatch.setattr("evernear.data.ingest.code_digest", lambda *_: "another")
    manifest = run_ingest(tree)
    assert {contents(manifest).split[digest] for digest in digests} <= {"train", "gallery"}
    assert manifest.reviewed == len(digests)


def test_forgotten_images_leave_no_trace_in_the_ledger(tree, run_ingest, reviewed, digests, tmp_path) -> None:
    run_ingest(tree)
    for file in (tree / "1").glob("review-*"):
        file.unlink()
    manifest = run_ingest(tree)
    snapshots = Snapshots(open_store((tmp_path / "store").as_uri()), manifest.name)
    snapshots.compact_ledgers([manifest])
    head = snapshots.head()
    assert head is not None
    snapshots.fetch_ledger(head, tmp_path / "ledger.sqlite")
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM reviewed").fetchone() == (0,)
    db.close()


def validated(manifest: Manifest, store: Path) -> list[str]:
    dataset = Dataset(manifest, open_store(store.as_uri()))
    findings = validate_dataset(dataset, ValidationSettings()).findings
    return [finding.message for finding in findings if finding.rule == "reviewed"]


def test_validation_says_how_many_left_the_measurement(earlier, tree, run_ingest, tmp_path: Path) -> None:
    manifest = run_ingest(tree)
    (message,) = validated(manifest, tmp_path / "store")
    for split, labels in manifest.reviewed_left_out.items():
        assert f"{sum(labels.values())} of the {split} split" in message
    assert "No test image remains" not in message


def test_validation_names_classes_whose_test_images_all_came_by_review(
    tree: Path, run_ingest: Callable[..., Manifest], make_image, tmp_path: Path
) -> None:
    (tree / "cup").mkdir()
    for number in range(700, 740):
        (tree / "cup" / name_of_review(number)).write_bytes(make_image(number))
    under_own_names(run_ingest, tree)
    (message,) = validated(run_ingest(tree), tmp_path / "store")
    assert "No test image remains of cup; add images that were chosen at random." in message
