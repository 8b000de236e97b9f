"""A file among the images is used, broken, or left out and counted."""

import os
import shutil
from pathlib import Path

import boto3
import pytest

from evernear.common.outputs import MARKER, claim
from evernear.common.store import FileStore, Store, open_store
from evernear.data.export import Format, export_dataset
from evernear.data.image_tree import open_tree
from evernear.data.shards import Dataset
from evernear.data.sources import open_source, require_outside
from evernear.data.sources.folder import Bucket
from evernear.data.sources.names import is_litter, names_other_kind
from evernear.data.validate import require_valid, validate_dataset
from evernear.errors import DataError, SettingsError, StoreError
from evernear.settings import ValidationSettings
from tests.dataset_images import write_files, write_images
from tests.real.data.test_sources import upload
from tests.small_ingest import dataset_of, noted, opened

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


@pytest.fixture
def bucket_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
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
    write_files(tree / "1", images)
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 36 + len(images)
    assert all(contents(manifest).label[digest_of(image)] == "1" for image in images.values())
    assert manifest.problem_counts == {}


def test_other_files_are_left_out_counted_and_named(tree, run_ingest, contents) -> None:
    for name in ("0.json", "README", "scan.dcm", "movie.mp4", "empty"):
        (tree / "1" / name).write_text("" if name == "empty" else "some words, no pixels")
    (tree / "classes.txt").write_text("1\n2\n10\n")
    Path(os.fsdecode(os.fsencode(tree / "1") + b"/\xff.txt")).write_text("notes")
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 36
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
    broken = {"b.ppm": b"words instead of pixels", "c.png": b"", "raw.nef": b"MM\0*" + bytes(20)}
    write_files(tree / "1", broken | {"a.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"})
    manifest = run_ingest(tree)
    assert manifest.problem_counts == {"undecodable": 4}
    assert [problem.detail for problem in manifest.problems] == [
        "1/a.heic is a broken image (it has no pixels).",
        "1/b.ppm is not a PNG, JPEG, WebP or HEIC image.",
        "1/c.png is empty.",
        "1/raw.nef is not a PNG, JPEG, WebP or HEIC image but TIFF; convert it.",
    ]


def test_findings_about_files_that_are_left_out_do_not_stop_a_run(tree, run_ingest, make_image) -> None:
    others = {"1/0.json": b"{}", "1/.DS_Store": b"litter", "loose.png": make_image(500)}
    manifest = run_ingest(write_files(tree, others))
    report = validate_dataset(opened(manifest), ValidationSettings())
    assert [(finding.rule, finding.severity, finding.message) for finding in report.findings] == [
        (
            "left_out",
            "warn",
            "1 image is in no class folder and was left out; move loose.png."
            " 1 file is not an image of a class and was left out: 1/0.json."
            " 1 file or folder is hidden, left behind by a program or written by evernear, and was left out:"
            " 1/.DS_Store.",
        ),
    ]
    require_valid(report)
    assert "- 1/0.json is not an image of a class." in report.markdown()
    (tree / "loose.png").unlink()
    manifest = run_ingest(tree)
    for settings, severity in ((ValidationSettings(), "info"), (ValidationSettings(warn=("left_out",)), "warn")):
        (finding,) = validate_dataset(opened(manifest), settings).findings
        assert (finding.rule, finding.severity, finding.count) == ("left_out", severity, 2)


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
    names = [f"{('train', 'test')[number % 2]}/{'ab'[number % 3 % 2]}/{number}.png" for number in range(24)]
    names += ["0.png", "train/1.jpg_large", "test/2.png"]
    given = write_files(tmp_path / "given", {name: make_image(number) for number, name in enumerate(names)})
    manifest = run_ingest(write_files(given, {"test/labels.csv": b"a,b"}))
    assert noted(manifest, "no_class") == ["0.png", "test/2.png", "train/1.jpg_large"]
    assert noted(manifest, "not_an_image") == ["test/labels.csv"]


