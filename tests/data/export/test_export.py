"""Exports as Parquet and WebDataset, and exports that were killed,
repeated or written by several processes.
"""

import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from evernear.common.disk import sha256_file
from evernear.common.parts import Parts
from evernear.common.run_parts import run_part
from evernear.common.store import FileStore, Store, open_store
from evernear.data.export.formats import write_tar
from evernear.data.export.plan import ExportPart, plan_export
from evernear.data.export.samples import Samples
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import ExportedEmbedder
from evernear.errors import ConflictError, DataError, SettingsError, StoreError
from evernear.kubeflow.part import worker_of
from evernear.release.registry import Registry
from evernear.serving import batch
from tests.command_line import evernear
from tests.dataset_images import described, write_images
from tests.releases import MakeRelease, System

Rows = list[dict[str, Any]]


def expected(manifest: Manifest) -> Rows:
    """What an export has to contain, in the order of the snapshot."""
    dataset = Dataset(manifest, open_store(manifest.store_uri))
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


def written_at(out: Path) -> dict[str, int]:
    return {name: (out / name).stat().st_mtime_ns for name in files(out)}


def tar_samples(out: Path) -> dict[str, list[tuple[str, dict[str, bytes]]]]:
    """The samples of each split in the order of its tars: key,
    and content by suffix.
    """
    samples: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
    for path in sorted(out.glob("*.tar")):
        of_split = samples.setdefault(path.name.partition("-")[0], [])
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if not of_split or of_split[-1][0] != key:
                    of_split.append((key, {}))
                file = tar.extractfile(member)
                assert file is not None
                of_split[-1][1][suffix] = file.read()
    return samples


def test_parquet_has_every_image_with_label_split_and_digest(snapshot, export_to, tmp_path: Path) -> None:
    parts = export_to(tmp_path / "out", "parquet", snapshot)
    of_train = len([shard for shard in snapshot.shards if shard.split == "train"])
    assert of_train > 1
    names = {f"data/train-{n:05}-of-{of_train:05}.parquet" for n in range(of_train)}
    assert names < set(files(tmp_path / "out"))
    assert len(files(tmp_path / "out")) == parts.plan.parts
    rows = [row for split in SPLITS for row in read_parquet(tmp_path / "out", split)]
    images = [row.pop("image") for row in rows]
    assert [{**row, "pixels": pixels(image["bytes"])} for row, image in zip(rows, images, strict=True)] == expected(
        snapshot
    )
    assert images[0]["path"] == f"000000000-{rows[0]['digest']}.png"


def read_parquet(out: Path, split: str) -> Rows:
    return [row for path in sorted(out.glob(f"data/{split}-*")) for row in pq.read_table(path).to_pylist()]


def test_parquet_is_read_in_bounded_blocks(ingest, export_to, tmp_path: Path) -> None:
    write_images(tmp_path / "large", 18, size=(1000, 900))
    manifest = ingest(f"folder:{tmp_path / 'large'}", shard_size_bytes=2**25, max_size_px=1000)
    assert manifest.shape == (900, 1000, 1)
    export_to(tmp_path / "out", "parquet", manifest)
    (file,) = (tmp_path / "out").glob("data/train-*.parquet")
    described = pq.ParquetFile(file).metadata
    assert described.num_row_groups > 1
    assert max(described.row_group(n).total_byte_size for n in range(described.num_row_groups)) < 10 * 2**20


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
def test_groups_are_exported_if_there_are_any(form: str, ingest, export_to, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 90, first=10)
    source = f"folder:{tmp_path / 'photos'}"
    grouped, plain = ingest(source, group=r"(\d*)\d\.png$"), ingest(source, dataset="plain")
    for name, manifest in (("grouped", grouped), ("plain", plain)):
        export_to(tmp_path / name, form, manifest)
    rows = {name: exported(tmp_path / name, form) for name in ("grouped", "plain")}
    assert {row["group"] for row in rows["grouped"]} == {str(number) for number in range(1, 10)}
    assert not any("group" in row for row in rows["plain"])


def exported(out: Path, form: str) -> Rows:
    """The rows of a Parquet export, or the ``.json`` files of a WebDataset export."""
    if form == "parquet":
        return [row for split in SPLITS for row in read_parquet(out, split)]
    return [json.loads(row["json"]) for samples in tar_samples(out).values() for _, row in samples]


