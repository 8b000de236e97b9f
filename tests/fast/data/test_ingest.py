import os
import threading
import tracemalloc
from collections import Counter
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.data.encoded_image import EncodedImage
from evernear.data.image_file import suffix_of
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.preprocess import Picture, Preprocessing, Resize, decode, decode_inspected, to_array
from evernear.data.reduction import BitDepth
from evernear.errors import DataError, SettingsError, StoreError
from evernear.serving.decoding import decode_image, inspect_image
from evernear.settings import load
from tests import hostile
from tests.dataset_images import write_files
from tests.heic import heic


def test_folder_tree_becomes_a_dataset(tree, run_ingest, contents, digest_of) -> None:
    manifest = run_ingest(tree)
    images = contents(manifest)
    assert (manifest.name, manifest.shape, manifest.labels) == ("tree", (5, 6, 1), ("1", "2", "10"))
    assert Counter(images.label.values()) == {"1": 12, "2": 12, "10": 12}
    assert manifest.problem_counts == {}
    for path in tree.rglob("*.png"):
        digest = digest_of(path.read_bytes())
        assert images.label[digest] == path.parent.name
        assert (images.image[digest][..., 0] == np.asarray(Image.open(path))).all()
    assert set(images.split.values()) == {"train", "test", "gallery", "query"}
    labels = list(images.label.values())
    assert sum(a != b for a, b in pairwise(labels)) > 15, "sorted by class, each split would have about 2"


def test_shard_size_is_bounded(tmp_path: Path, run_ingest, make_image, contents) -> None:
    images = {f"{number % 2}/{number}.png": make_image(number, (100, 100)) for number in range(40)}
    manifest = run_ingest(write_files(tmp_path / "big", images), shard_size_bytes=2**16)
    assert len(manifest.shards) > 6
    assert max(shard.size_bytes for shard in manifest.shards) <= 2**16
    files = list((tmp_path / "store" / "datasets" / "big" / "shards").iterdir())
    assert {f"{shard.sha256}.npy" for shard in manifest.shards} == {path.name for path in files}
    assert len(contents(manifest)) == 40


def test_images_are_converted_to_one_shape(tmp_path: Path, run_ingest, make_image, contents) -> None:
    kinds = {
        "a/0.png": ((20, 10), "RGB", "PNG"),
        "a/1.jpg": ((300, 200), "RGB", "JPEG"),
        "b/2.png": ((3, 90), "L", "PNG"),
        "b/deeper/3.JPEG": ((20, 10), "CMYK", "JPEG"),
        "b/4.png": ((20, 10), "RGBA", "PNG"),
    }
    root = write_files(tmp_path / "mixed", {name: make_image(0, *kind) for name, kind in kinds.items()})
    manifest = run_ingest(root)
    assert manifest.shape == (10, 20, 3)
    assert manifest.problem_counts == {"cropped": 1, "letterboxed": 1, "upscaled": 1}
    names = {problem.kind: problem.names for problem in manifest.problems}
    assert names == {"cropped": ("a/1.jpg",), "letterboxed": ("b/2.png",), "upscaled": ("b/2.png",)}
    assert "300 x 200" in manifest.problems[0].detail
    assert Counter(contents(manifest).label.values()) == {"a": 2, "b": 3}

    converted = run_ingest(root, dataset="asked", size_px=16)
    assert converted.shape == (16, 16, 3)
    assert converted.problem_counts == {"cropped": 4, "letterboxed": 1, "upscaled": 4}
    stretched = run_ingest(root, dataset="stretched", size_px=16, resize="stretch")
    assert stretched.problem_counts["stretched"] == 5


def sized(root: Path, sizes: list[tuple[int, int]]) -> Path:
    for number, size in enumerate(sizes):
        path = root / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise(size, 50).save(path)
    return root