@pytest.mark.slow
def test_bucket_reads_only_what_may_be_an_image_and_only_once(
    tree, run_ingest, make_image, bucket: str, contents, bucket_reads: list[str]
) -> None:
    write_files(tree / "2", {name: make_image(500 + number) for number, name in enumerate(UNUSUAL)})
    others = [f"1/{name}" for name in ("0.json", "0.txt", "README", "all.tar.gz", "movie.mp4", "broken.png")]
    write_files(tree, dict.fromkeys([*others, "classes"], b"some words, no pixels") | {"1/empty": b""})
    source = upload(bucket, tree, "images")
    manifest = run_ingest(source)
    assert len(contents(manifest)) == 36 + len(UNUSUAL)
    assert manifest.problem_counts == {"undecodable": 1, "not_an_image": 6, "no_class": 1}
    assert noted(manifest, "not_an_image") == [
        f"1/{name}" for name in ("0.json", "0.txt", "README", "all.tar.gz", "empty", "movie.mp4")
    ]
    assert {"1/README", "2/a.jpg_large"} <= set(bucket_reads)
    assert not {"1/0.json", "1/0.txt", "1/movie.mp4", "1/all.tar.gz", "1/empty", "classes"} & set(bucket_reads)
    bucket_reads.clear()
    open_store(source).put("1/new", b"some words, no pixels")
    second = run_ingest(source)
    assert sorted(bucket_reads) == ["1/broken.png", "1/new"]
    assert second.problem_counts["not_an_image"] == 7
    (tree / "1" / "README").write_bytes(make_image(900))
    upload(bucket, tree, "images")
    assert len(contents(run_ingest(source))) == 37 + len(UNUSUAL)


def test_archived_object_is_left_out_and_read_once_it_is_restored(
    tree, run_ingest, make_image, bucket: str, contents
) -> None:
    source = upload(bucket, tree, "images")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    image = {"Bucket": bucket, "Key": "images/1/archived.png"}
    client.put_object(**image, Body=make_image(700), StorageClass="GLACIER")
    manifest = run_ingest(source)
    assert len(contents(manifest)) == 36
    assert noted(manifest, "undecodable") == ["1/archived.png"]
    with pytest.raises(DataError, match=r"refused s3:GetObject on s3://.*archived\.png: .*; restore it and run"):
        open_tree(source).read("1/archived.png")
    client.restore_object(**image, RestoreRequest={"Days": 1})
    restored = run_ingest(source)
    assert len(contents(restored)) == 37
    assert noted(restored, "undecodable") == []


def test_object_that_vanishes_or_may_not_be_read_is_treated_like_a_file(
    tree, run_ingest, make_image, bucket: str, contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tree, {"1/closed.png": make_image(700), "1/leaves.png": make_image(701)})
    source = upload(bucket, tree, "images")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    reads, read = list[str](), Bucket.read

    def read_once(self: Bucket, name: str) -> bytes:
        reads.append(name)
        if name == "1/leaves.png":
            client.delete_object(Bucket=bucket, Key=f"images/{name}")
        if name == "1/closed.png":
            raise StoreError("The server refused s3:GetObject.")
        return read(self, name)

    monkeypatch.setattr(Bucket, "read", read_once)
    manifest = run_ingest(source, part_names=5)
    assert len(contents(manifest)) == 36
    assert noted(manifest, "undecodable") == ["1/closed.png"]
    assert max(map(reads.count, {*reads} - {"1/closed.png"})) <= 3, "finished parts are not read again"


def test_bucket_whose_class_has_no_image_names_it(tree, run_ingest, bucket: str) -> None:
    write_files(tree, {"logs/part-0000": b"some words, no pixels"})
    manifest = run_ingest(upload(bucket, tree, "images"))
    assert noted(manifest, "tiny_class") == ["logs"]
    assert "logs" not in {label for shard in manifest.shards for label in shard.label_counts}


@pytest.mark.parametrize("places", [("", "a/"), ("", "train/", "train/a/")])
def test_litter_is_left_out_at_any_depth(tmp_path: Path, run_ingest, make_image, bucket, places: tuple[str]) -> None:
    classes = ("train/a", "train/b", "test/a", "test/b") if "train/" in places else ("a", "b")
    images = {f"{classes[number % len(classes)]}/{number}.png": make_image(number) for number in range(24)}
    plain, source = (write_files(tmp_path / folder / "tree", images) for folder in ("plain", "littered"))
    names = [f"{place}{name}" for place in places for name in (*LITTER, *LITTER_FILES)]
    write_files(source, {name: make_image(1000 + number) for number, name in enumerate(names)})
    expected, manifest = run_ingest(plain, dataset="plain"), run_ingest(source)
    assert manifest.shards == expected.shards
    assert (manifest.labels, manifest.problem_counts) == (("a", "b"), {"litter": len(names)})
    remote = run_ingest(upload(bucket, source, "images"))
    assert (remote.shards, remote.problem_counts) == (manifest.shards, manifest.problem_counts)


