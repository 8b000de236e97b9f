"""The embedding cache: a network embeds each image once, and cached embeddings equal computed
ones."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from evernear.common.store import Store, open_store
from evernear.data.gallery import MIN_GALLERY_IMAGES
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding import data_loader
from evernear.embedding.data_loader import embed_images
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, export_network, load_network
from evernear.embedding.train import train_network
from evernear.errors import IntegrityError
from evernear.settings import DataSettings, TrainSettings
from tests.small_ingest import ingest_small

SHARD_BYTES = 2**16
"""655 images of 8x8 pixels, so that the gallery has two shards."""


class GrowingDataset:
    """A folder of gallery images that grows, and its dataset."""

    def __init__(self, directory: Path) -> None:
        self.images = directory / "images"
        self.store_uri = (directory / "store").as_uri()
        self._manifests = directory / "manifests"
        pixels, self.targets = load_digits(return_X_y=True)
        self._pixels = (pixels.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)

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
    growing.write(range(700))
    growing.write(range(1700, 1720), "query")
    growing.write(range(1720, 1797), "train")  # required with explicit splits; not embedded
    return growing


def embed_newest(network_dir: Path, growing: GrowingDataset, out_dir: Path, batch_sizes: list[int]) -> int:
    """Embed the newest snapshot, check every vector against the network, return the number that
    came from the cache."""
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


def test_only_new_images_are_computed(
    growing: GrowingDataset, network_dir: Path, tmp_path: Path, batch_sizes: list[int]
) -> None:
    assert embed_newest(network_dir, growing, tmp_path / "first", batch_sizes) == 0
    assert sum(batch_sizes) == 720
    assert embed_newest(network_dir, growing, tmp_path / "again", batch_sizes) == 720
    assert batch_sizes == []
    growing.write(range(700, 1400))
    assert embed_newest(network_dir, growing, tmp_path / "grown", batch_sizes) == 720
    assert sum(batch_sizes) == 700


def test_corrected_labels_and_removed_images_take_effect(
    growing: GrowingDataset, network_dir: Path, tmp_path: Path, batch_sizes: list[int]
) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    growing.path_of(5).unlink()
    growing.write(range(5, 6), label="8")
    growing.path_of(7).unlink()
    assert embed_newest(network_dir, growing, tmp_path / "corrected", batch_sizes) == 719


def test_a_shard_without_its_first_image_is_embedded_again(
    growing: GrowingDataset, network_dir: Path, tmp_path: Path, batch_sizes: list[int]
) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    dataset = growing.ingest()
    shards = dataset.shards("gallery")
    assert len(shards) == 2
    growing.path_of(growing.index_of(next(dataset.blocks("gallery")).images[0])).unlink()
    assert embed_newest(network_dir, growing, tmp_path / "without it", batch_sizes) == 720 - shards[0].count
    assert embed_newest(network_dir, growing, tmp_path / "again", batch_sizes) == 719


def test_another_network_does_not_use_the_cache(
    digits: Dataset, growing: GrowingDataset, network_dir: Path, tmp_path: Path, batch_sizes: list[int]
) -> None:
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
    """TorchScript lists constants in the order of Python's string hashes, which differ between
    processes."""
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    program = (
        "import sys; from pathlib import Path; from evernear.data.shards import Dataset;"
        "from evernear.embedding.export import export_network; digits, trained, out = map(Path, sys.argv[1:]);"
        "export_network(trained, Dataset.open(digits), out)"
    )
    words = [sys.executable, "-c", program, str(digits_dir), str(trained_dir), str(tmp_path / "network")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert embed_newest(tmp_path / "network", growing, tmp_path / "again", batch_sizes) == 720


def test_a_damaged_cache_object_is_rejected(
    growing: GrowingDataset, network_dir: Path, tmp_path: Path, batch_sizes: list[int]
) -> None:
    embed_newest(network_dir, growing, tmp_path / "first", batch_sizes)
    folder = f"embeddings/{describe_network(network_dir).identity}/"
    key = next(result.key for result in growing.store.list(folder))
    growing.store.put(key, b"no embeddings")
    with pytest.raises(IntegrityError, match=r"has no embeddings of this network; delete it"):
        embed_newest(network_dir, growing, tmp_path / "again", batch_sizes)
    growing.store.delete(key)
    assert 0 < embed_newest(network_dir, growing, tmp_path / "mended", batch_sizes) < 720


def test_train_images_of_an_untrained_class_join_the_gallery(
    growing: GrowingDataset, network_dir: Path, tmp_path: Path, batch_sizes: list[int]
) -> None:
    dataset = growing.ingest()
    first = embed_dataset(network_dir, dataset, tmp_path / "first", store=growing.store, untrained=frozenset("38"))
    trained = dataset.manifest.label_counts("train")
    added = trained["3"] + trained["8"]
    assert 0 < added < sum(trained.values())
    assert sum(batch_sizes) == first.count == 720 + added
    again = embed_dataset(network_dir, dataset, tmp_path / "again", store=growing.store, untrained=frozenset("38"))
    assert again.reused == 720 + added
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in first.shards]
    blocks = list(Embeddings.open(tmp_path / "again").blocks("gallery"))
    labels = np.concatenate([block.labels for block in blocks])
    assert sorted(dataset.labels[number] for number in set(labels[700:])) == ["3", "8"]
    train = np.concatenate([block.digests for block in dataset.blocks("train")])
    digests = np.concatenate([block.digests for block in blocks])
    assert {d.tobytes() for d in digests[700:]} < {d.tobytes() for d in train}


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