@pytest.mark.parametrize(("resize", "orientation"), [("crop", 1), ("letterbox", 6), ("stretch", 6)])
def test_servers_prepare_photographs_exactly_like_ingest(
    resize: Resize, orientation: int, tmp_path: Path, run_ingest, make_image, contents, digest_of
) -> None:
    exif, files = Image.Exif(), dict[str, bytes]()
    exif[0x0112] = orientation
    for number, mode in enumerate(("RGB", "L", "CMYK", "RGB")):
        file, noise = BytesIO(), Image.open(BytesIO(make_image(number, (40, 30))))
        noise.resize((400, 300)).convert(mode).save(file, "JPEG", exif=exif, progressive=number == 3)
        files[f"{number % 2}/{number}.jpg"] = file.getvalue()
    files["0/4.heic"] = heic(Image.open(BytesIO(make_image(4, (400, 300)))), exif=exif.tobytes())
    manifest = run_ingest(write_files(tmp_path / "photographs", files), resize=resize, size_px=24)
    height, width, _ = manifest.shape
    form = Preprocessing(height_px=height, width_px=width, channels=3, mean=(0.0,), std=(1.0,), resize=resize)
    for data in files.values():
        served = decode_image(inspect_image(data, 10**6), form)
        assert (contents(manifest).image[digest_of(data)] == served).all()
        complete = to_array(decode(data, 10**6), *manifest.shape, resize)
        reduced = suffix_of(data) == ".jpg"
        assert reduced <= np.abs(served.astype(int) - complete).max() < 9 * reduced + 1, "JPEG at a reduced scale"


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ([(90, 50)] + 6 * [(20, 10)], (10, 20)),
        ([(10, 10), (40, 30), (30, 44), (50, 32), (60, 90)], (30, 30)),
        (4 * [(400, 300)], (96, 128)),
        ([(400, 300), (300, 500), (700, 640), (375, 500)], (128, 128)),
    ],
)
def test_size_is_that_of_most_images_or_the_median(sizes, shape, tmp_path, run_ingest) -> None:
    assert run_ingest(sized(tmp_path / "images", sizes), shard_size_bytes=2**20).shape[:2] == shape


@pytest.mark.parametrize(("modes", "channels"), [("RGB L L L I;16", 1), ("L RGB RGB P", 3), ("L LA RGB RGB", 3)])
def test_dataset_is_gray_if_most_images_are(modes: str, channels: int, tmp_path: Path, run_ingest) -> None:
    for number, mode in enumerate(modes.split()):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (6, 5), number).save(path)
    assert run_ingest(tmp_path / "images").shape == (5, 6, channels)


@pytest.mark.parametrize(("mode", "size", "shape"), [
    ("RGB", (400, 300), (256, 341, 3)),
    ("L", (400, 300), (96, 128, 1)),
    ("RGB", (400, 180), (180, 400, 3)),
    ("RGB", (150, 120), (120, 150, 3)),
    ("RGB", (1200, 200), (171, 1024, 3)),
])  # fmt: skip
def test_photographs_of_a_new_dataset_have_the_size_that_their_weights_see(
    mode: str, size: tuple[int, int], shape: tuple[int, int, int], tmp_path: Path, run_ingest
) -> None:
    for number in range(4):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, 9 * number).save(path)
    warnings = list[str]()
    first = run_ingest(tmp_path / "images", photo_size_px=256, warn=warnings.append, shard_size_bytes=2**20)
    assert (first.shape, warnings) == (shape, [])
    assert (
        run_ingest(tmp_path / "images", photo_size_px=256, warn=warnings.append, shard_size_bytes=2**20).shape == shape
    )
    assert warnings == []


def test_older_dataset_keeps_small_photographs_and_says_how_to_move(tmp_path: Path, run_ingest) -> None:
    for number in range(4):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (400, 300), 9 * number).save(path)
    warnings = list[str]()
    assert run_ingest(tmp_path / "images", warn=warnings.append).shape == (96, 128, 3)
    assert run_ingest(tmp_path / "images", warn=warnings.append).shape == (96, 128, 3)
    assert warnings == []
    assert run_ingest(tmp_path / "images", photo_size_px=256, warn=warnings.append, shard_size_bytes=2**20).shape == (
        96,
        128,
        3,
    )
    assert [
        "keeps its photographs at 128 x 96 pixels, although a new one would keep 256 of" in sentence
        and "another --workdir or store" in sentence
        for sentence in warnings
    ] == [True]


