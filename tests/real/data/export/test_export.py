"""Exports as Parquet and WebDataset, and exports that failed or were repeated."""

import io
import json
import shutil
import tarfile
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from evernear.common.disk import sha256_file
from evernear.common.outputs import MARKER
from evernear.common.store import FileStore, open_store
from evernear.data.books import opened_books
from evernear.data.export import Format, export_dataset
from evernear.data.manifest import SPLITS, Manifest
from evernear.embedding.embed import ExportedEmbedder
from evernear.errors import ConflictError, DataError, SettingsError, StoreError
from evernear.release.registry import Registry
from evernear.serving import batch
from tests.command_line import evernear
from tests.dataset_images import write_images
from tests.real.data.export.conftest import FILE_IMAGES
from tests.releases import MakeRelease, System, copy_store
from tests.small_ingest import dataset_of, opened

Rows = list[dict[str, Any]]


def expected(manifest: Manifest) -> Rows:
    """What an export has to contain, in the order of the snapshot."""
    dataset = opened(manifest)
    rows: Rows = []
    for split in SPLITS:
        for block in dataset.blocks(split):
            for image, label, digest in zip(block.images, block.labels, block.digests, strict=True):
                described = {"split": split, "label": manifest.labels[label], "digest": digest.tobytes().hex()}
                rows.append({**described, "pixels": image.squeeze(-1).tolist() if image.shape[2] == 1 else image})
    return rows


def pixels(png: bytes) -> list[list[int]]:
    return np.asarray(Image.open(io.BytesIO(png))).tolist()


def files(out: Path) -> dict[str, str]:
    paths = (
        path for path in out.rglob("*") if path.is_file() and not path.parts[len(out.parts)].startswith(("_", "."))
    )
    return {str(path.relative_to(out)): sha256_file(path) for path in sorted(paths)}


def tar_samples(out: Path) -> dict[str, list[tuple[str, dict[str, bytes]]]]:
    """The samples of each split in the order of its tars: key, and content by suffix."""
    samples: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
    for path in sorted(out.glob("*.tar")):
        of_split = samples.setdefault(path.name.partition("-")[0], [])
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if not of_split or of_split[-1][0] != key:
                    of_split.append((key, {}))
                file = tar.extractfile(member)
                of_split[-1][1][suffix] = file.read()
    return samples


def test_parquet_has_every_image_with_label_split_and_digest(snapshot, export_to, tmp_path: Path) -> None:
    export_to(tmp_path / "out", "parquet", snapshot)
    counts = {split: sum(shard.count for shard in snapshot.shards if shard.split == split) for split in SPLITS}
    totals = {split: -(-count // FILE_IMAGES) for split, count in counts.items()}
    assert totals["train"] > 1
    assert set(files(tmp_path / "out")) == {
        f"data/{split}-{n:05}-of-{total:05}.parquet" for split, total in totals.items() for n in range(total)
    }
    rows = [row for split in SPLITS for row in read_parquet(tmp_path / "out", split)]
    images = [row.pop("image") for row in rows]
    assert [{**row, "pixels": pixels(image["bytes"])} for row, image in zip(rows, images, strict=True)] == expected(
        snapshot
    )
    assert images[0]["path"] == f"000000000-{rows[0]['digest']}.png"


def read_parquet(out: Path, split: str) -> Rows:
    return [row for path in sorted(out.glob(f"data/{split}-*")) for row in pq.read_table(path).to_pylist()]


def test_tars_have_every_image_with_label_split_and_digest(snapshot, export_to, tmp_path: Path) -> None:
    export_to(tmp_path / "out", "webdataset", snapshot)
    samples = tar_samples(tmp_path / "out")
    rows = [row for split in SPLITS for _, row in samples[split]]
    assert [{**json.loads(row["json"]), "pixels": pixels(row["png"])} for row in rows] == [
        {key: row[key] for key in ("label", "split", "digest", "pixels")} for row in expected(snapshot)
    ]
    assert [snapshot.labels[int(row["cls"])] for row in rows] == [row["label"] for row in expected(snapshot)]
    for split in SPLITS:
        keys = [key for key, _ in samples[split]]
        assert len(set(keys)) == len(keys)
        assert all(set(row) == {"png", "cls", "json"} for _, row in samples[split])


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_groups_are_exported_if_there_are_any(form: str, ingest_in_shards, export_to, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 60, first=10)
    source = f"folder:{tmp_path / 'photos'}"
    grouped, plain = ingest_in_shards(source, group=r"(\d*)\d\.png$"), ingest_in_shards(source, dataset="plain")
    for name, manifest in (("grouped", grouped), ("plain", plain)):
        export_to(tmp_path / name, form, manifest)
    rows = {name: exported(tmp_path / name, form) for name in ("grouped", "plain")}
    assert {row["group"] for row in rows["grouped"]} == {str(number) for number in range(1, 7)}
    assert not any("group" in row for row in rows["plain"])


def exported(out: Path, form: str) -> Rows:
    """The rows of a Parquet export, or the ``.json`` files of a WebDataset export."""
    if form == "parquet":
        return [row for split in SPLITS for row in read_parquet(out, split)]
    return [json.loads(row["json"]) for samples in tar_samples(out).values() for _, row in samples]


def test_folders_say_that_they_name_no_groups(ingest_in_shards, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 30, first=10)
    ingest_in_shards(f"folder:{tmp_path / 'photos'}", group=r"(\d*)\d\.png$")
    command = ("dataset", "export", "--format", "folder", "--out", tmp_path / "out")
    done = evernear(*command, "--store", (tmp_path / "store").as_uri(), "--set", "data.dataset=photos")
    assert done.returncode == 0, done.stderr
    assert "The folders do not name the images' groups; --format parquet and webdataset do." in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "webdataset", "folder"])