def test_names_that_resemble_litter_are_classes(tmp_path: Path, run_ingest, make_image) -> None:
    names = ("lost", "found", "git", "recycle", "eaDir", "MACOSX", "success", "thumbs", "Trash")
    images = {f"{name}/{number}.png": make_image(number) for number, name in enumerate(names * 2)}
    assert set(run_ingest(write_files(tmp_path / "given", images)).labels) == set(names)
    assert not any(is_litter(name) for name in names)


def test_kinds_that_a_suffix_promises() -> None:
    for name in ("a.txt", "b/a.JSON", "a.csv", "a.tar.gz", "a.mp4", "a.npz", "a.zip", "a.svg", "a.jpg.txt", "a.sqlite"):
        assert names_other_kind(name)
    for name in (*UNUSUAL, "a.png", "json", "a.dcm", "txt/a"):
        assert not names_other_kind(name)


def test_source_without_any_image_says_what_it_contains_instead(tmp_path: Path, run_ingest) -> None:
    given = write_files(tmp_path / "given", {"a/scan.dcm": bytes(128) + b"DICM"})
    with pytest.raises(DataError, match=r"contains no image in a class folder; .* 1 file was left out: a/scan\.dcm\."):
        run_ingest(given)


# Folders that evernear wrote


KINDS: dict[str, Format] = {"folder": "folder", "webdataset": "webdataset", "huggingface": "parquet"}


@pytest.fixture(scope="module")
def photo_dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    directory = tmp_path_factory.mktemp("photos")
    write_images(directory / "photos", 30, size=(8, 8))
    return dataset_of(directory / "photos", directory / "store")


@pytest.fixture(params=["disk", "bucket"])
def source_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty folder or bucket prefix."""
    if request.param == "disk":
        return open_store((tmp_path / "source").as_uri())
    return open_store(f"s3://{request.getfixturevalue('bucket')}/source")


def location(store: Store, kind: str) -> str:
    """The source of a kind in a store."""
    if store.uri.startswith("s3:"):
        return store.uri if kind == "folder" else f"{kind}:{store.uri}"
    return f"{kind}:{store.uri.removeprefix('file://')}"


def within(store: Store, folder: str) -> Store:
    return open_store(f"{store.uri}/{folder}")


def export_to(out: Store, dataset: Dataset, form: Format = "folder") -> None:
    claim(out, "an export")
    export_dataset(dataset, out, form)


def listed(source: str) -> tuple[set[str], list[str]]:
    """The names of a source's images, and of the litter that it left out."""
    opened = open_source(source)
    names = {entry.name for entry in opened.entries()}
    assert not {"not_an_image", "no_class", "hidden_folder"} & opened.notes.keys()
    return names, opened.notes["litter"].names if "litter" in opened.notes else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", ["again", "train/again"])
def test_nested_output_is_left_out_by_name_and_an_export_itself_is_a_source(
    kind, nested, photo_dataset, source_store
) -> None:
    for out in (source_store, within(source_store, nested)):
        export_to(out, photo_dataset, KINDS[kind])
        names, litter = listed(location(source_store, kind))
        assert len(names) == 30
        assert not any("again" in name for name in names)
        assert litter == ([] if out is source_store else [nested])


def test_rows_of_a_table_that_name_an_output_are_left_out(photo_dataset: Dataset, source_store: Store) -> None:
    """The table of an export itself is read."""
    for out in (source_store, within(source_store, "again")):
        export_to(out, photo_dataset)
    paths = [info.key for info in source_store.list("") if info.key.endswith(".png")]
    rows = "".join(f"{path},{path.split('/')[-2]}\n" for path in paths)
    source_store.put("labels.csv", f"path,label\n{rows}".encode())
    names, litter = listed(f"table:{source_store.uri.removeprefix('file://')}/labels.csv")
    assert (len(paths), len(names), litter) == (60, 30, ["again"])
    again = within(source_store, "again")
    again.put("labels.csv", f"path,label\n{rows}".replace("again/", "").encode())
    names, litter = listed(f"table:{again.uri.removeprefix('file://')}/labels.csv")
    assert (len(names), litter) == (30, [])


