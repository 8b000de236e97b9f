"""Changes are counted from listings, and the counts are compared with the subsequent ingest."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from evernear.common.store import open_store
from evernear.data.manifest import Manifest
from evernear.data.snapshots import Snapshots
from evernear.data.source_diff import SourceDiff, diff_source
from evernear.data.sources import FileEntry
from evernear.data.sources.folder import Bucket
from evernear.errors import DataError
from evernear.settings import DataSettings
from tests.dataset_images import write_files

Count = Callable[..., SourceDiff]


@pytest.fixture
def count(tmp_path: Path) -> Count:
    """``count(source, manifest)`` compares a source with a snapshot in the test's store."""

    def count(source: Path | str, manifest: Manifest | None, **settings: object) -> SourceDiff:
        source = f"folder:{source}" if isinstance(source, Path) else source
        values = DataSettings.model_validate({"source": source, **settings})
        store = open_store(manifest.store_uri if manifest else tmp_path.as_uri())
        (diff,) = diff_source(values, store, [manifest], cache=tmp_path / "cache")
        return diff

    return count


def test_ingested_source_has_no_changes(tree: Path, run_ingest, count: Count) -> None:
    (tree / "1" / "broken.png").write_text("no image")
    (tree / "1" / "notes.txt").write_text("nor that")
    diff = count(tree, run_ingest(tree))
    assert (diff.listed, diff.new, diff.removed) == (37, 0, 0)
    assert diff.expected("train") == diff.expected("gallery") == 0


def test_new_changed_and_removed_files_are_distinguished(tree: Path, run_ingest, make_image, count: Count) -> None:
    manifest = run_ingest(tree)
    write_files(tree, {"2/new.png": make_image(1000), "1/003.png": make_image(3000)})
    write_files(tree, {f"3/{number}.png": make_image(2000 + number) for number in range(12)})
    (tree / "1" / "000.png").unlink()
    diff = count(tree, manifest)
    assert (diff.listed, diff.new, diff.removed) == (48, 14, 1)
    assert diff.labels == {"1": 1, "2": 1, "3": 12}


def test_diff_reads_no_image(tree: Path, run_ingest, count: Count) -> None:
    manifest = run_ingest(tree)
    with (tree / "2" / "new.png").open("wb") as file:
        file.truncate(100 * 2**30)  # a sparse file, which takes minutes to read
    assert count(tree, manifest).new == 1


def test_images_of_a_renamed_class_are_not_new(tree: Path, run_ingest) -> None:
    """A run has ingested them, and the network was trained on the snapshot before."""
    trained = run_ingest(tree)
    (tree / "2").rename(tree / "two")
    newest = run_ingest(tree)
    settings, store = DataSettings(source=f"folder:{tree}"), open_store(trained.store_uri)
    images = len(list((tree / "two").iterdir()))
    for renamed, new in (({}, images), ({"2": "two"}, 0)):
        (diff,) = diff_source(settings, store, [trained], newest, renamed=renamed)
        assert diff.new == new


@pytest.fixture
def count_touched(tmp_path: Path) -> Count:
    """As ``count``, with the newest snapshot, so that touched files are sampled."""

    def count_touched(source: Path | str, manifest: Manifest) -> SourceDiff:
        store = open_store(manifest.store_uri)
        newest = Snapshots(store, manifest.name).head()
        source = f"folder:{source}" if isinstance(source, Path) else source
        (diff,) = diff_source(DataSettings(source=source), store, [manifest], newest, cache=tmp_path / "cache")
        return diff

    return count_touched


def test_touched_files_are_sampled(tree: Path, run_ingest, make_image, count_touched: Count, monkeypatch) -> None:
    manifest = run_ingest(tree)
    files = sorted(tree.rglob("*.png"))
    before = count_touched(tree, manifest)
    for path in files:
        os.utime(path, ns=(10**18, 10**18))
    touched = count_touched(tree, manifest)
    assert (touched.new, touched.removed, touched.listing) == (0, 0, before.listing)
    for number, path in enumerate(files[::2]):
        size_bytes = path.stat().st_size
        path.write_bytes(make_image(9000 + number).ljust(size_bytes, b"\0")[:size_bytes])
    other = count_touched(tree, manifest)
    assert (other.new, other.removed) == (18, 0)
    assert other.listing != before.listing
    monkeypatch.setattr("evernear.data.source_diff._MAX_TOUCHED", 18)
    # Five standard deviations of a hypergeometric count, times two.
    assert abs(count_touched(tree, manifest).new - 18) < 5 * 2 * 1.5