def test_later_ingest_keeps_size_and_resizing(tmp_path: Path, run_ingest) -> None:
    first = run_ingest(sized(tmp_path / "images", 4 * [(20, 10)]), resize="letterbox")
    second = run_ingest(sized(tmp_path / "images", 4 * [(20, 10)] + 9 * [(40, 40)]))
    assert (second.shape, second.resize) == (first.shape, "letterbox")
    assert second.problem_counts == {"letterboxed": 9}
    with pytest.raises(DataError, match=r"resized by data\.resize=letterbox, and the settings ask for crop"):
        run_ingest(tmp_path / "images", resize="crop")
    run_ingest(tmp_path / "images", dataset="chosen")
    with pytest.raises(
        DataError, match=r"resized without data\.resize, and the settings ask for crop; leave it out, or"
    ):
        run_ingest(tmp_path / "images", dataset="chosen", resize="crop")


def test_memory_does_not_grow_with_image_size(tmp_path: Path, run_ingest) -> None:
    """40 images of 3 MB each would need 120 MB at once."""
    for number in range(40):
        path = tmp_path / "large" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1000, 1000), (number, 0, 255)).save(path, compress_level=1)
    tracemalloc.start()
    try:
        manifest = run_ingest(tmp_path / "large", shard_size_bytes=2**25, decode_threads=2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(shard.count for shard in manifest.shards) == 40
    assert peak_bytes < 80 * 2**20


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (("train", "test", "gallery", "query"), {split: split for split in SPLITS}),
        (("train", "validation", "test"), {"train": "train", "validation": "gallery", "test": "test"}),
        (("train", "val"), {"train": "train", "val": "test"}),
        (("Train", "Test"), {"Train": "train", "Test": "test"}),
        (("Training", "Testing"), {"Training": "train", "Testing": "test"}),
        (("seg_train", "seg_test", "seg_dev"), {"seg_train": "train", "seg_test": "test", "seg_dev": "gallery"}),
        (("training_set", "test"), {"training_set": "train", "test": "test"}),
        (("train2017", "val2017"), {"train2017": "train", "val2017": "test"}),
        (("train/train", "test/test"), {"train/train": "train", "test/test": "test"}),
    ],
)
def test_common_folder_names_are_splits(tmp_path, run_ingest, make_image, contents, digest_of, folders, splits) -> None:
    images = {number: make_image(number) for number in range(32)}
    folder_of = {number: folders[number % len(folders)] for number in images}
    names = {number: f"{folder_of[number]}/{'ab'[number // len(folders) % 2]}/{number}.png" for number in images}
    manifest = run_ingest(write_files(tmp_path / "given", {names[number]: image for number, image in images.items()}))
    assert manifest.labels == ("a", "b")
    chosen = contents(manifest).split
    for split in set(splits.values()) - {"train"}:
        expected = {digest_of(image) for number, image in images.items() if splits[folder_of[number]] == split}
        assert {digest for digest, found in chosen.items() if found == split} == expected


def test_missing_splits_are_taken_from_train(tmp_path: Path, run_ingest, make_image, contents, digest_of) -> None:
    names = {number: f"{'train' if number % 5 else 'test'}/{'ab'[number % 2]}/{number}.png" for number in range(100)}
    root = write_files(tmp_path / "given", {name: make_image(number) for number, name in names.items()})
    images = contents(run_ingest(root, gallery_fraction=0.3, query_fraction=0.2))
    tests = {digest_of(make_image(number)) for number in range(0, 100, 5)}
    assert {digest for digest, split in images.split.items() if split == "test"} == tests
    counts = Counter(images.split.values())
    assert 12 <= counts["gallery"] <= 38
    assert 8 <= counts["query"] <= 28


def test_explicit_splits_require_train(tmp_path: Path, run_ingest, make_image) -> None:
    with pytest.raises(DataError, match="no train folder"):
        run_ingest(write_files(tmp_path / "tree", {"test/a/0.png": make_image(0)}))


def test_split_folder_of_unlabeled_images_is_named(tree, run_ingest) -> None:
    unlabeled = tree / "test"
    (tree / "1").rename(unlabeled)
    for label in ("2", "10"):
        (tree / "Train").mkdir(exist_ok=True)
        (tree / label).rename(tree / "Train" / label)
    with pytest.raises(
        DataError,
        match=r"The folder test of .* contains no image in a class folder; sort .* choose test images from Train\.",
    ):
        run_ingest(tree)
    unlabeled.rename(tree.parent / "unlabeled")
    assert run_ingest(tree).count("test")


