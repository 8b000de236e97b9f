"""Small digits, small networks trained on them, and weights of a small backbone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding import recipe
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.settings import TrainSettings
from tests.real.scenarios.workspace import write_digits
from tests.small_ingest import dataset_of

TINY = TrainSettings(epochs=4, min_steps=0, width=4, embedding_dim=16, batch_size=128)
"""Trains in a fraction of a second."""
TINY_RESNET = "test_resnet"
"""The smallest convolutional network of timm; it has 96 features."""


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of each digit."""
    directory = tmp_path_factory.mktemp("digits")
    write_digits(directory / "source", "0123456789", per_class=60)
    dataset = dataset_of(directory / "source", directory / "store", gallery_fraction=0.2, query_fraction=0.1)
    save_manifest(dataset.manifest, directory)
    return directory


@pytest.fixture(scope="session")
def digits(digits_dir: Path) -> Dataset:
    return Dataset.open(digits_dir)


@pytest.fixture
def tiny() -> TrainSettings:
    return TINY


@pytest.fixture(scope="session")
def trained_dir(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train_network(digits, TINY, directory)
    return directory


@pytest.fixture(scope="session")
def network_dir(digits: Dataset, trained_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("network")
    export_network(trained_dir, digits, directory)
    return directory


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights as timm saves them, of a color network with a classifier of 7 classes."""
    import timm  # takes seconds, also in workers that only collect these tests

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(timm.create_model(TINY_RESNET, num_classes=7).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def frozen(weights: Path) -> TrainSettings:
    return TrainSettings(backbone=TINY_RESNET, weights=str(weights), frozen=True, backbone_size_px=16)


@pytest.fixture(scope="session")
def frozen_dir(digits: Dataset, frozen: TrainSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("frozen")
    train_network(digits, frozen, directory)
    return directory


@pytest.fixture(scope="session")
def frozen_network_dir(digits: Dataset, frozen_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("frozen-network")
    export_network(frozen_dir, digits, directory)
    return directory


@pytest.fixture
def short_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the heads from which fine-tuning starts for an eighth of the usual time."""
    monkeypatch.setitem(recipe.HEAD, "epochs", 4)
    monkeypatch.setitem(recipe.HEAD, "min_steps", 80)
