"""A network embeds each image once, and cached embeddings equal computed ones."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.parts import Parts, run_parts
from evernear.common.store import Store, open_store
from evernear.common.store.base import put_folder
from evernear.data.gallery import MIN_GALLERY_IMAGES
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding import data_loader
from evernear.embedding.data_loader import embed_images
from evernear.embedding.embed import (
    combine_embeddings,
    embed_dataset,
    gallery_of,
    network_folder,
    open_here,
    plan_embedding,
)
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, export_network, load_network
from evernear.embedding.train import train_network
from evernear.errors import IntegrityError
from evernear.kubeflow.part import main as run_pod
from evernear.settings import DataSettings, TrainSettings
from tests.digits import load_digits
from tests.small_ingest import ingest_small, ingest_with, opened

SHARD_BYTES = 2**14
"""About 160 images of 8x8 pixels, so that the gallery has two shards."""


class GrowingDataset:
    """A folder of gallery images that grows, and its dataset."""

    def __init__(self, directory: Path) -> None:
        self.images = directory / "images"
        self.store_uri = (directory / "store").as_uri()
        self._manifests = directory / "manifests"
        pixels, self.targets = load_digits()
        self._pixels = (pixels * 255 / 16).astype(np.uint8)

    def write(self, indices: range, split: str = "gallery", label: str | None = None) -> None:
        for index in indices:
            folder = self.images / split / (label or str(self.targets[index]))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(self._pixels[index]).save(folder / f"{index:04d}.png")

    def path_of(self, index: int) -> Path:
        return self.images / "gallery" / str(self.targets[index]) / f"{index:04d}.png"

    def index_of(self, image: np.ndarray) -> int:
        return int((self._pixels[..., None] == image).all(axis=(1, 2, 3)).argmax())

    def ingest(self) -> Dataset:
        settings = DataSettings(source=f"folder:{self.images}")
        directory = self._manifests / str(len(list(self._manifests.glob("*"))))
        save_manifest(ingest_small(settings, self.store_uri, shard_size_bytes=SHARD_BYTES), directory)
        return Dataset.open(directory)

    @property
    def store(self) -> Store:
        return open_store(self.store_uri)


@pytest.fixture
def growing(tmp_path: Path) -> GrowingDataset:
    growing = GrowingDataset(tmp_path)
    growing.write(range(180))
    growing.write(range(1700, 1720), "query")
    growing.write(range(1720, 1797), "train")  # required with explicit splits; not embedded
    return growing


def embed_newest(network_dir: Path, growing: GrowingDataset, out_dir: Path, batch_sizes: list[int]) -> int:
    """Embed the newest snapshot, check every vector, and return the number from the cache."""
    dataset = growing.ingest()
    batch_sizes.clear()
    described = embed_dataset(network_dir, dataset, out_dir, batch_size=64, store=growing.store)
    assert described.count == dataset.count("gallery") + dataset.count("query")
    assert described.reused == described.count - sum(batch_sizes)
    network = load_network(network_dir)
    embeddings = Embeddings.open(out_dir)
    for split in ("gallery", "query"):
        embedded, images = list(embeddings.blocks(split)), list(dataset.blocks(split))
        for name in ("labels", "digests"):
            np.testing.assert_array_equal(
                *(np.concatenate([getattr(b, name) for b in side]) for side in (embedded, images))
            )
        computed = embed_images(network, np.concatenate([block.images for block in images]))
        np.testing.assert_allclose(np.concatenate([block.embeddings for block in embedded]), computed, atol=1e-5)
    return described.reused


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that the network computed."""
    sizes: list[int] = []

    def recording_embed_images(network, images):
        sizes.append(len(images))
        return embed_images(network, images)

    monkeypatch.setattr(data_loader, "embed_images", recording_embed_images)
    return sizes


def test_only_new_images_are_computed(growing, network_dir, tmp_path, batch_sizes) -> None:
    assert embed_newest(network_dir, growing, tmp_path / "first", batch_sizes) == 0
    assert sum(batch_sizes) == 200
    assert embed_newest(network_dir, growing, tmp_path / "again", batch_sizes) == 200
    assert batch_sizes == []
    growing.write(range(180, 360))
    assert embed_newest(network_dir, growing, tmp_path / "grown", batch_sizes) == 200
    assert sum(batch_sizes) == 180


def test_corrected_labels_and_removed_images_take_effect(growing, network_dir, tmp_path, batch_sizes) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    growing.path_of(5).unlink()
    growing.write(range(5, 6), label="8")
    growing.path_of(7).unlink()
    assert embed_newest(network_dir, growing, tmp_path / "corrected", batch_sizes) == 199


