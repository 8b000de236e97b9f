"""An image that a network has embedded once is not embedded again, and what is reused is what would be made."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from evernear.data.ingest import ingest
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding import embed as embed_module
from evernear.embedding.embed import Embeddings, embed, embed_images
from evernear.embedding.export import describe_network, export, load_network
from evernear.embedding.train import train
from evernear.errors import IntegrityError
from evernear.settings import DataSettings, TrainSettings
from evernear.store import Store, open_store

SHARD_BYTES = 2**16
"""655 images of 8x8 pixels: enough that the gallery fills one shard and begins another."""


class Growing:
    """A folder of gallery images that grows, and the dataset made of it."""

    def __init__(self, directory: Path) -> None:
        self.images = directory / "images"
        self.store_uri = (directory / "store").as_uri()
        self._manifests = directory / "manifests"
        pixels, self.targets = load_digits(return_X_y=True)
        self._pixels = (pixels.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)

    def write(self, numbers: range, split: str = "gallery", label: str | None = None) -> None:
        for number in numbers:
            folder = self.images / split / (label or str(self.targets[number]))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(self._pixels[number]).save(folder / f"{number:04d}.png")

    def path_of(self, number: int) -> Path:
        return self.images / "gallery" / str(self.targets[number]) / f"{number:04d}.png"

    def number_of(self, image: np.ndarray) -> int:
        return int((self._pixels[..., None] == image).all(axis=(1, 2, 3)).argmax())

    def ingest(self) -> Dataset:
        settings = DataSettings(source=f"folder:{self.images}", shard_size_bytes=SHARD_BYTES)
        directory = self._manifests / str(len(list(self._manifests.glob("*"))))
        save_manifest(ingest(settings, self.store_uri), directory)
        return Dataset.open(directory)

    @property
    def store(self) -> Store:
        return open_store(self.store_uri)


@pytest.fixture(scope="module")
def network_dir(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("network")
    train(digits, TrainSettings(epochs=1, min_steps=0, width=4, embedding_dim=16), directory / "trained")
    export(directory / "trained", digits, directory / "network", tolerance=1e-4)
    return directory / "network"


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    growing = Growing(tmp_path)
    growing.write(range(700))
    growing.write(range(1700, 1720), "query")
    growing.write(range(1720, 1797), "train")  # given splits want it; nothing of it is embedded
    return growing


def embedded(network_dir: Path, growing: Growing, out_dir: Path, counted: list[int]) -> int:
    """Embed the newest snapshot, check every vector against the network, return how many were reused."""
    dataset = growing.ingest()
    del counted[:]
    described = embed(network_dir, dataset, out_dir, batch_size=64, store=growing.store)
    assert described.count == dataset.count("gallery") + dataset.count("query")
    assert described.reused == described.count - sum(counted)
    network = load_network(network_dir, optimize=False)
    embeddings = Embeddings.open(out_dir)
    for split in ("gallery", "query"):
        ours, theirs = list(embeddings.blocks(split)), list(dataset.blocks(split))
        for name in ("labels", "digests"):
            np.testing.assert_array_equal(
                *(np.concatenate([getattr(b, name) for b in side]) for side in (ours, theirs))
            )
        made = embed_images(network, np.concatenate([block.images for block in theirs]))
        np.testing.assert_allclose(np.concatenate([block.embeddings for block in ours]), made, atol=1e-5)
    return described.reused


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images went through the network, call by call."""
    counts: list[int] = []

    def counting(network, images):
        counts.append(len(images))
        return embed_images(network, images)

    monkeypatch.setattr(embed_module, "embed_images", counting)
    return counts


def test_only_new_images_go_through_the_network(
    growing: Growing, network_dir: Path, tmp_path: Path, counted: list[int]
) -> None:
    assert embedded(network_dir, growing, tmp_path / "first", counted) == 0
    assert sum(counted) == 720
    assert embedded(network_dir, growing, tmp_path / "again", counted) == 720
    assert counted == []
    growing.write(range(700, 1400))
    assert embedded(network_dir, growing, tmp_path / "grown", counted) == 720
    assert sum(counted) == 700


def test_a_corrected_label_is_taken_and_a_removed_image_leaves(
    growing: Growing, network_dir: Path, tmp_path: Path, counted: list[int]
) -> None:
    embedded(network_dir, growing, tmp_path / "first", counted)
    growing.path_of(5).unlink()
    growing.write(range(5, 6), label="8")
    growing.path_of(7).unlink()
    assert embedded(network_dir, growing, tmp_path / "corrected", counted) == 719


def test_a_shard_that_lost_its_first_image_is_embedded_once_more(
    growing: Growing, network_dir: Path, tmp_path: Path, counted: list[int]
) -> None:
    embedded(network_dir, growing, tmp_path / "first", counted)
    dataset = growing.ingest()
    shards = dataset.shards("gallery")
    assert len(shards) == 2
    growing.path_of(growing.number_of(next(dataset.blocks("gallery")).images[0])).unlink()
    assert embedded(network_dir, growing, tmp_path / "without it", counted) == 720 - shards[0].count
    assert embedded(network_dir, growing, tmp_path / "again", counted) == 719


def test_another_network_reuses_nothing(
    digits: Dataset, growing: Growing, network_dir: Path, tmp_path: Path, counted: list[int]
) -> None:
    embedded(network_dir, growing, tmp_path / "first", counted)
    train(digits, TrainSettings(epochs=1, min_steps=0, width=4, embedding_dim=16, seed=1), tmp_path / "trained")
    export(tmp_path / "trained", digits, tmp_path / "network", tolerance=1e-4)
    assert embedded(tmp_path / "network", growing, tmp_path / "other", counted) == 0


def test_a_store_that_keeps_something_else_is_refused(
    growing: Growing, network_dir: Path, tmp_path: Path, counted: list[int]
) -> None:
    embedded(network_dir, growing, tmp_path / "first", counted)
    folder = f"embeddings/{describe_network(network_dir).sha256}/"
    key = next(found.key for found in growing.store.list(folder))
    growing.store.put(key, b"no embeddings")
    with pytest.raises(IntegrityError, match=r"holds no embeddings of this network; delete it"):
        embedded(network_dir, growing, tmp_path / "again", counted)
    growing.store.delete(key)
    assert 0 < embedded(network_dir, growing, tmp_path / "mended", counted) < 720


def test_train_images_of_a_class_that_the_network_never_saw_stand_in_the_gallery(
    growing: Growing, network_dir: Path, tmp_path: Path, counted: list[int]
) -> None:
    dataset = growing.ingest()
    first = embed(network_dir, dataset, tmp_path / "first", store=growing.store, untrained=frozenset("38"))
    trained = dataset.manifest.label_counts("train")
    borrowed = trained["3"] + trained["8"]
    assert 0 < borrowed < sum(trained.values())
    assert sum(counted) == first.count == 720 + borrowed
    again = embed(network_dir, dataset, tmp_path / "again", store=growing.store, untrained=frozenset("38"))
    assert again.reused == 720 + borrowed
    assert again.shards == first.shards
    blocks = list(Embeddings.open(tmp_path / "again").blocks("gallery"))
    labels = np.concatenate([block.labels for block in blocks])
    assert sorted(dataset.labels[number] for number in set(labels[700:])) == ["3", "8"]
    train = np.concatenate([block.digests for block in dataset.blocks("train")])
    digests = np.concatenate([block.digests for block in blocks])
    assert {d.tobytes() for d in digests[700:]} < {d.tobytes() for d in train}
