"""Scikit-learn's digits, and a small network trained on them, shared by all tests of this
package."""

from pathlib import Path

import pytest

from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.settings import DataSettings, TrainSettings
from tests.real.scenarios.workspace import write_digits

TINY = TrainSettings(epochs=4, min_steps=0, width=4, embedding_dim=16, batch_size=128)
"""Trains in about a second."""


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    store_uri = (directory / "store").as_uri()
    manifest = ingest_source(DataSettings(source="digits", gallery_fraction=0.2, query_fraction=0.1), store_uri)
    save_manifest(manifest, directory)
    return directory


@pytest.fixture(scope="session")
def digits(digits_dir: Path) -> Dataset:
    return Dataset.open(digits_dir)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 images of each digit, for networks that take milliseconds for an image."""
    directory = tmp_path_factory.mktemp("few-digits")
    write_digits(directory / "source", "0123456789", per_class=60)
    settings = DataSettings(source=f"folder:{directory / 'source'}", gallery_fraction=0.2, query_fraction=0.1)
    save_manifest(ingest_source(settings, (directory / "store").as_uri()), directory)
    return Dataset.open(directory)


@pytest.fixture
def tiny() -> TrainSettings:
    return TINY


@pytest.fixture(scope="session")
def trained_dir(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train_network(digits, TINY.model_copy(update={"epochs": 2}), directory)
    return directory


@pytest.fixture(scope="session")
def network_dir(digits: Dataset, trained_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("network")
    export_network(trained_dir, digits, directory)
    return directory
