"""Folders that evernear wrote, in a source of images."""

import shutil
from pathlib import Path

import pytest

from evernear.common.outputs import MARKER, claim
from evernear.common.store import Store, open_store
from evernear.data.export import Format, export_dataset
from evernear.data.image_tree import open_tree
from evernear.data.ingest import ingest_source
from evernear.data.shards import Dataset
from evernear.data.sources import FileSource, open_source, require_outside
from evernear.errors import SettingsError
from evernear.settings import DataSettings
from tests.dataset_images import write_images

KINDS: dict[str, Format] = {"folder": "folder", "webdataset": "webdataset", "huggingface": "parquet"}


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    write_images(tmp_path / "photos", 60, size=(8, 8))
    manifest = ingest_source(DataSettings(source=f"folder:{tmp_path / 'photos'}"), (tmp_path / "store").as_uri())
    return Dataset(manifest, open_store(manifest.store_uri))


@pytest.fixture(params=["disk", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
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


def listed(source: str) -> tuple[set[str], list[str]]:
    """The names of a source's images, and of the litter that it left out."""
    opened = open_source(source)
    assert isinstance(opened, FileSource)
    names = {entry.name for entry in opened.entries()}
    assert not {"not_an_image", "no_class", "hidden_folder"} & opened.notes.keys()
    return names, opened.notes["litter"].names if "litter" in opened.notes else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", ["again", "train/again"])
def test_nested_output_is_left_out_by_name_and_an_export_itself_is_a_source(
    kind: str, nested: str, dataset: Dataset, root: Store
) -> None:
    for out in (root, within(root, nested)):
        claim(out, "an export")
        export_dataset(dataset, out, KINDS[kind])
        names, litter = listed(location(root, kind))
        assert len(names) == 60
        assert not any("again" in name for name in names)
        assert litter == ([] if out is root else [nested])


def test_rows_of_a_table_that_name_an_output_are_left_out(dataset: Dataset, root: Store) -> None:
    """The table of an export itself is read."""
    for out in (root, within(root, "again")):
        claim(out, "an export")
        export_dataset(dataset, out, "folder")
    paths = [info.key for info in root.list("") if info.key.endswith(".png")]
    rows = "".join(f"{path},{path.split('/')[-2]}\n" for path in paths)
    root.put("labels.csv", f"path,label\n{rows}".encode())
    names, litter = listed(f"table:{root.uri.removeprefix('file://')}/labels.csv")
    assert (len(paths), len(names), litter) == (120, 60, ["again"])
    again = within(root, "again")
    again.put("labels.csv", f"path,label\n{rows}".replace("again/", "").encode())
    names, litter = listed(f"table:{again.uri.removeprefix('file://')}/labels.csv")
    assert (len(names), litter) == (60, [])


def test_names_that_sort_before_those_of_an_output_are_images(dataset: Dataset, root: Store) -> None:
    """In a bucket, a marked folder is recognized when its marker is listed."""
    for name in ("A/1.png", "A/again", "again-1/1.png", "z/1.png"):
        if name.endswith(".png"):
            root.put(name, (next(Path(dataset.store.uri.removeprefix("file://")).parent.rglob("1.png"))).read_bytes())
    claim(within(root, "again"), "an export")
    export_dataset(dataset, within(root, "again"), "folder")
    assert listed(location(root, "folder")) == ({"A/1.png", "again-1/1.png", "z/1.png"}, ["again"])


def test_batch_prediction_leaves_outputs_out(dataset: Dataset, root: Store) -> None:
    claim(root, "an export")
    export_dataset(dataset, root, "folder")
    claim(within(root, "train/again"), "an export")
    export_dataset(dataset, within(root, "train/again"), "folder")
    tree = open_tree(location(root, "folder"))
    assert len(list(tree.files())) == 60
    assert "train/again" in tree.skipped.names


def test_store_in_the_prefix_of_its_source_is_left_out(dataset: Dataset, root: Store) -> None:
    export_dataset(dataset, root, "folder")
    settings = DataSettings(source=location(root, "folder"))
    first = ingest_source(settings, f"{root.uri}/store")
    root.put("store/review/originals/0.png", b"\x89PNG\r\n\x1a\n" + b"0" * 100)
    assert ingest_source(settings, f"{root.uri}/store").digest == first.digest
    assert listed(settings.source)[1] == ["store"]


def test_output_that_lost_its_marker_is_a_folder_like_others(dataset: Dataset, tmp_path: Path) -> None:
    source = open_store((tmp_path / "source").as_uri())
    write_images(tmp_path / "source", 30, size=(8, 8))
    claim(within(source, "again"), "an export")
    export_dataset(dataset, within(source, "again"), "folder")
    assert len(listed(f"folder:{tmp_path / 'source'}")[0]) == 30
    (tmp_path / "source" / "again" / MARKER).unlink()
    assert len(listed(f"folder:{tmp_path / 'source'}")[0]) == 90


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
        require_outside(open_store(out), "digits", source)
    shutil.rmtree(photos)