def test_files_as_read_are_compared_by_image_and_class(tree, run_ingest, make_image, count_touched) -> None:
    """A run that led to no release has read a copy, a moved, a broken and a new image."""
    manifest = run_ingest(tree)
    shutil.copyfile(tree / "1" / "000.png", tree / "1" / "copy.png")
    (tree / "1" / "003.png").rename(tree / "2" / "moved.png")
    (tree / "2" / "broken.png").write_text("no image")
    (tree / "2" / "new.png").write_bytes(make_image(1000))
    (tree / "10").rename(tree / "ten")
    assert count_touched(tree, manifest).new == 16
    run_ingest(tree)
    diff = count_touched(tree, manifest)
    assert (diff.new, diff.labels) == (14, {"2": 2, "ten": 12})
    assert diff.gone_classes == {"10": 12}


def test_objects_uploaded_again_in_parts_are_not_new(tree, run_ingest, count_touched, bucket, monkeypatch) -> None:
    """Their ETags are other ones, of the same content."""
    images = open_store(f"s3://{bucket}/images")
    for path in tree.rglob("0[01]*.png"):
        images.put(path.relative_to(tree).as_posix(), path)
    manifest = run_ingest(f"s3://{bucket}/images")
    plain = Bucket.entries

    def in_parts(self: Bucket) -> Iterator[FileEntry]:
        return (entry._replace(etag=f"{entry.etag}-2") for entry in plain(self))

    monkeypatch.setattr(Bucket, "entries", in_parts)
    diff = count_touched(f"s3://{bucket}/images", manifest)
    assert (diff.listed, diff.new, diff.removed) == (20, 0, 0)


def test_expected_splits_match_those_of_ingest(tree: Path, run_ingest, make_image, count: Count) -> None:
    """Expected and actual counts of 300 new images agree within chance."""
    manifest = run_ingest(tree)
    write_files(tree, {f"1/more-{number}.png": make_image(5000 + number) for number in range(300)})
    diff = count(tree, manifest)
    after = run_ingest(tree)
    for split in ("train", "test", "gallery", "query"):
        added = after.count(split) - manifest.count(split)
        # Five standard deviations of a binomial count.
        expected = diff.expected(split)
        assert abs(added - expected) < 5 * np.sqrt(expected)
    assert sum(diff.expected(split) for split in ("train", "test", "gallery", "query")) == pytest.approx(300)


def test_explicit_splits_are_counted_exactly(tmp_path: Path, run_ingest, make_image, count: Count) -> None:
    root = tmp_path / "given"

    def add(split: str, numbers: range) -> None:
        write_files(root, {f"{split}/{'ab'[number % 2]}/{number}.png": make_image(number) for number in numbers})

    for first, split in enumerate(("train", "gallery", "query", "test")):
        add(split, range(first * 100, first * 100 + 20))
    manifest = run_ingest(root)
    add("train", range(1000, 1030))
    add("gallery", range(2000, 2007))
    diff = count(root, manifest)
    assert diff.expected("train") == 30
    assert diff.expected("gallery") == 7
    assert diff.expected("query") == 0


def test_bucket_is_counted_from_its_listing(tree: Path, run_ingest, make_image, count: Count, bucket: str) -> None:
    images = open_store(f"s3://{bucket}/images")
    for path in tree.rglob("0[01]*.png"):
        images.put(path.relative_to(tree).as_posix(), path)
    manifest = run_ingest(f"s3://{bucket}/images")
    images.put("2/new.png", make_image(1000))
    images.put("1/000.png", make_image(1001))
    images.delete("1/003.png")
    diff = count(f"s3://{bucket}/images", manifest)
    assert (diff.listed, diff.new, diff.removed) == (20, 2, 1)


def test_grown_mnist_files_are_counted_by_their_labels(tmp_path: Path, run_ingest, count: Count) -> None:
    def write(counts: dict[str, int]) -> None:
        for part, images in counts.items():
            labels = np.arange(images, dtype=np.uint8) % 3
            pixels = np.random.default_rng(images).integers(0, 256, (images, 4, 4), np.uint8)
            for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
                header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
                (tmp_path / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())

    write({"train": 200, "t10k": 40})
    manifest = run_ingest(f"mnist:{tmp_path}")
    write({"train": 250, "t10k": 45})
    diff = count(f"mnist:{tmp_path}", manifest)
    assert (diff.listed, diff.new, diff.removed) == (295, 55, 0)
    assert diff.explicit == {"test": 5}
    assert diff.expected("train") == pytest.approx(50 * 0.85)


def test_without_a_snapshot_of_the_source_everything_is_new(tree: Path, run_ingest, count: Count) -> None:
    manifest = run_ingest("digits")
    assert (count(tree, manifest).new, count(tree, manifest).removed) == (36, 0)
    assert count(tree, None).new == 36


def test_missing_source_is_reported(tree: Path, run_ingest, count: Count) -> None:
    with pytest.raises(DataError, match="The image directory"):
        count(tree.parent / "elsewhere", run_ingest(tree))