def test_unusual_names_are_accepted(tree, run_ingest, make_image, contents) -> None:
    names = ["a.PNG", "a.JpEg", "a.jfif", "a.jpe", "a b.png", "\xfc\u732b.png", "a\nb.png", "x" * 251 + ".png"]
    places = [f"1/{folder}{name}" for folder in ("", "deeper/still/") for name in names]
    write_files(tree, {name: make_image(1000 + number) for number, name in enumerate(places)})
    manifest = run_ingest(tree)
    assert manifest.problem_counts == {}
    assert len(contents(manifest)) == 36 + len(places)


def test_dangling_link_is_named(tree, run_ingest) -> None:
    (tree / "1" / "linked.png").symlink_to(tree / "1" / "000.png")
    (tree / "1" / ".#lock.png").symlink_to("somebody")
    assert run_ingest(tree).problem_counts == {"duplicate": 1, "litter": 1}
    (tree / "1" / "linked.png").unlink()
    (tree / "1" / "linked.png").symlink_to(tree / "unmounted" / "000.png")
    with pytest.raises(StoreError, match=r"leads nowhere: 1/linked\.png -> .*000\.png \(No such file"):
        run_ingest(tree)


def test_unreadable_directory_is_reported(run_ingest) -> None:
    for kind in ("folder", "mnist"):
        with pytest.raises(StoreError, match=r"^/x+ cannot be read or written: File name too long\.$"):
            run_ingest(f"{kind}:/{'x' * 300}")


def test_hidden_class_folder_is_named(tree, run_ingest, make_image, contents) -> None:
    for name in (".net", ".empty", os.fsdecode(b".\xff")):
        (tree / name / "deeper").mkdir(parents=True)
    (tree / ".net" / "deeper" / "1.png").write_bytes(make_image(500))
    (tree / os.fsdecode(b".\xff") / "1.png").write_bytes(make_image(501))
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 36
    assert manifest.problem_counts == {"hidden_folder": 2}
    assert [problem.names for problem in manifest.problems] == [(".\\xff",), (".net",)]
    (tree / ".net").rename(tree / "dotnet")
    (tree / os.fsdecode(b".\xff")).rename(tree / "other")
    assert run_ingest(tree).problem_counts == {}


def test_hidden_class_folder_in_an_explicit_split_is_named(tmp_path: Path, run_ingest, make_image) -> None:
    folders = ["train/a", "train/b", "train/.c", "test/a", "test/b", ".old/a"] * 2
    images = {f"{folder}/{number}.png": make_image(number) for number, folder in enumerate(folders)}
    manifest = run_ingest(write_files(tmp_path / "given", images))
    hidden = [problem.names for problem in manifest.problems if problem.kind == "hidden_folder"]
    assert hidden == [(".old",), ("train/.c",)]


def test_expensive_file_is_reported_like_a_broken_one(tree, run_ingest, contents) -> None:
    bombs = [hostile.REFUSED[name] for name in sorted(hostile.REFUSED)[::6]]
    write_files(tree, {f"1/bomb-{number}.jpg": bomb.make() for number, bomb in enumerate(bombs)})
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 36
    assert manifest.problem_counts == {"undecodable": len(bombs)}
    details = {problem.names[0]: problem.detail for problem in manifest.problems}
    for number, bomb in enumerate(bombs):
        assert bomb.sentence in details[f"1/bomb-{number}.jpg"]


def test_number_of_large_images_decoded_concurrently_is_bounded(tree, run_ingest, make_image, monkeypatch) -> None:
    for number in range(24):
        (tree / "1" / f"large-{number}.png").write_bytes(make_image(1000 + number, (100, 100)))
    lock, now, most = threading.Lock(), 0, 0

    def counting(file: EncodedImage, bit_depth: BitDepth) -> Picture:
        nonlocal now, most
        with lock:
            now += file.pixels
            most = max(most, now)
        image = decode_inspected(file, bit_depth)
        with lock:
            now -= file.pixels
        return image

    monkeypatch.setattr("evernear.data.decoding.decode_inspected", counting)
    assert run_ingest(tree, max_pixels=10_000, decode_threads=16).problem_counts == {"cropped": 24}
    assert 0 < most <= 4 * 10_000


