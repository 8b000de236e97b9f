import hashlib
import itertools
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from evernear.common.frozen import FORMAT
from evernear.common.store import open_store
from evernear.data.books import opened_books
from evernear.data.encoded_image import EncodedImage
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest, manifest_key
from evernear.data.preprocess import Picture, decode_inspected
from evernear.data.reduction import BitDepth
from evernear.data.validate import validate_dataset
from evernear.errors import DataError, FormatError, IntegrityError
from evernear.settings import DataSettings, ValidationSettings
from tests.dataset_images import write_files
from tests.small_ingest import dataset_of, ingest_small, ingest_with, opened


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the files that ingest decodes."""
    names: list[str] = []

    def counting(file: EncodedImage, bit_depth: BitDepth) -> Picture:
        names.append(file.name)
        return decode_inspected(file, bit_depth)

    monkeypatch.setattr("evernear.data.decoding.decode_inspected", counting)
    return names


def test_second_ingest_adds_only_new_images(tree, run_ingest, make_image, contents, decoded) -> None:
    first = run_ingest(tree)
    old = contents(first)
    write_files(tree, {f"{'127'[number % 3]}/{number}.png": make_image(number) for number in range(1000, 1060)})
    decoded.clear()
    # Changed split fractions apply only to new images.
    second = run_ingest(tree, test_fraction=0.5)
    new = contents(second)
    assert len(decoded) == 60
    assert len(new) == 96
    assert second.parent == first.digest
    assert second.labels == ("1", "2", "10", "7")
    assert {digest: new.split[digest] for digest in old.split} == old.split
    added = Counter(split for digest, split in new.split.items() if digest not in old.split)
    assert added["test"] > 20
    # The first snapshot is unchanged.
    assert contents(first).label == old.label
    # Shards that are not nearly full are filled.
    assert [shard.split for shard in second.shards] == ["train", "test", "gallery", "query"]


def test_images_that_came_by_review_are_not_measured_on(tree, run_ingest, make_image, contents) -> None:
    old = contents(run_ingest(tree))
    for number in range(2000, 2060):
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        (tree / "1" / f"review-{sha256[:16]}.png").write_bytes(make_image(number))
        (tree / "2" / f"my-review-{number}.png").write_bytes(make_image(number + 100))
    new = contents(run_ingest(tree))
    added = {digest: split for digest, split in new.split.items() if digest not in old.split}
    by_label = {
        label: Counter(split for digest, split in added.items() if new.label[digest] == label) for label in "12"
    }
    assert set(by_label["1"]) == {"train", "gallery"}
    assert set(by_label["2"]) == {"train", "gallery", "test", "query"}


def test_few_shards_are_stored_again(tmp_path: Path, run_ingest, make_image, contents) -> None:
    """A shard of 132 or more of 150 images stays, and the smallest other one is filled."""

    def with_more(numbers: range) -> Manifest:
        images = {f"{number % 2}/{number}.png": make_image(number, (20, 20)) for number in numbers}
        return run_ingest(write_files(tmp_path / "tree", images))

    first = with_more(range(100))
    manifests = [first, *(with_more(range(start, start + 40)) for start in range(100, 300, 40))]
    assert len(contents(manifests[-1])) == 300
    for before, after in itertools.pairwise(manifests):
        small = [shard for shard in before.shards if shard.split == "train" and shard.count < 132]
        kept = {shard.sha256 for shard in after.shards}
        stored_again = [shard for shard in before.shards if shard.split == "train" and shard.sha256 not in kept]
        assert len(small) <= 1
        assert stored_again == small
        assert sum(shard.split == "train" for shard in after.shards) <= after.count("train") // 132 + 1


def test_copies_with_different_labels_stay_left_out(tree, run_ingest, make_image, contents, digest_of) -> None:
    for label in ("1", "2"):
        (tree / label / "copy.png").write_bytes(make_image(5000))
    for number in range(3):
        (tree / "1" / f"more-{number}.png").write_bytes(make_image(6000 + number))
        assert digest_of(make_image(5000)) not in contents(run_ingest(tree)).split
    (tree / "2" / "copy.png").unlink()
    manifest = run_ingest(tree)
    assert contents(manifest).label[digest_of(make_image(5000))] == "1"


def test_snapshot_mirrors_the_source(tree, run_ingest, make_image, contents, digest_of) -> None:
    first = contents(run_ingest(tree))
    moved, removed, changed = (tree / "1" / f"{number:03}.png" for number in (0, 3, 6))
    moved_data, gone_data, old_data = moved.read_bytes(), removed.read_bytes(), changed.read_bytes()
    moved.rename(tree / "2" / "000.png")
    removed.unlink()
    changed.write_bytes(make_image(77_777))
    manifest = run_ingest(tree)
    images = contents(manifest)
    assert manifest.problem_counts == {}
    assert images.label[digest_of(moved_data)] == "2"
    assert images.split[digest_of(moved_data)] == first.split[digest_of(moved_data)]
    assert digest_of(gone_data) not in images.label
    assert digest_of(old_data) not in images.label
    assert images.label[digest_of(make_image(77_777))] == "1"
    assert len(images) == 35
    assert sum(manifest.label_counts("train").values()) == manifest.count("train")

    # Restoring the source restores the snapshot, except for the order.
    (tree / "2" / "000.png").rename(moved)
    removed.write_bytes(gone_data)
    changed.write_bytes(old_data)
    assert contents(run_ingest(tree)).label == first.label


def test_removed_class_keeps_its_number(tree, run_ingest, contents) -> None:
    run_ingest(tree)
    for path in (tree / "2").iterdir():
        path.unlink()
    (tree / "2").rmdir()
    manifest = run_ingest(tree)
    assert manifest.labels == ("1", "2", "10")
    assert set(contents(manifest).label.values()) == {"1", "10"}
    assert manifest.problem_counts == {}


def test_two_sources_form_one_dataset(tree, tmp_path: Path, run_ingest, make_image, contents, digest_of) -> None:
    run_ingest(tree, dataset="both")
    other = write_files(tmp_path / "other", {"3/x.png": make_image(2000), "3/y.png": make_image(0), "3/z.png": b""})
    manifest = run_ingest(other, dataset="both")  # the second image is also in the first source, as class 1
    images = contents(manifest)
    assert images.label[digest_of(make_image(2000))] == "3"
    assert manifest.problem_counts == {"conflicting_labels": 1, "undecodable": 1}
    empty, conflict = manifest.problems
    assert empty.detail == f"{empty.names[0]} is empty."
    assert conflict.names == (f"folder:{tmp_path}/other/3/y.png", f"folder:{tree}/1/000.png")
    assert len(images) == 36


def test_folders_with_the_same_name_are_not_merged(tree, tmp_path: Path, run_ingest) -> None:
    first = run_ingest(tree)
    moved = tmp_path / "elsewhere" / "tree"
    shutil.copytree(tree, moved)
    (moved / "1" / "000.png").rename(moved / "2" / "000.png")
    with pytest.raises(
        DataError,
        match=f"'tree' was made from folder:{tree}, .* add --moved-from folder:{tree}\\. .* set data.dataset=tree",
    ):
        run_ingest(moved)
    assert run_ingest(tree) == first
    assert run_ingest(moved, dataset="tree").problem_counts == {"conflicting_labels": 1, "duplicate": 35}
    assert run_ingest(moved, dataset="new").problem_counts == {}


def test_image_moved_to_another_split_keeps_its_split(tmp_path, run_ingest, make_image, contents, digest_of) -> None:
    names = {number: f"{('train', 'test')[number % 2]}/{'ab'[number // 2 % 2]}/{number}.png" for number in range(40)}
    root = write_files(tmp_path / "given", {name: make_image(number) for number, name in names.items()})
    before = contents(run_ingest(root)).split
    (root / "test" / "a" / "again.png").write_bytes(make_image(0))
    manifest = run_ingest(root)
    assert contents(manifest).split == before
    assert before[digest_of(make_image(0))] != "test"
    assert manifest.problem_counts == {"duplicate_across_splits": 1}


def test_split_that_the_source_names_later_is_said_to_have_no_effect(tree, run_ingest, tmp_path: Path) -> None:
    before = run_ingest(tree)
    inside = {path: path.relative_to(tree) for path in sorted(tree.rglob("*.png"))}
    moved = {path: ("train", "test")[number % 3 == 0] for number, path in enumerate(inside)}
    for path, split in moved.items():
        target = tree / split / inside[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    for folder in {path.parent for path in inside}:
        folder.rmdir()
    after = run_ingest(tree)
    assert after.count("test") == before.count("test")
    report = validate_dataset(opened(after), ValidationSettings())
    (message,) = [f.message for f in report.findings if f.rule == "duplicate_across_splits"]
    assert re.match(
        r"\d+ images stay in the splits of an earlier ingest, although the source now names others: test/.* and more\."
        r" To use the new splits, start a new dataset \(--set data\.dataset=NAME\)\.",
        message,
    )
    assert run_ingest(tree).problem_counts == after.problem_counts  # at each ingest
    again = run_ingest(tree, dataset="again")
    assert again.count("test") == list(moved.values()).count("test")
    assert again.problem_counts == {}


def test_image_never_moves_to_a_split_that_the_source_names_later(
    tmp_path, run_ingest, make_image, contents, digest_of, monkeypatch
) -> None:
    names = {number: f"{('train', 'test')[number % 2]}/{'ab'[number // 2 % 2]}/{number}.png" for number in range(40)}
    root = write_files(tmp_path / "given", {name: make_image(number) for number, name in names.items()})
    before = contents(run_ingest(root)).split
    (root / names[0]).rename(root / "test" / "a" / "0.png")
    assert contents(run_ingest(root)).split == before
    monkeypatch.setattr("evernear.data.ingest.code_digest", lambda *_: "other code")
    again = run_ingest(root)  # all images are decoded again
    assert (contents(again).split, again.problem_counts) == (before, {"earlier_split": 1})
    (root / "test" / "a" / "0.png").unlink()
    assert digest_of(make_image(0)) not in contents(run_ingest(root)).split
    write_files(root, {"test/a/0.png": make_image(0)})
    returned = run_ingest(root)
    assert (contents(returned).split, returned.problem_counts) == (before, {"earlier_split": 1})


def test_changed_image_shape_requires_another_store(tree, run_ingest, tmp_path: Path) -> None:
    before = run_ingest(tree)
    advice = (
        r"5 x 6 x 1, but data.size_px asks for 8 x 8 x 1; leave it out, or start over with another --workdir"
        r" or store\.$"
    )
    with pytest.raises(DataError, match=advice):
        run_ingest(tree, size_px=8)
    assert run_ingest(tree) == before
    assert dataset_of(tree, tmp_path / "elsewhere", size_px=8).shape == (8, 8, 1)


def test_digest_depends_only_on_the_content(tree, tmp_path: Path) -> None:
    def digest(store: str, **settings: object) -> str:
        return ingest_with(f"folder:{tree}", (tmp_path / store).as_uri(), **settings).digest

    assert digest("here") == digest("there", dataset="other", decode_threads=7)
    assert digest("here") != digest("elsewhere", size_px=7)


def test_damaged_store_is_reported(tree, run_ingest, make_image, tmp_path: Path) -> None:
    run_ingest(tree)
    (tree / "1" / "new.png").write_bytes(make_image(1000))
    (table,) = (tmp_path / "store" / "datasets" / "tree" / "files").iterdir()
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"\.parquet in .* does not have its sha256"):
        run_ingest(tree)
    head = tmp_path / "store" / "datasets" / "tree" / "head.json"
    head.write_text("{}")
    with pytest.raises(IntegrityError, match=r"head\.json is not a valid dataset head"):
        run_ingest(tree)


def test_later_ingests_write_only_the_partitions_that_change(tmp_path, run_ingest, make_image, monkeypatch) -> None:
    monkeypatch.setattr("evernear.data.tables.PARTITION_ROWS", 20)
    root = tmp_path / "tree"
    write_files(root, {f"class-{number % 10}/{number}.png": make_image(number) for number in range(300)})
    first = run_ingest(root)
    assert {table: len(partitions) for table, partitions in first.tables.items()} == {"files": 16, "images": 16}
    write_files(root, {"class-1/new.png": make_image(300)})
    second = run_ingest(root)
    for table in ("files", "images"):
        prefixes = [{each.prefix: each.sha256 for each in manifest.tables[table]} for manifest in (first, second)]
        assert prefixes[0].keys() == prefixes[1].keys()
        changed = [prefix for prefix, sha256 in prefixes[0].items() if prefixes[1][prefix] != sha256]
        assert table == "images" or changed == [hashlib.sha256(b"class-1/new.png").hexdigest()[0]]
    monkeypatch.setattr("evernear.data.tables.PARTITION_ROWS", 1_000_000)
    whole = run_ingest(root, dataset="whole")
    with (
        opened_books(open_store(second.store_uri), second) as few,
        opened_books(open_store(whole.store_uri), whole) as one,
    ):
        for table in (
            "SELECT name, label, digest FROM files ORDER BY name",
            "SELECT digest, label FROM images ORDER BY 1",
        ):
            assert few.rows(table) == one.rows(table)


def test_changed_preprocessing_applies_to_all_images(
    tree, run_ingest, make_image, contents, decoded, monkeypatch
) -> None:
    first = run_ingest(tree)
    before = contents(first)
    (tree / "1" / "new.png").write_bytes(make_image(5000))
    decoded.clear()
    monkeypatch.setattr("evernear.data.ingest.code_digest", lambda *_: "other code")
    monkeypatch.setattr(
        "evernear.data.decoding.to_array", lambda image, *shape: 255 - np.resize(np.asarray(image), shape[:3])
    )
    messages: list[str] = []
    settings = DataSettings(source=f"folder:{tree}")
    second = ingest_small(settings, first.store_uri, messages.append)
    after = contents(second)
    assert len(decoded) == len(before) + 1
    assert messages[0].startswith("decoding all images again")
    assert {digest: after.split[digest] for digest in before.split} == before.split
    assert not {shard.sha256 for shard in first.shards} & {shard.sha256 for shard in second.shards}
    decoded.clear()
    assert run_ingest(tree) == second
    assert decoded == []


def test_splits_stay_even_if_other_code_decodes_other_pixels(tree, run_ingest, contents, monkeypatch) -> None:
    first = run_ingest(tree)
    before = Counter(contents(first).split.values())
    split_of = _splits_by_file(first)
    monkeypatch.setattr("evernear.data.ingest.code_digest", lambda *_: "other code")
    monkeypatch.setattr(Picture, "digest", lambda self: hashlib.sha256(b"other" + self.image.tobytes()).digest())
    second = run_ingest(tree)
    assert not contents(first).split.keys() & contents(second).split.keys()
    assert Counter(contents(second).split.values()) == before
    assert _splits_by_file(second) == split_of


def _splits_by_file(manifest: Manifest) -> dict[str, str]:
    with opened_books(open_store(manifest.store_uri), manifest) as books:
        return dict(books.rows("SELECT name, split FROM files JOIN images USING (digest)"))


def test_swapped_classes_are_named(tree, run_ingest, make_image) -> None:
    run_ingest(tree)
    warnings: list[str] = []
    store = (tree.parent / "store").as_uri()
    settings = DataSettings(source=f"folder:{tree}")
    ingest_source(settings, store, warn=warnings.append)
    assert not warnings
    (tree / "1").rename(tree / "swap")
    (tree / "2").rename(tree / "1")
    (tree / "swap").rename(tree / "2")
    (tree / "1" / "new.png").write_bytes(make_image(5000))
    ingest_source(settings, store, warn=warnings.append)
    (warning,) = warnings
    assert "of 1 are now 2" in warning
    assert warning.endswith("of 2 are now 1: these classes seem to have swapped their names")
    ingest_source(settings, store, warn=warnings.append)
    assert len(warnings) == 1


def test_many_images_that_are_gone_are_counted(tmp_path: Path, make_image) -> None:
    names = [f"{label}/{number}.png" for label in "ab" for number in range(20)]
    tree = write_files(tmp_path / "tree", {name: make_image(number) for number, name in enumerate(names)})
    warnings: list[str] = []

    def ingest(**options: bool) -> None:
        store = (tmp_path / "store").as_uri()
        ingest_source(DataSettings(source=f"folder:{tree}"), store, warn=warnings.append, **options)

    ingest()
    for name in names[:4]:
        (tree / name).unlink()
    ingest()
    assert not warnings
    for name in names[4:10]:
        (tree / name).unlink()
    (tree / names[10]).write_bytes((tree / names[11]).read_bytes())
    ingest()
    assert warnings == ["of 36 earlier images, 7 have changed or are no longer in the source"]
    ingest(reread=True)
    assert len(warnings) == 1


def test_splits_survive_the_return_to_an_earlier_digest(tree, run_ingest, make_image, contents) -> None:
    """A network may have been trained on images that were removed and restored."""

    def add(numbers: range) -> None:
        write_files(tree, {f"1/added-{number}.png": make_image(number) for number in numbers})

    first = run_ingest(tree)
    add(range(7000, 7060))
    splits = contents(run_ingest(tree)).split
    for path in tree.glob("1/added-*"):
        path.unlink()
    assert run_ingest(tree).digest == first.digest
    add(range(8089, 7999, -1))
    add(range(7059, 6999, -1))
    restored = contents(run_ingest(tree, test_fraction=0.5)).split
    assert {digest: restored[digest] for digest in splits} == splits
    assert contents(first).split.items() <= splits.items()


def test_store_of_another_format_is_refused_in_a_sentence(tree, run_ingest, tmp_path: Path) -> None:
    manifest = run_ingest(tree)
    store = open_store((tmp_path / "store").as_uri())
    key = manifest_key(manifest.name, manifest.digest)
    number = b'"format": %d' % FORMAT
    stored = store.get(key).replace(number, b'"format": 1').replace(b'"reviewed": 0', b'"reviews": 0')
    assert b'"format": 1' in stored
    store.put(key, stored)
    with pytest.raises(FormatError, match=r"of another version of evernear and was not changed: .* in format 1"):
        run_ingest(tree)
    assert store.get(key) == stored