@pytest.mark.slow
def test_a_shard_without_its_first_image_is_embedded_again(growing, network_dir, tmp_path, batch_sizes) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    dataset = growing.ingest()
    shards = dataset.shards("gallery")
    assert len(shards) == 2
    growing.path_of(growing.index_of(next(dataset.blocks("gallery")).images[0])).unlink()
    assert embed_newest(network_dir, growing, tmp_path / "without it", batch_sizes) == 200 - shards[0].count
    assert embed_newest(network_dir, growing, tmp_path / "again", batch_sizes) == 199


def test_another_network_does_not_use_the_cache(digits, growing, network_dir, tmp_path, batch_sizes) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    train_network(digits, TrainSettings(epochs=1, min_steps=0, width=4, embedding_dim=16, seed=1), tmp_path / "trained")
    export_network(tmp_path / "trained", digits, tmp_path / "network")
    assert embed_newest(tmp_path / "network", growing, tmp_path / "other", batch_sizes) == 0


@pytest.mark.slow
def test_the_same_weights_exported_by_another_process_use_the_cache(
    digits_dir: Path,
    trained_dir: Path,
    growing: GrowingDataset,
    network_dir: Path,
    tmp_path: Path,
    batch_sizes: list[int],
) -> None:
    """TorchScript lists constants in the order of string hashes, which differ between processes."""
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    program = (
        "import sys; from pathlib import Path; from evernear.data.shards import Dataset;"
        "from evernear.embedding.export import export_network; digits, trained, out = map(Path, sys.argv[1:]);"
        "export_network(trained, Dataset.open(digits), out)"
    )
    words = [sys.executable, "-c", program, str(digits_dir), str(trained_dir), str(tmp_path / "network")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert embed_newest(tmp_path / "network", growing, tmp_path / "again", batch_sizes) == 200


@pytest.mark.slow
def test_a_damaged_cache_object_is_rejected(growing, network_dir, tmp_path, batch_sizes) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    folder = f"embeddings/{describe_network(network_dir).identity}/"
    key = next(result.key for result in growing.store.list(folder))
    growing.store.put(key, b"no embeddings")
    with pytest.raises(IntegrityError, match=r"has no embeddings of this network; delete it"):
        embed_newest(network_dir, growing, tmp_path / "again", batch_sizes)
    growing.store.delete(key)
    assert 0 < embed_newest(network_dir, growing, tmp_path / "mended", batch_sizes) < 200


def test_train_images_of_an_untrained_class_join_the_gallery(growing, network_dir, tmp_path, batch_sizes) -> None:
    dataset = growing.ingest()
    first = embed_dataset(network_dir, dataset, tmp_path / "first", store=growing.store, untrained=frozenset("38"))
    trained = dataset.manifest.label_counts("train")
    added = trained["3"] + trained["8"]
    assert 0 < added < sum(trained.values())
    assert sum(batch_sizes) == first.count == 200 + added
    again = embed_dataset(network_dir, dataset, tmp_path / "again", store=growing.store, untrained=frozenset("38"))
    assert again.reused == 200 + added
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in first.shards]
    blocks = list(Embeddings.open(tmp_path / "again").blocks("gallery"))
    labels = np.concatenate([block.labels for block in blocks])
    assert sorted(dataset.labels[number] for number in set(labels[180:])) == ["3", "8"]
    train = np.concatenate([block.digests for block in dataset.blocks("train")])
    digests = np.concatenate([block.digests for block in blocks])
    assert {d.tobytes() for d in digests[180:]} < {d.tobytes() for d in train}


def test_small_classes_are_filled_up_with_train_images(network_dir: Path, tmp_path: Path) -> None:
    few = GrowingDataset(tmp_path)
    few.write(range(60))
    few.write(range(60, 80), "query")
    few.write(range(80, 300), "train")
    for path in sorted((few.images / "train" / "4").iterdir())[2:]:
        path.unlink()
    dataset = few.ingest()
    embed_dataset(network_dir, dataset, tmp_path / "embeddings")
    blocks = list(Embeddings.open(tmp_path / "embeddings").blocks("gallery"))
    labels = np.concatenate([block.labels for block in blocks])
    digests = np.concatenate([block.digests for block in blocks])
    gallery, embedded = dataset.manifest.label_counts("gallery"), np.bincount(labels)
    assert max(gallery.values()) < MIN_GALLERY_IMAGES
    expected = dict.fromkeys(gallery, MIN_GALLERY_IMAGES) | {"4": gallery["4"] + 2}
    assert dict(zip(dataset.labels, embedded.tolist(), strict=True)) == expected
    train = {digest.tobytes() for block in dataset.blocks("train") for digest in block.digests}
    assert [digest.tobytes() in train for digest in digests] == [row >= 60 for row in range(len(digests))]