def test_memory_does_not_grow_with_the_number_of_images(form: Format, tmp_path: Path) -> None:
    """The same shard is exported again and again."""
    write_images(tmp_path / "photos", 60, size=(8, 8))
    manifest = dataset_of(tmp_path / "photos", tmp_path / "store").manifest
    (shard, *_) = (each for each in manifest.shards if each.split == "train")

    def peak_bytes(repeats: int) -> int:
        dataset = opened(manifest.model_copy(update={"shards": (shard,) * repeats}))
        tracemalloc.start()
        try:
            export_dataset(dataset, FileStore(tmp_path / f"out-{repeats}"), form)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)
    assert peak_bytes(16) < 1.5 * peak_bytes(4)


@pytest.fixture(scope="module")
def copied_system(system: System, tmp_path_factory: pytest.TempPathFactory) -> System:
    return copy_store(system, tmp_path_factory.mktemp("copied") / "store")


@pytest.fixture(scope="module")
def released_version(copied_system: System, make_release: MakeRelease) -> str:
    return Registry(copied_system.dataset.store).publish(make_release().archive).manifest.version


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_release_adds_its_embeddings(
    form: str, copied_system: System, released_version: str, export_to, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(FileStore, "put", only_below(tmp_path))  # the cache of embeddings is read, not written
    export_to(tmp_path / "out", form, copied_system.dataset.manifest, released_version)
    embedder = ExportedEmbedder(copied_system.network_dir)
    for split in SPLITS:
        shards = [
            (copied_system.dataset.shard_blocks(each), each.count) for each in copied_system.dataset.shards(split)
        ]
        blocks = list(embedder.embed(shards))
        digests = [digest.tobytes().hex() for block, _ in blocks for digest in block.digests]
        if form == "parquet":
            rows = [(row["digest"], row["embedding"]) for row in read_parquet(tmp_path / "out", split)]
        else:
            rows = [
                (json.loads(row["json"])["digest"], np.load(io.BytesIO(row["npy"])))
                for _, row in tar_samples(tmp_path / "out")[split]
            ]
        assert [digest for digest, _ in rows] == digests
        np.testing.assert_allclose([vector for _, vector in rows], np.concatenate([v for _, v in blocks]), atol=1e-5)


def only_below(directory: Path) -> Any:
    put = FileStore.put

    def checked(store: FileStore, key: str, data: bytes | Path) -> str:
        assert directory in store.path(key).parents
        return put(store, key, data)

    return checked


def test_release_of_other_images_cannot_embed_a_snapshot(
    snapshot, released_version, copied_system, export_to, tmp_path: Path
) -> None:
    shutil.copytree(snapshot.store_uri.removeprefix("file://"), tmp_path / "store")
    own = snapshot.model_copy(update={"store_uri": (tmp_path / "store").as_uri()})
    record = Registry(copied_system.dataset.store).fetch(released_version, tmp_path / "release.mar")
    assert Registry(open_store(own.store_uri)).publish(tmp_path / "release.mar").manifest == record.manifest
    with pytest.raises(DataError, match=r"takes images of \(8, 8, 1\), and those of the snapshot"):
        export_to(tmp_path / "out", "parquet", own, released_version)
    assert files(tmp_path / "out") == {}


class FullDisk(FileStore):
    """A store whose disk is full after some writes."""

    def __init__(self, root: Path, writes: int) -> None:
        super().__init__(root)
        self.left = writes

    def put(self, key: str, data: bytes | Path) -> str:
        self.left -= 1
        if self.left < 0:
            raise StoreError("The disk is full.")
        return super().put(key, data)


@pytest.mark.parametrize(("form", "writes"), [("parquet", 1), ("webdataset", 0), ("webdataset", 5), ("folder", 5)])
def test_export_that_failed_is_run_again(form: Format, writes: int, snapshot, export_to, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="full"):
        export_to(FullDisk(tmp_path / "out", writes), form, snapshot)
    assert len(files(tmp_path / "out")) == writes
    export_to(tmp_path / "out", form, snapshot)
    export_to(tmp_path / "whole", form, snapshot)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    export_to(tmp_path / "out", form, snapshot)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_other_contents_in_the_output_are_refused(snapshot, ingest_in_shards, export_to, tmp_path: Path) -> None:
    export_to(tmp_path / "out", "parquet", snapshot)
    before = files(tmp_path / "out")
    write_images(tmp_path / "photos", 10, first=300)
    earlier = f"has an export of the snapshot {snapshot.digest[:12]} of photos as parquet; choose another --out"
    for other, form in ((ingest_in_shards(f"folder:{tmp_path / 'photos'}"), "parquet"), (snapshot, "webdataset")):
        with pytest.raises(ConflictError, match=earlier):
            export_to(tmp_path / "out", form, other)
    with pytest.raises(ConflictError, match=earlier):
        batch.plan_predictions(
            batch.Shared(source=snapshot.source, store_uri="", version="1", part_images=1), FileStore(tmp_path / "out")
        )
    assert files(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConflictError, match="is not empty, and evernear did not write it; choose another --out"):
        export_to(tmp_path / "mine", "folder", snapshot)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("label", ["a/b", ".hidden", "lost+found", "a\\b", "x" * 300, "_evernear", MARKER])
def test_label_that_is_no_folder_name_is_refused_before_anything_is_written(
    label: str, snapshot: Manifest, export_to, tmp_path: Path
) -> None:
    shard = snapshot.shards[0].model_copy(update={"label_counts": {label: snapshot.shards[0].count}})
    manifest = snapshot.model_copy(update={"shards": (shard, *snapshot.shards[1:])})
    with pytest.raises(SettingsError, match="cannot be the name of a folder; use --format parquet"):
        export_to(tmp_path / "out", "folder", manifest)
    assert not (tmp_path / "out").exists()


# Exports that are ingested again


SOURCES = {"folder": "folder", "webdataset": "webdataset", "parquet": "huggingface"}
"""The kind of source of each format of an export."""
TENS = r"(\d*)\d\.png$"
"""Ten successive images are a group. The images 0 to 9 have none."""


def contents(manifest: Manifest) -> dict[bytes, tuple[str, str, bytes]]:
    """Split, label and pixels of each image by its digest."""
    dataset = opened(manifest)
    return {
        digest.tobytes(): (split, manifest.labels[label], image.tobytes())
        for split in SPLITS
        for block in dataset.blocks(split)
        for image, label, digest in zip(block.images, block.labels, block.digests, strict=True)
    }


def groups(manifest: Manifest) -> dict[bytes, str]:
    """The group of each image by its digest."""
    digests = list(contents(manifest))
    with opened_books(open_store(manifest.store_uri), manifest) as books:
        named = dict(books.rows('SELECT digest, "group" FROM images WHERE "group" IS NOT NULL'))
    return dict.fromkeys(digests, "") | named


@pytest.mark.parametrize("form", SOURCES)
def test_export_has_the_digest_of_the_snapshot_when_it_is_ingested(
    snapshot, ingest_in_shards, export_to, tmp_path, form
) -> None:
    assert len(snapshot.shards) > len(SPLITS), "several shards of a split"
    export_to(tmp_path / "out", form, snapshot)
    again = ingest_in_shards(f"{SOURCES[form]}:{tmp_path / 'out'}", "other")
    assert again.digest == snapshot.digest
    assert contents(again) == contents(snapshot)


def test_gray_images_among_colored_ones_stay_gray(ingest_in_shards, export_to, tmp_path) -> None:
    write_images(tmp_path / "photos", 30, mode="RGB")
    write_images(tmp_path / "photos", 15, first=30)
    # Gray by its pixels, but not by its file.
    with Image.open(tmp_path / "photos" / "2" / "30.png") as gray:
        gray.convert("RGB").save(tmp_path / "photos" / "2" / "33.png")
    snapshot = ingest_in_shards(f"folder:{tmp_path / 'photos'}")
    assert snapshot.shape[2] == 3
    export_to(tmp_path / "out", "folder", snapshot)
    modes = [Image.open(BytesIO(path.read_bytes())).mode for path in (tmp_path / "out").rglob("*.png")]
    assert (modes.count("L"), modes.count("RGB")) == (14, 31)
    assert ingest_in_shards(f"folder:{tmp_path / 'out'}", "other").digest == snapshot.digest


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_export_of_groups_is_the_same_dataset_when_it_is_ingested(ingest_in_shards, export_to, tmp_path, form) -> None:
    write_images(tmp_path / "photos", 120, first=10)
    snapshot = ingest_in_shards(f"folder:{tmp_path / 'photos'}", group=TENS)
    assert snapshot.groups == 12
    export_to(tmp_path / "out", form, snapshot)
    again = ingest_in_shards(f"{SOURCES[form]}:{tmp_path / 'out'}", "other", group="column")
    assert again.digest == snapshot.digest
    assert groups(again) == groups(snapshot)
    assert contents(again) == contents(snapshot)
    assert groups(again) == groups(snapshot)


def test_images_without_a_group_stay_without_one(ingest_in_shards, export_to, tmp_path) -> None:
    write_images(tmp_path / "photos", 50)
    snapshot = ingest_in_shards(f"folder:{tmp_path / 'photos'}", group=TENS)
    assert list(groups(snapshot).values()).count("") == snapshot.problem_counts["ungrouped"] == 10
    export_to(tmp_path / "out", "parquet", snapshot)
    again = ingest_in_shards(f"huggingface:{tmp_path / 'out'}", "other", group="column")
    assert groups(again) == groups(snapshot)
    assert contents(again) == contents(snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(200, 150), (30, 26)])
