"""Images that came by review are in train and gallery only, also those that had a place before."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.books import opened_books
from evernear.data.ingest import ingest_source
from evernear.data.list import ClassMinimum
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.repair import stored_digests
from evernear.data.snapshots import Snapshots
from evernear.data.source_diff import diff_source
from evernear.data.validate import Report, require_valid, validate_dataset
from evernear.errors import DataError
from evernear.settings import ClassSettings, DataSettings, ValidationSettings
from tests.dataset_images import write_files
from tests.small_ingest import findings, opened


def name_of_review(number: int, name: str = "review-{}.png") -> str:
    return name.format(hashlib.sha256(str(number).encode()).hexdigest()[:16])


@pytest.fixture
def reviewed(tree: Path, make_image) -> dict[int, str]:
    """30 images of class 1 that came by review, by number, beside 12 of the person's own."""
    names = {number: name_of_review(number) for number in range(500, 530)}
    write_files(tree / "1", {name: make_image(number) for number, name in names.items()})
    return names


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


def test_restored_image_does_not_return_to_the_test_split(
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


def test_reviewed_image_in_a_test_folder_is_not_measured(tmp_path, make_image, digest_of, run_ingest, contents) -> None:
    names = {number: f"{'train' if number % 4 else 'test'}/{'ab'[number % 2]}/{number}.png" for number in range(40)}
    root = write_files(tmp_path / "tree", {name: make_image(number) for number, name in names.items()})
    run_ingest(root)
    manifest = run_ingest(write_files(root, {f"test/a/{name_of_review(900)}": make_image(900)}))
    assert contents(manifest).split[digest_of(make_image(900))] in ("train", "gallery")
    assert manifest.reviewed_left_out == {"test": {"a": 1}}


def test_own_image_with_the_same_pixels_stays_in_its_split(tree, run_ingest, make_image, digest_of, contents) -> None:
    before = contents(run_ingest(tree))
    own = next(number for number in range(0, 36, 3) if before.split[digest_of(make_image(number))] == "test")
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


def test_forgotten_images_leave_no_trace_in_the_tables(tree, run_ingest, reviewed, tmp_path) -> None:
    run_ingest(tree)
    for file in (tree / "1").glob("review-*"):
        file.unlink()
    manifest = run_ingest(tree)
    snapshots = Snapshots(open_store((tmp_path / "store").as_uri()), manifest.name)
    snapshots.compact_tables([manifest])
    head = snapshots.head()
    assert head is not None
    with opened_books(snapshots.store, head) as books:
        assert books.value("SELECT count(*) FROM images") == sum(map(head.count, SPLITS))
        assert books.value("SELECT count(*) FROM images WHERE reviewed IS NOT NULL") == 0
        assert books.value("SELECT count(*) FROM removed") == 0


def messages(manifest: Manifest) -> list[str]:
    return [finding.message for finding in findings(manifest) if finding.rule == "reviewed"]


def test_validation_says_how_many_left_the_measurement(earlier, tree, run_ingest) -> None:
    manifest = run_ingest(tree)
    (message,) = messages(manifest)
    for split, labels in manifest.reviewed_left_out.items():
        assert f"{sum(labels.values())} of the {split} split" in message


def test_validation_names_classes_whose_test_images_all_came_by_review(tree, run_ingest, make_image) -> None:
    write_files(tree / "cup", {name_of_review(number): make_image(number) for number in range(700, 740)})
    under_own_names(run_ingest, tree)
    (message,) = messages(run_ingest(tree))
    assert "No test image remains of cup; add images that were chosen at random." in message


# A class of answers from review alone waits until it has enough of them


MINIMUM = 10
Ingest = Callable[..., Manifest]
MakeImage = Callable[..., bytes]


@pytest.fixture
def answer(tree: Path, make_image: MakeImage) -> Callable[..., list[Path]]:
    """``answer("sevn", 500)`` names the image 500 as review does."""

    def answer(label: str, *numbers: int, name: str = "review-{}.png") -> list[Path]:
        names = {number: f"{label}/{name_of_review(number, name)}" for number in numbers}
        write_files(tree, {name: make_image(number) for number, name in names.items()})
        return [tree / name for name in names.values()]

    return answer


@pytest.fixture
def ingest_tree(tree: Path, tmp_path: Path) -> Ingest:
    def ingest_tree(minimum: int = MINIMUM, live: tuple[str, ...] = (), **settings: object) -> Manifest:
        values = DataSettings.model_validate({"source": f"folder:{tree}", **settings})
        return ingest_source(values, (tmp_path / "store").as_uri(), minimum=ClassMinimum(minimum, live))

    return ingest_tree


def validated(manifest: Manifest, champion_labels: tuple[str, ...] = (), retired: tuple[str, ...] = ()) -> Report:
    return validate_dataset(opened(manifest), ValidationSettings(), champion_labels, ClassSettings(retired=retired))


def images_of(manifest: Manifest, label: str) -> int:
    return manifest.images_by_class().get(label, 0)


def test_mistyped_class_stops_no_run_and_is_named(ingest_tree: Ingest, answer) -> None:
    before = ingest_tree()
    answer("sevn", 500)
    answer("egiht", 501, 502)
    manifest = ingest_tree()
    assert manifest.digest == before.digest, "the run is the same as without the images"
    assert manifest.small_classes.waiting == {"egiht": 2, "sevn": 1}
    report = validated(manifest)
    require_valid(report)
    assert "2 classes wait for more images from review: egiht (2 of 10), sevn (1 of 10)" in " ".join(report.notes())
    assert report.summary() == "no problems"
    assert "sevn (1 of 10)" in report.markdown()
    assert "sevn (1 of 10)" in manifest.summary()
    assert ingest_tree() == manifest


def test_images_enter_by_themselves_when_their_class_has_enough(ingest_tree: Ingest, answer) -> None:
    answer("seven", *range(500, 509))
    assert images_of(ingest_tree(), "seven") == 0
    answer("seven", 509)
    manifest = ingest_tree()
    assert images_of(manifest, "seven") == 10
    assert manifest.small_classes.waiting == {}
    require_valid(validated(manifest))


@pytest.mark.parametrize("minimum", [1, 5])
def test_minimum_of_the_run_decides(ingest_tree: Ingest, answer, minimum: int) -> None:
    answer("seven", *range(500, 505))
    assert images_of(ingest_tree(minimum), "seven") == 5
    assert images_of(ingest_tree(6), "seven") == 0


def test_tiny_class_of_the_source_stays_an_error(ingest_tree: Ingest, answer, make_image, tree: Path) -> None:
    answer("mixed", *range(500, 504))
    write_files(tree, {"mixed/zzz.png": make_image(600), "own/a.png": make_image(601)})
    manifest = ingest_tree()
    assert manifest.small_classes.waiting == {}
    with pytest.raises(DataError, match=re.escape("fewer: mixed (5), own (1)")):
        require_valid(validated(manifest))


def test_corrected_label_waits_like_a_named_query(ingest_tree: Ingest, answer, tree: Path) -> None:
    """`Answers` moves the file of a suspect image, with its name, to its new class."""
    original = tree / "1" / "000.png"
    answer("sevn", 0, name="000-review-{}.png")
    original.unlink()
    manifest = ingest_tree()
    assert manifest.small_classes.waiting == {"sevn": 1}
    require_valid(validated(manifest))


def test_copies_of_an_image_count_once(ingest_tree: Ingest, answer) -> None:
    answer("sevn", 500)
    for number in range(1, 10):
        answer("sevn", 500, name=f"img-review-{{}}-{number}.png")
    assert ingest_tree().small_classes.waiting == {"sevn": 1}


def test_class_whose_answers_are_one_image_twice_stops_no_run(ingest_tree: Ingest, answer, make_image) -> None:
    paths = answer("sevn", *range(500, 510))
    paths[1].write_bytes(make_image(500))
    manifest = ingest_tree()
    assert manifest.small_classes.used == {"sevn": 9}
    report = validated(manifest)
    require_valid(report)
    assert "sevn (9 of 10)" in " ".join(report.notes())


def test_answer_taken_back_lets_the_class_wait_again(ingest_tree: Ingest, answer) -> None:
    first, *rest = answer("sevn", *range(500, 510))
    ingest_tree()
    first.unlink()
    manifest = ingest_tree()
    assert (images_of(manifest, "sevn"), manifest.small_classes.waiting) == (0, {"sevn": 9})
    require_valid(validated(manifest))
    for path in rest:
        path.unlink()
    assert ingest_tree().small_classes.waiting == {}


def test_class_of_the_live_release_does_not_wait(ingest_tree: Ingest, answer) -> None:
    first, *_ = answer("sevn", *range(500, 510))
    ingest_tree()
    first.unlink()
    manifest = ingest_tree(live=("1", "2", "10", "sevn"))
    assert images_of(manifest, "sevn") == 9
    report = validated(manifest, champion_labels=("1", "2", "10", "sevn"))
    require_valid(report)
    assert "sevn (9 of 10)" in " ".join(report.notes())


def test_retired_class_may_be_named_by_mistake(ingest_tree: Ingest, answer) -> None:
    answer("old", 500)
    report = validated(ingest_tree(), champion_labels=("1", "2", "10", "old"), retired=("old",))
    require_valid(report)
    assert "old (1 of 10)" in " ".join(report.notes())


def test_single_class_says_what_waits(ingest_tree: Ingest, answer, tree: Path) -> None:
    for label in ("2", "10"):
        shutil.rmtree(tree / label)
    answer("sevn", 500)
    with pytest.raises(DataError, match=r"only one class .* waits for more images from review: sevn \(1 of 10\)\."):
        ingest_tree()


def test_split_folders_and_late_images_of_the_source(tmp_path: Path, make_image) -> None:
    names = [f"{'train' if number % 4 else 'test'}/{'ab'[number % 2]}/{number}.png" for number in range(80)]
    names += [f"test/late/{name_of_review(900)}", "train/late/own.png", f"train/sevn/{name_of_review(901)}"]
    write_files(tmp_path / "tree", {name: make_image(number) for number, name in enumerate(names)})
    settings = DataSettings(source=f"folder:{tmp_path / 'tree'}")
    manifest = ingest_source(settings, (tmp_path / "store").as_uri(), minimum=ClassMinimum(MINIMUM))
    assert manifest.small_classes.waiting == {"sevn": 1}
    assert images_of(manifest, "late") == 2, "a class with an image of the source does not wait"


def changes(tree: Path, manifest: Manifest, scratch: Path, minimum: int = MINIMUM):
    store, settings = open_store(manifest.store_uri), DataSettings(source=f"folder:{tree}")
    (diff,) = diff_source(settings, store, [manifest], minimum=ClassMinimum(minimum), cache=scratch)
    return diff


def test_watcher_counts_waiting_images_when_they_enter(ingest_tree: Ingest, answer, tree: Path, tmp_path: Path) -> None:
    manifest = ingest_tree()
    listing = changes(tree, manifest, tmp_path / "cache").listing
    answer("sevn", *range(500, 509))
    waiting = changes(tree, manifest, tmp_path / "cache")
    assert (waiting.new, dict(waiting.labels), waiting.listing) == (0, {}, listing)
    answer("sevn", 509)
    entered = changes(tree, ingest_tree(), tmp_path / "cache")
    assert entered.new == 0
    entered = changes(tree, manifest, tmp_path / "cache")
    assert (entered.new, dict(entered.labels)) == (10, {"sevn": 10})


def test_waiting_image_is_kept_while_the_source_has_it(
    ingest_tree: Ingest, answer, make_image, digest_of, tmp_path
) -> None:
    first, second, *_ = answer("sevn", *range(500, 510))
    snapshots = Snapshots(open_store((tmp_path / "store").as_uri()), ingest_tree().name)
    first.unlink()
    present = set(stored_digests(snapshots, ingest_tree()))
    assert digest_of(make_image(500)) not in present
    assert digest_of(make_image(501)) in present
    second.unlink()
    assert digest_of(make_image(501)) not in set(stored_digests(snapshots, ingest_tree()))
