"""A file among the images is used, broken, or left out and counted:
never lost in silence."""

import os
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.data.sources.folder import Bucket
from evernear.data.sources.names import is_litter, names_other_kind
from evernear.data.validate import require_valid, validate_dataset
from evernear.errors import DataError, StoreError
from evernear.settings import ValidationSettings

UNUSUAL = (
    "a.jpg_large",
    "a.jpg:large",
    "a.jpg?w=640",
    "a.jpg%3Fx=1",
    "a.JPG~",
    "a.jpg.1",
    "a.2",
    "a.jfi",
    "a.pjpeg",
    "a.heif",
    "a.tga",
    "a.webp!d",
    "a.png_orig",
    "a.jpeg.",
    "a.png ",
    "a",
    "a.png.tmp",
    "a.bin",
)
LITTER = (
    "@eaDir/0.png/SYNOPHOTO_THUMB_M.png",
    "#recycle/0.png",
    "@Recycle/0.png",
    "__MACOSX/._0.png",
    "$RECYCLE.BIN/S-1-5/0.png",
    "System Volume Information/0.png",
    ".ipynb_checkpoints/0-checkpoint.png",
    ".Trash-1000/files/0.png",
    ".thumbnails/0.png",
    ".AppleDouble/0.png",
    ".git/0.png",
    "__pycache__/0.png",
    "lost+found/0.png",
)
LITTER_FILES = ("._0.png", ".DS_Store", "Thumbs.db", "desktop.ini", "_SUCCESS", "Icon\r")


def noted(manifest: Manifest, rule: str) -> list[str]:
    return [name for problem in manifest.problems if problem.kind == rule for name in problem.names]