# Parts


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, digits_dir: Path) -> Dataset:
    """Digits whose gallery has several shards."""
    store = tmp_path_factory.mktemp("sharded").as_uri()
    source = f"folder:{digits_dir / 'source'}"
    return opened(ingest_with(source, store, shard_size_bytes=2**13, gallery_fraction=0.4, query_fraction=0.1))


def plan(network_dir: Path, dataset: Dataset, store: Store) -> Parts:
    return plan_embedding(network_dir, dataset, store, "parts/run")


def rows(directory: Path) -> dict[str, list[bytes]]:
    """All that the index reads, by split."""
    opened = Embeddings.open(directory)
    splits = ("gallery", "query")
    return {
        split: [
            array.tobytes()
            for name in ("embeddings", "labels", "digests")
            for array in [np.concatenate([getattr(block, name) for block in opened.blocks(split)])]
        ]
        for split in splits
    }


def test_parts_are_shards_in_order_and_do_not_depend_on_who_runs_them(sharded, network_dir, store, tmp_path) -> None:
    embed_dataset(network_dir, sharded, tmp_path / "whole")
    parts = plan(network_dir, sharded, store)
    assert parts.plan.parts == len(sharded.shards("gallery")) + len(sharded.shards("query")) >= 3
    assert parts.plan.units == sharded.count("gallery") + sharded.count("query")
    worker = open_here(network_dir, sharded, None, None, parts)
    tasks = [*parts.tasks(range(parts.plan.parts))]
    for number, value in [*reversed(tasks), tasks[0]]:  # another order, and one twice
        parts.save_result(number, worker(number, value))
    described = combine_embeddings(parts, network_dir, sharded, tmp_path / "parts", store.uri)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["embeddings.json"]
    assert described.count == parts.plan.units


def test_same_call_continues_and_computes_no_part_twice(sharded, network_dir, store, tmp_path) -> None:
    parts, seen = plan(network_dir, sharded, store), list[int]()
    open_worker = partial(open_here, network_dir, sharded, None, seen.append)
    run_parts(parts, open_worker, index=1, workers=parts.plan.parts)
    assert 0 < sum(seen) < parts.plan.units
    again = plan(network_dir, sharded, store)
    assert again.plan == parts.plan
    run_parts(again, open_worker)
    assert sum(seen) == parts.plan.units
    other = plan_embedding(network_dir, sharded, store, "parts/run", frozenset({"3"}))
    assert other.folder != parts.folder  # more images join the gallery


@pytest.mark.slow
def test_pod_embeds_with_the_network_and_the_dataset_of_the_store(sharded, network_dir, bucket, tmp_path) -> None:
    store = open_store(f"s3://{bucket}/store")
    for info in sharded.store.list(""):
        store.put(info.key, sharded.store.get(info.key))
    dataset = Dataset(sharded.manifest.model_copy(update={"store_uri": store.uri}), store)
    parts = plan(network_dir, dataset, store)
    put_folder(store, network_folder(parts), network_dir)
    for index in range(2):
        assert parts.missing()
        assert run_pod(store.uri, parts.folder, 2, index) == 0
    combine_embeddings(parts, network_dir, dataset, tmp_path / "pods", store.uri)
    embed_dataset(network_dir, sharded, tmp_path / "here")
    assert rows(tmp_path / "pods") == rows(tmp_path / "here")
    first = Embeddings.open(tmp_path / "pods").description.shards[0]
    store.put(first.file, b"damaged")
    with pytest.raises(IntegrityError, match=f"{first.file} is missing or has changed .* run the embed step again"):
        Embeddings.open(tmp_path / "pods")


def test_pod_without_its_snapshot_ends_for_good(sharded: Dataset, network_dir: Path, store: Store) -> None:
    parts = plan(network_dir, sharded, store)  # a store that does not have the dataset
    assert run_pod(store.uri, parts.folder, 1, 0) == 42
    assert "no longer has the snapshot" in parts.failure()


def test_gallery_of_a_fine_tuned_network_is_filled_up_further_and_that_of_a_frozen_one_has_all(digits: Dataset) -> None:
    train, gallery = (digits.manifest.label_counts(split) for split in ("train", "gallery"))
    assert gallery_of(digits.manifest, frozen=True, pretrained_sha256="a") == train
    fine_tuned = gallery_of(digits.manifest, frozen=False, pretrained_sha256="a", untrained=frozenset("3"))
    assert fine_tuned == {label: min(train[label], 100 - gallery[label]) for label in train} | {"3": train["3"]}
    scratch = gallery_of(digits.manifest, frozen=False, pretrained_sha256=None)
    assert scratch == {label: max(0, 10 - gallery[label]) for label in train}
