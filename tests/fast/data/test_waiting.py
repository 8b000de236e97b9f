"""A class that consists only of answers from review waits until it has enough of them."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.listing import ClassMinimum
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.source_diff import diff_source, fetch_ledger
from evernear.data.validate import Report, require_valid, validate_dataset
from evernear.errors import DataError
from evernear.settings import ClassSettings, DataSettings, ValidationSettings

MINIMUM = 10
Ingest = Callable[..., Manifest]
MakeImage = Callable[..., bytes]


def mark(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:16]


@pytest.fixture
def answer(tree: Path, make_image: MakeImage) -> Callable[..., list[Path]]:
    """``answer("sevn", 500)`` names the image 500 as review does."""

    def answer(label: str, *numbers: int, name: str = "review-{}.png") -> list[Path]:
        (tree / label).mkdir(exist_ok=True)
        paths = [tree / label / name.format(mark(number)) for number in numbers]
        for path, number in zip(paths, numbers, strict=True):
            path.write_bytes(make_image(number))
        return paths

    return answer


@pytest.fixture
def ingest(tree: Path, tmp_path: Path) -> Ingest:
    def ingest(minimum: int = MINIMUM, live: tuple[str, ...] = (), **settings: object) -> Manifest:
        values = DataSettings.model_validate({"source": f"folder:{tree}", **settings})
        return ingest_source(values, (tmp_path / "store").as_uri(), minimum=ClassMinimum(minimum, live))

    return ingest


def validated(manifest: Manifest, champion_labels: tuple[str, ...] = (), retired: tuple[str, ...] = ()) -> Report:
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    return validate_dataset(dataset, ValidationSettings(), champion_labels, ClassSettings(retired=retired))


def images_of(manifest: Manifest, label: str) -> int:
    return sum(manifest.label_counts(split).get(label, 0) for split in SPLITS)


def test_mistyped_class_stops_no_run_and_is_named(ingest: Ingest, answer) -> None:
    before = ingest()
    answer("sevn", 500)
    answer("egiht", 501, 502)
    manifest = ingest()
    assert manifest.digest == before.digest, "the run is the same as without the images"
    assert manifest.small_classes.waiting == {"egiht": 2, "sevn": 1}
    report = validated(manifest)
    require_valid(report)
    assert "2 classes wait for more images from review: egiht (2 of 10), sevn (1 of 10)" in " ".join(report.notes())
    assert report.summary() == "no problems"
    assert "sevn (1 of 10)" in report.markdown()
    assert "sevn (1 of 10)" in manifest.summary()
    assert ingest() == manifest


def test_images_enter_by_themselves_when_their_class_has_enough(ingest: Ingest, answer) -> None:
    answer("seven", *range(500, 509))
    assert images_of(ingest(), "seven") == 0
    answer("seven", 509)
    manifest = ingest()
    assert images_of(manifest, "seven") == 10
    assert manifest.small_classes.waiting == {}
    require_valid(validated(manifest))


@pytest.mark.parametrize("minimum", [1, 5])
def test_minimum_of_the_run_decides(ingest: Ingest, answer, minimum: int) -> None:
    answer("seven", *range(500, 505))
    assert images_of(ingest(minimum), "seven") == 5
    assert images_of(ingest(6), "seven") == 0


def test_tiny_class_of_the_source_stays_an_error(ingest: Ingest, answer, make_image, tree: Path) -> None:
    answer("mixed", *range(500, 504))
    (tree / "mixed" / "zzz.png").write_bytes(make_image(600))
    (tree / "own").mkdir()
    (tree / "own" / "a.png").write_bytes(make_image(601))
    manifest = ingest()
    assert manifest.small_classes.waiting == {}
    with pytest.raises(DataError, match=re.escape("fewer: mixed (5), own (1)")):
        require_valid(validated(manifest))


def test_corrected_label_waits_like_a_named_query(ingest: Ingest, answer, tree: Path) -> None:
    """`Answers` moves the file of a suspect image, with its name, to its new class."""
    original = tree / "1" / "000.png"
    answer("sevn", 0, name="000-review-{}.png")
    original.unlink()
    manifest = ingest()
    assert manifest.small_classes.waiting == {"sevn": 1}
    require_valid(validated(manifest))


def test_copies_of_an_image_count_once(ingest: Ingest, answer) -> None:
    answer("sevn", 500)
    for number in range(1, 10):
        answer("sevn", 500, name=f"img-review-{{}}-{number}.png")
    assert ingest().small_classes.waiting == {"sevn": 1}


def test_class_whose_answers_are_one_image_twice_stops_no_run(ingest: Ingest, answer, make_image) -> None:
    paths = answer("sevn", *range(500, 510))
    paths[1].write_bytes(make_image(500))
    manifest = ingest()
    assert manifest.small_classes.used == {"sevn": 9}
    report = validated(manifest)
    require_valid(report)
    assert "sevn (9 of 10)" in " ".join(report.notes())


def test_answer_taken_back_lets_the_class_wait_again(ingest: Ingest, answer) -> None:
    first, *rest = answer("sevn", *range(500, 510))
    ingest()
    first.unlink()
    manifest = ingest()
    assert (images_of(manifest, "sevn"), manifest.small_classes.waiting) == (0, {"sevn": 9})
    require_valid(validated(manifest))
    for path in rest:
        path.unlink()
    assert ingest().small_classes.waiting == {}


def test_class_of_the_live_release_does_not_wait(ingest: Ingest, answer) -> None:
    first, *_ = answer("sevn", *range(500, 510))
    ingest()
    first.unlink()
    manifest = ingest(live=("1", "2", "10", "sevn"))
    assert images_of(manifest, "sevn") == 9
    report = validated(manifest, champion_labels=("1", "2", "10", "sevn"))
    require_valid(report)
    assert "sevn (9 of 10)" in " ".join(report.notes())


def test_retired_class_may_be_named_by_mistake(ingest: Ingest, answer) -> None:
    answer("old", 500)
    require_valid(validated(ingest(), champion_labels=("1", "2", "10", "old"), retired=("old",)))


def test_single_class_says_what_waits(ingest: Ingest, answer, tree: Path) -> None:
    for label in ("2", "10"):
        shutil.rmtree(tree / label)
    answer("sevn", 500)
    with pytest.raises(DataError, match=r"only one class .* waits for more images from review: sevn \(1 of 10\)\."):
        ingest()


def test_split_folders_and_late_images_of_the_source(tmp_path: Path, make_image) -> None:
    for number in range(80):
        path = tmp_path / "tree" / ("test" if number % 4 == 0 else "train") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(number))
    for folder, name in (("test/late", f"review-{mark(900)}.png"), ("train/late", "own.png"), ("train/sevn", "")):
        path = tmp_path / "tree" / folder / (name or f"review-{mark(901)}.png")
        path.parent.mkdir(parents=True)
        path.write_bytes(make_image(len(folder) + 900))
    settings = DataSettings(source=f"folder:{tmp_path / 'tree'}")
    manifest = ingest_source(settings, (tmp_path / "store").as_uri(), minimum=ClassMinimum(MINIMUM))
    assert manifest.small_classes.waiting == {"sevn": 1}
    assert images_of(manifest, "late") == 2, "a class with an image of the source does not wait"


def changes(tree: Path, manifest: Manifest, scratch: Path, minimum: int = MINIMUM):
    ledger = fetch_ledger(open_store(manifest.store_uri), manifest, scratch)
    (diff,) = diff_source(DataSettings(source=f"folder:{tree}"), [ledger], minimum=ClassMinimum(minimum))
    return diff


def test_watcher_counts_waiting_images_when_they_enter(ingest: Ingest, answer, tree: Path, tmp_path: Path) -> None:
    manifest = ingest()
    listing = changes(tree, manifest, tmp_path / "cache").listing
    answer("sevn", *range(500, 509))
    waiting = changes(tree, manifest, tmp_path / "cache")
    assert (waiting.new, dict(waiting.labels), waiting.listing) == (0, {}, listing)
    answer("sevn", 509)
    entered = changes(tree, ingest(), tmp_path / "cache")
    assert entered.new == 0
    entered = changes(tree, manifest, tmp_path / "cache")
    assert (entered.new, dict(entered.labels)) == (10, {"sevn": 10})


def test_waiting_image_is_not_forgotten_while_the_source_has_it(
    ingest: Ingest, answer, make_image, digest_of, tmp_path: Path
) -> None:
    first, second, *_ = answer("sevn", *range(500, 510))
    snapshots = Snapshots(open_store((tmp_path / "store").as_uri()), ingest().name)
    first.unlink()
    present = set(snapshots.images(ingest()))
    assert digest_of(make_image(500)) not in present
    assert digest_of(make_image(501)) in present
    second.unlink()
    assert digest_of(make_image(501)) not in set(snapshots.images(ingest()))