def upload(bucket: str, tree: Path) -> str:
    """Put all files of ``tree`` into the bucket, also those whose keys a `Store` rejects."""
    from tests.real.data.test_sources_s3 import client

    images = client()
    for path in filter(Path.is_file, tree.rglob("*")):
        images.fput_object(bucket, path.relative_to(tree).as_posix(), str(path))
    return f"s3://{bucket}"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The objects that ingest reads from a bucket."""
    names: list[str] = []
    read = Bucket.read

    def recording(self: Bucket, name: str) -> bytes:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Bucket, "read", recording)
    return names


def test_images_under_unusual_names_are_used(tree, run_ingest, make_image, contents, digest_of) -> None:
    images = {name: make_image(500 + number, kind="JPEG") for number, name in enumerate((*UNUSUAL, "a.jpg.txt"))}
    for name, image in images.items():
        (tree / "1" / name).write_bytes(image)
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 120 + len(images)
    assert all(contents(manifest).label[digest_of(image)] == "1" for image in images.values())
    assert manifest.problem_counts == {}


def test_other_files_are_left_out_counted_and_named(tree, run_ingest, contents) -> None:
    for name in ("0.json", "README", "scan.dcm", "movie.mp4", "empty"):
        (tree / "1" / name).write_text("" if name == "empty" else "some words, no pixels")
    (tree / "classes.txt").write_text("1\n2\n10\n")
    Path(os.fsdecode(os.fsencode(tree / "1") + b"/\xff.txt")).write_text("notes")
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 120
    assert manifest.problem_counts == {"not_an_image": 7}
    assert noted(manifest, "not_an_image") == [
        "1/0.json",
        "1/README",
        "1/\\xff.txt",
        "1/empty",
        "1/movie.mp4",
        "1/scan.dcm",
        "classes.txt",
    ]


def test_image_suffix_without_an_image_is_broken(tree, run_ingest) -> None:
    (tree / "1" / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tree / "1" / "raw.nef").write_bytes(b"MM\0*" + bytes(20))
    (tree / "1" / "b.ppm").write_text("words instead of pixels")
    (tree / "1" / "c.png").touch()
    manifest = run_ingest(tree)
    assert manifest.problem_counts == {"undecodable": 4}
    assert [problem.detail for problem in manifest.problems] == [
        "1/a.heic is not a PNG, JPEG or WebP image but HEIC; convert it.",
        "1/b.ppm is not a PNG, JPEG or WebP image.",
        "1/c.png is empty.",
        "1/raw.nef is not a PNG, JPEG or WebP image but TIFF; convert it.",
    ]


def test_names_are_bounded_but_the_count_is_not(tree, run_ingest) -> None:
    for number in range(50):
        (tree / "1" / f"{number:03}.json").write_text("{}")
    manifest = run_ingest(tree)
    assert manifest.problem_counts == {"not_an_image": 50}
    assert noted(manifest, "not_an_image") == [f"1/{number:03}.json" for number in range(20)]


def test_findings_about_files_that_are_left_out_do_not_stop_a_run(tree, run_ingest, make_image) -> None:
    (tree / "1" / "0.json").write_text("{}")
    (tree / "1" / ".DS_Store").write_text("litter")
    (tree / "loose.png").write_bytes(make_image(500))
    manifest = run_ingest(tree)
    report = validate_dataset(Dataset(manifest, open_store(manifest.store_uri)), ValidationSettings())
    assert [(finding.rule, finding.severity, finding.message) for finding in report.findings] == [
        ("no_class", "warn", "1 image is in no class folder and was left out; move loose.png."),
        ("not_an_image", "info", "1 file is not an image of a class and was left out: 1/0.json."),
        (
            "litter",
            "info",
            "1 file or folder is hidden, left behind by a program or written by evernear, and was left out:"
            " 1/.DS_Store.",
        ),
    ]
    require_valid(report)
    assert "- 1/0.json is not an image of a class." in report.markdown()


def test_huge_file_of_another_kind_is_not_read(tree, run_ingest) -> None:
    before = run_ingest(tree)
    with (tree / "1" / "weights.bin").open("wb") as file:
        file.truncate(100 * 2**30)  # sparse
    manifest = run_ingest(tree)
    assert (manifest.shards, manifest.problem_counts) == (before.shards, {"not_an_image": 1})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_stops_only_if_it_may_be_an_image(tree, run_ingest) -> None:
    (tree / "1" / "notes.txt").touch(0)
    assert run_ingest(tree).problem_counts == {"not_an_image": 1}
    (tree / "1" / "photo").touch(0)
    with pytest.raises(StoreError, match=r"1/photo cannot be read"):
        run_ingest(tree)


def test_images_outside_the_class_folders_are_named(tmp_path: Path, run_ingest, make_image) -> None:
    given = tmp_path / "given"
    for number in range(24):
        path = given / ("train", "test")[number % 2] / ("a", "b")[number % 3 % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(number))
    for number, name in enumerate(("0.png", "train/1.jpg_large", "test/2.png")):
        (given / name).write_bytes(make_image(100 + number))
    (given / "test" / "labels.csv").write_text("a,b")
    manifest = run_ingest(given)
    assert noted(manifest, "no_class") == ["0.png", "test/2.png", "train/1.jpg_large"]
    assert noted(manifest, "not_an_image") == ["test/labels.csv"]


def test_bucket_reads_only_what_may_be_an_image_and_only_once(
    tree, run_ingest, make_image, bucket: str, contents, reads: list[str]
) -> None:
    for number, name in enumerate(UNUSUAL):
        (tree / "2" / name).write_bytes(make_image(500 + number))
    for name in ("0.json", "0.txt", "movie.mp4", "all.tar.gz", "empty"):
        (tree / "1" / name).write_text("" if name == "empty" else "some words, no pixels")
    (tree / "1" / "README").write_text("some words, no pixels")
    (tree / "1" / "broken.png").write_text("some words, no pixels")
    (tree / "classes").write_text("some words, no pixels")
    source = upload(bucket, tree)
    manifest = run_ingest(source)
    assert len(contents(manifest)) == 120 + len(UNUSUAL)
    assert manifest.problem_counts == {"undecodable": 1, "not_an_image": 6, "no_class": 1}
    assert noted(manifest, "not_an_image") == [
        f"1/{name}" for name in ("0.json", "0.txt", "README", "all.tar.gz", "empty", "movie.mp4")
    ]
    assert {"1/README", "2/a.jpg_large"} <= set(reads)
    assert not {"1/0.json", "1/0.txt", "1/movie.mp4", "1/all.tar.gz", "1/empty", "classes"} & set(reads)
    reads.clear()
    open_store(source).put("1/new", b"some words, no pixels")
    second = run_ingest(source)
    assert sorted(reads) == ["1/broken.png", "1/new"]
    assert second.problem_counts["not_an_image"] == 7
    (tree / "1" / "README").write_bytes(make_image(900))
    upload(bucket, tree)
    assert len(contents(run_ingest(source))) == 121 + len(UNUSUAL)


def test_bucket_whose_class_has_no_image_names_it(tree, run_ingest, bucket: str) -> None:
    (tree / "logs").mkdir()
    (tree / "logs" / "part-0000").write_text("some words, no pixels")
    manifest = run_ingest(upload(bucket, tree))
    assert noted(manifest, "tiny_class") == ["logs"]
    assert "logs" not in {label for shard in manifest.shards for label in shard.label_counts}


@pytest.mark.parametrize("split_folders", [False, True])
def test_litter_is_left_out_at_any_depth(tmp_path: Path, run_ingest, make_image, bucket, split_folders: bool) -> None:
    plain, source = tmp_path / "plain" / "tree", tmp_path / "tree"
    classes = ("train/a", "train/b", "test/a", "test/b") if split_folders else ("a", "b")
    for root in (plain, source):
        for number in range(24):
            path = root / classes[number % len(classes)] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_image(number))
    places = ["", f"{classes[0]}/", *(["train/"] if split_folders else [])]
    for number, name in enumerate(f"{place}{name}" for place in places for name in (*LITTER, *LITTER_FILES)):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(make_image(1000 + number))
    expected, manifest = run_ingest(plain, dataset="plain"), run_ingest(source)
    assert manifest.shards == expected.shards
    assert (manifest.labels, manifest.problem_counts) == (("a", "b"), {"litter": len(places) * 19})
    remote = run_ingest(upload(bucket, source))
    assert (remote.shards, remote.problem_counts) == (manifest.shards, manifest.problem_counts)


def test_names_that_resemble_litter_are_classes(tmp_path: Path, run_ingest, make_image) -> None:
    names = ("lost", "found", "git", "recycle", "eaDir", "MACOSX", "success", "thumbs", "Trash")
    for number in range(10 * len(names)):
        path = tmp_path / "given" / names[number % len(names)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(number))
    assert set(run_ingest(tmp_path / "given").labels) == set(names)
    assert not any(is_litter(name) for name in names)


def test_kinds_that_a_suffix_promises() -> None:
    for name in ("a.txt", "b/a.JSON", "a.csv", "a.tar.gz", "a.mp4", "a.npz", "a.zip", "a.svg", "a.jpg.txt"):
        assert names_other_kind(name)
    for name in (*UNUSUAL, "a.png", "json", "a.dcm", "txt/a"):
        assert not names_other_kind(name)


def test_source_without_any_image_says_what_it_contains_instead(tmp_path: Path, run_ingest) -> None:
    (tmp_path / "given" / "a").mkdir(parents=True)
    (tmp_path / "given" / "a" / "scan.dcm").write_bytes(bytes(128) + b"DICM")
    with pytest.raises(DataError, match=r"contains no image in a class folder; .* 1 file was left out: a/scan\.dcm\."):
        run_ingest(tmp_path / "given")