def test_begun_export_without_groups_is_not_continued_with_groups(ingest, export_to, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 90, first=10)
    manifest = ingest(f"folder:{tmp_path / 'photos'}", group=r"(\d*)\d\.png$")
    earlier = described("parquet", manifest).model_copy(update={"groups": False})
    plan_export(earlier, manifest, FileStore(tmp_path / "out"))
    with pytest.raises(ConflictError, match="as parquet without groups; choose another --out"):
        export_to(tmp_path / "out", "parquet", manifest)


def test_folders_say_that_they_name_no_groups(ingest, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 90, first=10)
    ingest(f"folder:{tmp_path / 'photos'}", group=r"(\d*)\d\.png$")
    command = ("dataset", "export", "--format", "folder", "--out", tmp_path / "out")
    done = evernear(*command, "--store", (tmp_path / "store").as_uri(), "--set", "data.dataset=photos")
    assert done.returncode == 0, done.stderr
    assert "The folders do not name the images' groups; --format parquet and webdataset do." in done.stderr


def test_memory_of_a_tar_does_not_grow_with_its_images(tmp_path: Path) -> None:
    def peak_bytes(blocks: int) -> int:
        stems = [f"{number:09}" for number in range(100)]
        texts = [""] * 100
        samples = Samples("train", stems, [b"png"] * 100, texts, [0] * 100, texts, None)
        part = ExportPart(units=100 * blocks, split="train", name="train-000000", first=0, shards=())
        tracemalloc.start()
        try:
            write_tar(FileStore(tmp_path / "out"), part, iter([samples] * blocks), tmp_path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)
    assert peak_bytes(40) < 1.5 * peak_bytes(10)


@pytest.fixture(scope="module")
def version(system: System, make_release: MakeRelease) -> str:
    release = make_release()
    Registry(system.dataset.store).publish(release.archive)
    return release.version


@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_release_adds_its_embeddings(
    form: str, system: System, version: str, export_to, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "put", only_below(tmp_path))  # the cache of embeddings is read, not written
    export_to(tmp_path / "out", form, system.dataset.manifest, version)
    embedder = ExportedEmbedder(system.network_dir)
    for split in SPLITS:
        shards = [(system.dataset.shard_blocks(each), each.count) for each in system.dataset.shards(split)]
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


def test_release_of_other_images_cannot_embed_a_snapshot(snapshot, version, system, export_to, tmp_path: Path) -> None:
    store = open_store(snapshot.store_uri)
    record = Registry(system.dataset.store).fetch(version, tmp_path / "release.mar")
    assert Registry(store).publish(tmp_path / "release.mar").manifest == record.manifest
    with pytest.raises(DataError, match=r"takes images of \(8, 8, 1\), and those of the snapshot"):
        export_to(tmp_path / "out", "parquet", snapshot, version)
    assert files(tmp_path / "out") == {}


@pytest.mark.parametrize("form", ["parquet", "webdataset", "folder"])
def test_killed_export_continues_and_writes_no_file_twice(form: str, snapshot, export_to, tmp_path: Path) -> None:
    out = FileStore(tmp_path / "out")
    parts = plan_export(described(form, snapshot), snapshot, out, 2**16)
    run_part(parts, 1, worker_of(parts.plan.kind)(parts))
    before = written_at(out.root)
    assert before
    again = export_to(tmp_path / "out", form, snapshot)
    assert again.plan.id == parts.plan.id
    export_to(tmp_path / "whole", form, snapshot)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    once = written_at(out.root)
    assert before.items() <= once.items()
    export_to(tmp_path / "out", form, snapshot)
    assert written_at(out.root) == once


class BreaksAfter(FileStore):
    """A store whose disk is full after some writes of images."""

    def __init__(self, root: Path, images: int) -> None:
        super().__init__(root)
        self.left = images

    def put(self, key: str, data: bytes | Path) -> str:
        if key.endswith(".png"):
            self.left -= 1
            if self.left < 0:
                raise StoreError("The disk is full.")
        return super().put(key, data)