def test_broken_files_are_named_and_the_others_are_ingested(tree, run_ingest, contents, make_image) -> None:
    (tree / "1" / "cut.png").write_bytes(make_image(500)[:50])
    (tree / "2" / "words.png").write_text("no image")
    (tree / "2" / "picture.gif").write_bytes(make_image(501, kind="GIF"))
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 36
    assert manifest.problem_counts == {"undecodable": 3}
    details = {problem.names: problem.detail for problem in manifest.problems}
    assert details["1/cut.png",].startswith("1/cut.png is a broken image")
    assert details["2/words.png",] == "2/words.png is not a PNG, JPEG, WebP or HEIC image."
    assert details["2/picture.gif",] == "2/picture.gif is not a PNG, JPEG, WebP or HEIC image but GIF; convert it."

    (tree / "1" / "cut.png").write_bytes(make_image(500))
    (tree / "2" / "words.png").unlink()
    (tree / "2" / "picture.gif").unlink()
    repaired = run_ingest(tree)
    assert repaired.problem_counts == {}
    assert len(contents(repaired)) == 37


def test_decompression_bomb_is_rejected_by_its_header(tree, run_ingest, make_image) -> None:
    (tree / "1" / "bomb.png").write_bytes(make_image(7, (200, 100)))
    manifest = run_ingest(tree, max_pixels=10_000)
    assert manifest.problem_counts == {"undecodable": 1}
    assert "200 x 100 pixels, 10000 are allowed by data.max_pixels" in manifest.problems[0].detail
    # A broken file is read again, because the cause may have been temporary.
    assert run_ingest(tree, max_pixels=20_000).problem_counts == {"cropped": 1}


def test_all_problems_are_counted_and_fatal_ones_listed(tree, run_ingest, make_image) -> None:
    write_files(tree, {f"1/words-{number}.png": b"words" for number in range(1100)})
    write_files(tree, {f"1/large-{number}.png": make_image(1000 + number, (9, 9)) for number in range(30)})
    manifest = run_ingest(tree)
    assert manifest.problem_counts == {"undecodable": 1100, "cropped": 30}
    assert Counter(problem.kind for problem in manifest.problems) == {"undecodable": 1000, "cropped": 20}


def test_copies_constant_images_and_empty_classes_are_noted(tree, run_ingest, contents) -> None:
    (tree / "1" / "copy.png").write_bytes((tree / "1" / "000.png").read_bytes())
    Image.new("L", (6, 5), 7).save(tree / "2" / "flat.png")
    (tree / "3").mkdir()
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 37
    assert manifest.labels == ("1", "2", "10")
    names = {problem.kind: problem.names for problem in manifest.problems}
    assert names == {"duplicate": ("1/000.png", "1/copy.png"), "constant_image": ("2/flat.png",), "tiny_class": ("3",)}
    assert "2/flat.png has one value in all its pixels." in {problem.detail for problem in manifest.problems}


def test_color_images_in_a_gray_dataset_are_a_finding(tree: Path, run_ingest) -> None:
    Image.new("RGB", (6, 5), (200, 60, 10)).save(tree / "2" / "orange.png")
    gradient = Image.linear_gradient("L").resize((6, 5))
    gradient.convert("RGB").save(tree / "2" / "gray-as-rgb.jpg")
    manifest = run_ingest(tree)
    assert manifest.shape[2] == 1
    details = [problem.detail for problem in manifest.problems if problem.kind == "grayed"]
    assert details == ["2/orange.png is in color and was stored in gray."]


def test_image_in_two_splits_is_held_out(tmp_path: Path, run_ingest, make_image, contents, digest_of) -> None:
    names = {number: f"{'train' if number % 3 else 'test'}/{'ab'[number % 2]}/{number}.png" for number in range(30)}
    root = write_files(tmp_path / "given", {name: make_image(number) for number, name in names.items()})
    manifest = run_ingest(write_files(root, {"test/b/7.png": make_image(7)}))
    images = contents(manifest)
    assert len(images) == 30
    assert images.split[digest_of(make_image(7))] == "test"
    assert manifest.problem_counts == {"duplicate_across_splits": 1}
    assert manifest.problems[0].names == ("test/b/7.png", "train/b/7.png")