def test_resized_and_grown_datasets_keep_images_labels_and_splits(ingest_in_shards, export_to, tmp_path, size) -> None:
    source = f"folder:{tmp_path / 'photos'}"
    write_images(tmp_path / "photos", 30, size=size)
    ingest_in_shards(source)
    write_images(tmp_path / "photos", 12, first=30, size=size)
    shutil.copytree(tmp_path / "photos" / "2", tmp_path / "photos" / "1")  # label 1 comes after 2, 10 and été
    for path in (tmp_path / "photos" / "2").glob("*.png"):
        path.unlink()
    write_images(tmp_path / "photos", 12, first=90, size=size)
    grown = ingest_in_shards(source)
    export_to(tmp_path / "out", "folder", grown)
    first = ingest_in_shards(f"folder:{tmp_path / 'out'}", "first")
    if size[0] < 128:
        assert contents(first) == contents(grown)
    else:  # images have the digest of their original, which the export does not contain
        assert sorted(contents(first).values()) == sorted(contents(grown).values())
    export_to(tmp_path / "again", "folder", first)
    assert ingest_in_shards(f"folder:{tmp_path / 'again'}", "second").digest == first.digest


@pytest.mark.slow
@pytest.mark.parametrize("form", SOURCES)
def test_bucket_has_the_same_digest(snapshot, ingest_in_shards, export_to, bucket: str, form) -> None:
    export_to(open_store(f"s3://{bucket}/out"), form, snapshot)
    kind = "" if form == "folder" else f"{SOURCES[form]}:"
    assert ingest_in_shards(f"{kind}s3://{bucket}/out").digest == snapshot.digest