def test_names_that_sort_before_those_of_an_output_are_images(photo_dataset: Dataset, source_store: Store) -> None:
    """In a bucket, a marked folder is recognized when its marker is listed."""
    image = next(Path(photo_dataset.store.uri.removeprefix("file://")).parent.rglob("1.png"))
    for name in ("A/1.png", "again-1/1.png", "z/1.png"):
        source_store.put(name, image)
    export_to(within(source_store, "again"), photo_dataset)
    assert listed(location(source_store, "folder")) == ({"A/1.png", "again-1/1.png", "z/1.png"}, ["again"])


def test_batch_prediction_leaves_outputs_out(photo_dataset: Dataset, source_store: Store) -> None:
    export_to(source_store, photo_dataset)
    export_to(within(source_store, "train/again"), photo_dataset)
    tree = open_tree(location(source_store, "folder"))
    assert len(list(tree.files())) == 30
    assert "train/again" in tree.skipped.names


def test_store_in_the_prefix_of_its_source_is_left_out(photo_dataset: Dataset, source_store: Store) -> None:
    export_dataset(photo_dataset, source_store, "folder")
    source, store = location(source_store, "folder"), within(source_store, "store")
    first = dataset_of(source, store)
    source_store.put("store/review/originals/0.png", b"\x89PNG\r\n\x1a\n" + b"0" * 100)
    assert dataset_of(source, store).digest == first.digest
    assert listed(source)[1] == ["store"]


def test_output_that_lost_its_marker_is_a_folder_like_others(photo_dataset: Dataset, tmp_path: Path) -> None:
    source = open_store((tmp_path / "source").as_uri())
    write_images(tmp_path / "source", 30, size=(8, 8))
    export_to(within(source, "again"), photo_dataset)
    assert len(listed(f"folder:{tmp_path / 'source'}")[0]) == 30
    (tmp_path / "source" / "again" / MARKER).unlink()
    assert len(listed(f"folder:{tmp_path / 'source'}")[0]) == 60


@pytest.mark.parametrize(
    ("source", "out", "is_inside"),
    [
        ("folder:{photos}", "{photos}", True),
        ("folder:{photos}", "{photos}/a/out", True),
        ("folder:{photos}", "{photos}-out", False),
        ("folder:{link}", "{photos}/out", True),
        ("folder:{photos}", "{link}/out", True),
        ("webdataset:{photos}", "{photos}/out", True),
        ("huggingface:{photos}", "{photos}/out", True),
        ("table:{photos}/labels.csv", "{photos}/out", False),
        ("digits", "{photos}/out", False),
        ("s3://bucket/photos/", "s3://bucket/photos/out", True),
        ("s3://bucket", "s3://bucket/photos", True),
        ("s3://bucket/photos", "s3://bucket/photos-out", False),
        ("webdataset:s3://bucket/photos", "s3://bucket/photos/out", True),
    ],
)
def test_output_in_a_source_is_refused(source: str, out: str, is_inside: bool, tmp_path: Path) -> None:
    """A table lists its files, so a folder beside it is not a part of the source."""
    photos, link = tmp_path / "photos", tmp_path / "link"
    photos.mkdir()
    link.symlink_to(photos)
    source = source.format(photos=photos, link=link)
    out = out if out.startswith("s3:") else f"file://{out.format(photos=photos, link=link)}"
    if is_inside:
        with pytest.raises(SettingsError, match=r"is in the source .*; choose a --out outside of it"):
            require_outside(open_store(out), "digits", source)
    else:
        require_outside(open_store(out), "digits", source, store_uri=open_store(out).uri + "-store")
    with pytest.raises(SettingsError, match=r"out is in the store file://.*/my%20store; choose a --out outside of it"):
        require_outside(FileStore(tmp_path / "my store/datasets/out"), store_uri=(tmp_path / "my store").as_uri())
    shutil.rmtree(photos)