def test_image_of_conflicting_labels_waits_until_they_agree(tree, run_ingest, contents, make_image, digest_of) -> None:
    clean = run_ingest(tree)
    image = (tree / "1" / "000.png").read_bytes()
    (tree / "2" / "again.png").write_bytes(image)
    (tree / "2" / "new.png").write_bytes(make_image(900))
    (tree / "10" / "new.png").write_bytes(make_image(900))
    manifest = run_ingest(tree)
    images = contents(manifest)
    assert manifest.problem_counts == {"conflicting_labels": 2}
    assert {problem.names for problem in manifest.problems} == {
        ("1/000.png", "2/again.png"),
        ("10/new.png", "2/new.png"),
    }
    assert len(images) == 35
    assert digest_of(image) not in images.label

    (tree / "1" / "000.png").unlink()
    (tree / "2" / "new.png").unlink()
    resolved = run_ingest(tree)
    images = contents(resolved)
    assert resolved.problem_counts == {}
    assert images.label[digest_of(image)] == "2"
    assert images.split[digest_of(image)] == contents(clean).split[digest_of(image)]
    assert images.label[digest_of(make_image(900))] == "10"
    assert len(images) == 37


@pytest.mark.parametrize("source", ["nowhere", "empty", "flat", "flat/0.png"])
def test_empty_source_is_reported(tmp_path: Path, run_ingest, make_image, source: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "0.png").write_bytes(make_image(0))
    with pytest.raises(DataError, match=r"no image in a class folder|does not exist|0.png is a file, not a dir"):
        run_ingest(tmp_path / source)
    assert not list((tmp_path).glob("store/datasets/**/*.json"))


def test_single_class_is_reported(tmp_path: Path, run_ingest, make_image) -> None:
    with pytest.raises(
        DataError, match=r"one class \('only'\); .* If 'only' contains the class folders, use it as the source"
    ):
        run_ingest(write_files(tmp_path / "tree", {"only/0.png": make_image(0)}))


def test_source_without_decodable_images_is_reported(tmp_path: Path, run_ingest) -> None:
    with pytest.raises(DataError, match=r"No image in folder:.*tree can be decoded; the first: a/0.png is not"):
        run_ingest(write_files(tmp_path / "tree", {"a/0.png": b"words", "b/0.png": b"words"}))


@pytest.mark.parametrize("name", [b"1/\xff.png", b"\xff/1.png"])
def test_name_in_invalid_utf8_is_reported(tree, run_ingest, name: bytes) -> None:
    write_files(tree, {os.fsdecode(name): b"x"})
    with pytest.raises(DataError, match="not UTF-8; rename"):
        run_ingest(tree)


@pytest.mark.parametrize("source", ["", "digit", "folder:", "mnist:", "gs://bucket", "s3://", "s3:bucket"])
def test_unknown_source_is_reported(run_ingest, source: str) -> None:
    with pytest.raises(SettingsError, match=f"Unknown source '{source}'; known: digits, mnist"):
        run_ingest(source)


def test_unusable_settings_are_reported(tree, run_ingest) -> None:
    with pytest.raises(SettingsError, match="nothing to train on"):
        run_ingest(tree, test_fraction=0.5, gallery_fraction=0.3, query_fraction=0.2)
    with pytest.raises(SettingsError, match="is not valid"):
        run_ingest(tree, dataset="../x")


@pytest.mark.parametrize(("preset", "of_ten"), [("frozen", (4, 2, 2, 2)), ("photos", (6, 2, 1, 1))])
def test_classes_of_five_photographs_are_in_every_split(tmp_path, run_ingest, make_image, preset, of_ten) -> None:
    names = {"test_fraction", "gallery_fraction", "query_fraction"}
    fractions = load(preset=preset, environment={}, remembered=False).data.model_dump(include=names)

    def add(numbers: range) -> Manifest:
        images = {f"{number % 6}/{number}.png": make_image(number) for number in numbers}
        return run_ingest(write_files(tmp_path / "few", images), **fractions)

    def per_class(manifest: Manifest) -> set[tuple[int, ...]]:
        splits = ("train", "test", "gallery", "query")
        return set(zip(*(manifest.label_counts(split).values() for split in splits), strict=True))

    assert per_class(add(range(30))) == {(2, 1, 1, 1)}
    assert per_class(add(range(30, 60))) == {of_ten}