def test_images_of_a_part_that_was_begun_are_not_written_again(snapshot, export_to, tmp_path: Path) -> None:
    broken = BreaksAfter(tmp_path / "out", 30)
    with pytest.raises(StoreError, match="full"):
        export_to(broken, "folder", snapshot)
    before = written_at(tmp_path / "out")
    assert len(before) == 30
    export_to(tmp_path / "out", "folder", snapshot)
    assert before.items() <= written_at(tmp_path / "out").items()
    export_to(tmp_path / "whole", "folder", snapshot)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_export_that_was_killed_while_it_was_planned_starts_again(snapshot, export_to, tmp_path: Path) -> None:
    FileStore(tmp_path / "out").put("_evernear/0123456789ab/parts/000000.json", b"{}")
    export_to(tmp_path / "out", "webdataset", snapshot)
    assert sum(map(len, tar_samples(tmp_path / "out").values())) == 300


def test_two_processes_write_the_same_files_as_one(snapshot, export_to, tmp_path: Path) -> None:
    export_to(tmp_path / "one", "parquet", snapshot)
    export_to(tmp_path / "two", "parquet", snapshot, processes=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_export_continues_from_a_store_that_has_moved(snapshot, ingest, tmp_path: Path) -> None:
    command = ("dataset", "export", "--format", "parquet", "--processes", "2", "--set", "data.dataset=photos")
    at = ("--out", tmp_path / "out", "--store")
    assert evernear(*command, *at, (tmp_path / "store").as_uri()).returncode == 0
    written = files(tmp_path / "out")
    for path in [*(tmp_path / "out" / "data").iterdir(), *(tmp_path / "out").glob("_evernear/*/results/*")]:
        path.unlink()
    (tmp_path / "store").rename(tmp_path / "moved")
    done = evernear(*command, *at, (tmp_path / "moved").as_uri())
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "out").keys() == written.keys()


def test_other_contents_in_the_output_are_refused(snapshot, ingest, export_to, tmp_path: Path) -> None:
    export_to(tmp_path / "out", "parquet", snapshot)
    before = files(tmp_path / "out")
    write_images(tmp_path / "photos", 10, first=300)
    for other, form in ((ingest(f"folder:{tmp_path / 'photos'}"), "parquet"), (snapshot, "webdataset")):
        with pytest.raises(
            ConflictError, match=f"has an export of the snapshot {snapshot.digest[:12]} of photos as par"
        ):
            export_to(tmp_path / "out", form, other)
    with pytest.raises(ConflictError, match="has results of another command; choose another --out"):
        batch.plan_predictions(
            batch.Shared(source="folder:/photos", store_uri="", version="1", part_images=1), FileStore(tmp_path / "out")
        )
    assert files(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConflictError, match="is not empty, and has no export to continue"):
        export_to(tmp_path / "mine", "folder", snapshot)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("label", ["a/b", ".hidden", "lost+found", "a\\b", "x" * 300, "_evernear"])
def test_label_that_is_no_folder_name_is_refused_before_anything_is_written(
    label: str, snapshot: Manifest, export_to, tmp_path: Path
) -> None:
    shard = snapshot.shards[0].model_copy(update={"label_counts": {label: snapshot.shards[0].count}})
    manifest = snapshot.model_copy(update={"shards": (shard, *snapshot.shards[1:])})
    with pytest.raises(SettingsError, match="cannot be the name of a folder; use --format parquet"):
        plan_export(described("folder", manifest), manifest, FileStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    plan_export(described("parquet", manifest), manifest, FileStore(tmp_path / "out"))


def test_parts_are_bounded_and_cover_each_split(snapshot: Manifest, tmp_path: Path) -> None:
    store: Store = FileStore(tmp_path / "out")
    parts: Parts = plan_export(described("webdataset", snapshot), snapshot, store, 2 * 2**16)
    values = [json.loads(parts.part(number)) for number in range(parts.plan.parts)]
    assert [number for value in values for number in value["shards"]] == list(range(len(snapshot.shards)))
    assert max(len(value["shards"]) for value in values) == 2
    assert parts.plan.units == 300
    for split in SPLITS:
        own = [value for value in values if value["split"] == split]
        assert [value["first"] for value in own] == [sum(v["units"] for v in own[:n]) for n in range(len(own))]
        assert [value["name"] for value in own] == [f"{split}-{n:06}" for n in range(len(own))]
