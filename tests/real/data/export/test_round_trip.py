"""An export, ingested again, is the same dataset."""

import shutil
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from evernear.common.store import open_store
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.settings import DataSettings
from tests.dataset_images import write_images
from tests.small_ingest import ingest_small

SOURCES = {"folder": "folder", "webdataset": "webdataset", "parquet": "huggingface"}
"""The kind of source of each format of an export."""
TENS = r"(\d*)\d\.png$"
"""Ten successive images are a group. The images 0 to 9 have none."""


def contents(manifest: Manifest) -> dict[bytes, tuple[str, str, bytes]]:
    """Split, label and pixels of each image by its digest."""
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    return {
        digest.tobytes(): (split, manifest.labels[label], image.tobytes())
        for split in SPLITS
        for block in dataset.blocks(split)
        for image, label, digest in zip(block.images, block.labels, block.digests, strict=True)
    }


def groups(manifest: Manifest) -> dict[bytes, str]:
    """The group of each image by its digest."""
    digests = list(contents(manifest))
    with Snapshots(open_store(manifest.store_uri), manifest.name).ledger(manifest) as ledger:
        return dict.fromkeys(digests, "") | ledger.groups(digests)


@pytest.mark.parametrize("form", SOURCES)
def test_export_has_the_digest_of_the_snapshot_when_it_is_ingested(snapshot, ingest, export_to, tmp_path, form) -> None:
    assert len(snapshot.shards) > len(SPLITS), "several shards of a split"
    export_to(tmp_path / "out", form, snapshot)
    again = ingest(f"{SOURCES[form]}:{tmp_path / 'out'}", "other")
    assert again.digest == snapshot.digest
    assert contents(again) == contents(snapshot)


@pytest.mark.slow
def test_digits_have_the_same_digest_when_they_are_ingested_again(ingest, export_to, tmp_path) -> None:
    digits = ingest("digits")
    export_to(tmp_path / "out", "folder", digits)
    assert ingest(f"folder:{tmp_path / 'out'}", "other").digest == digits.digest


def test_gray_images_among_colored_ones_stay_gray(ingest, export_to, tmp_path) -> None:
    write_images(tmp_path / "photos", 90, mode="RGB")
    write_images(tmp_path / "photos", 30, first=90)
    # Gray by its pixels, but not by its file.
    with Image.open(tmp_path / "photos" / "2" / "90.png") as gray:
        gray.convert("RGB").save(tmp_path / "photos" / "2" / "93.png")
    snapshot = ingest(f"folder:{tmp_path / 'photos'}")
    assert snapshot.shape[2] == 3
    export_to(tmp_path / "out", "folder", snapshot)
    modes = [Image.open(BytesIO(path.read_bytes())).mode for path in (tmp_path / "out").rglob("*.png")]
    assert (modes.count("L"), modes.count("RGB")) == (29, 91)
    assert ingest(f"folder:{tmp_path / 'out'}", "other").digest == snapshot.digest


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_export_of_groups_is_the_same_dataset_when_it_is_ingested(ingest, export_to, tmp_path, form) -> None:
    write_images(tmp_path / "photos", 300, first=10)
    snapshot = ingest(f"folder:{tmp_path / 'photos'}", group=TENS)
    assert snapshot.groups == 30
    export_to(tmp_path / "out", form, snapshot)
    again = ingest(f"{SOURCES[form]}:{tmp_path / 'out'}", "other", group="column")
    assert again.digest == snapshot.digest
    assert again.groups_sha256 == snapshot.groups_sha256
    assert contents(again) == contents(snapshot)
    assert groups(again) == groups(snapshot)


def test_images_without_a_group_stay_without_one(ingest, export_to, tmp_path) -> None:
    write_images(tmp_path / "photos", 90)
    snapshot = ingest(f"folder:{tmp_path / 'photos'}", group=TENS)
    assert list(groups(snapshot).values()).count("") == snapshot.problem_counts["ungrouped"] == 10
    export_to(tmp_path / "out", "parquet", snapshot)
    again = ingest(f"huggingface:{tmp_path / 'out'}", "other", group="column")
    assert groups(again) == groups(snapshot)
    assert contents(again) == contents(snapshot)


@pytest.mark.parametrize("size", [(200, 150), (30, 26)])
def test_resized_and_grown_datasets_keep_images_labels_and_splits(ingest, export_to, tmp_path, size) -> None:
    source = f"folder:{tmp_path / 'photos'}"
    write_images(tmp_path / "photos", 60, size=size)
    ingest(source)
    write_images(tmp_path / "photos", 15, first=60, size=size)
    shutil.copytree(tmp_path / "photos" / "2", tmp_path / "photos" / "1")  # label 1 comes after 2, 10 and été
    for path in (tmp_path / "photos" / "2").glob("*.png"):
        path.unlink()
    write_images(tmp_path / "photos", 15, first=90, size=size)
    grown = ingest(source)
    export_to(tmp_path / "out", "folder", grown)
    first = ingest(f"folder:{tmp_path / 'out'}", "first")
    if size[0] < 128:
        assert contents(first) == contents(grown)
    else:  # images have the digest of their original, which the export does not contain
        assert sorted(contents(first).values()) == sorted(contents(grown).values())
    export_to(tmp_path / "again", "folder", first)
    assert ingest(f"folder:{tmp_path / 'again'}", "second").digest == first.digest


@pytest.mark.parametrize("form", SOURCES)
def test_bucket_has_the_same_digest(snapshot, export_to, tmp_path: Path, bucket: str, form) -> None:
    export_to(open_store(f"s3://{bucket}/out"), form, snapshot)
    kind = "" if form == "folder" else f"{SOURCES[form]}:"
    settings = DataSettings(source=f"{kind}s3://{bucket}/out")
    assert ingest_small(settings, (tmp_path / "other").as_uri()).digest == snapshot.digest
