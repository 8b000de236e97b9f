"""A frozen backbone sees each image once: its features are cached, and every head reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evernear.common.store import Store, open_store
from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.embedding import data_loader
from evernear.embedding.artifact import load_trained
from evernear.embedding.data_loader import embed_images, to_tensor
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, export_network, load_network
from evernear.embedding.features import FrozenFeatures, View
from evernear.embedding.recipe import shown_images, with_defaults
from evernear.embedding.train import train_network
from evernear.evaluation.measure import measure
from evernear.evaluation.probe import probe_open_set
from evernear.evaluation.recognizer import Recognizer
from evernear.index.build import build_index
from evernear.release.archive import Candidate, make_archive
from evernear.serving import HANDLER
from evernear.settings import EvaluationSettings, IndexSettings, ServingSettings, TrainSettings
from tests.releases import System, decided


@pytest.fixture(scope="module")
def digits(few_digits: Dataset) -> Dataset:
    return few_digits


@pytest.fixture(scope="module")
def frozen(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    first = TrainSettings(backbone="test_resnet", epochs=1, min_steps=1, backbone_size_px=16)
    directory = tmp_path_factory.mktemp("first")
    train_network(digits, first, directory)
    weights = directory / "weights.pt"
    short = {"epochs": 1, "min_steps": 60}
    return TrainSettings(backbone="test_resnet", weights=str(weights), frozen=True, backbone_size_px=16, **short)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that a network computed."""
    sizes: list[int] = []

    def record(network: torch.nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        sizes.append(len(images))
        return embed_images(network, images)

    monkeypatch.setattr(data_loader, "embed_images", record)
    return sizes


def all_steps(dataset: Dataset, settings: TrainSettings, directory: Path, store: Store) -> Recognizer:
    """Train, probe, export, embed, index and evaluate, as a run does."""
    trained, network, embeddings, index = (directory / name for name in ("trained", "network", "embeddings", "index"))
    train_network(dataset, settings, trained, store)
    probe_open_set(dataset, settings, EvaluationSettings(), IndexSettings(), store=store)
    export_network(trained, dataset, network, store)
    embed_dataset(network, dataset, embeddings, store=store)
    build_index(Embeddings.open(embeddings), dataset.labels, IndexSettings(), index)
    recognizer = Recognizer.open(network, index, store=store)
    measure(recognizer, dataset)
    return recognizer


@pytest.mark.parametrize("views", [0, 2])
def test_the_progress_of_training_a_head_counts_each_image_and_view_once(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store, views: int
) -> None:
    settings = with_defaults(frozen.model_copy(update={"frozen": False, "views": views}), digits)
    counted: list[int] = []
    train_network(digits, settings, tmp_path / "trained", store, on_images=counted.append)
    assert sum(counted) == shown_images(settings, digits)


def test_a_frozen_backbone_sees_each_image_once(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store, seen: list[int]
) -> None:
    all_steps(digits, frozen, tmp_path / "run", store)
    network, index, verdict = (tmp_path / "run" / name for name in ("network", "index", "verdict.json"))
    verdict.write_text(decided(System(digits, network, index), parent=None, promote=True).model_dump_json())
    candidate = Candidate(digits, network, index, verdict, metrics={}, parent=None)
    make_archive(candidate, ServingSettings(), HANDLER, tmp_path / "release", store=store)
    assert sum(seen) == sum(digits.count(split) for split in SPLITS)


def test_another_head_on_the_same_backbone_computes_nothing(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store, seen: list[int]
) -> None:
    all_steps(digits, frozen, tmp_path / "first", store)
    seen.clear()
    train_network(digits, frozen, tmp_path / "other", store, exclude_labels=frozenset("3"))
    other = export_network(tmp_path / "other", digits, tmp_path / "other_network", store)
    assert seen == []
    first = describe_network(tmp_path / "first" / "network")
    assert (other.identity, other.features_dim) == (first.identity, 96)
    assert other.sha256 != first.sha256


def test_cached_embeddings_are_those_of_the_served_network(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store
) -> None:
    recognizer = all_steps(digits, frozen, tmp_path / "run", store)
    again = list(recognizer.embed_split(digits, "test", 100))
    served = load_network(tmp_path / "run" / "network")
    for block, embeddings in again:
        np.testing.assert_allclose(embeddings, embed_images(served, block.images), atol=1e-5)
    assert sum(len(block) for block, _ in again) == digits.count("test")


def test_features_are_in_the_order_of_the_dataset(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store
) -> None:
    train_network(digits, frozen, tmp_path / "trained")
    trained, network = load_trained(tmp_path / "trained")
    features = FrozenFeatures(network, trained.architecture, store)
    vectors = features.array(digits, "query")
    expected: list[torch.Tensor] = []
    network.members[0].get_submodule("standardize").register_forward_hook(
        lambda _, inputs, __: expected.append(inputs[0])
    )
    with torch.inference_mode():
        for block in digits.blocks("query"):
            network(to_tensor(block.images))
    np.testing.assert_allclose(vectors, torch.cat(expected).numpy(), atol=1e-4)


def test_views_are_cached_beside_the_plain_images(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store, seen: list[int]
) -> None:
    train_network(digits, frozen, tmp_path / "trained")
    trained, network = load_trained(tmp_path / "trained")
    features = FrozenFeatures(network, trained.architecture, store)
    mirror = View("mirror", lambda block: block.images[:, :, ::-1])
    plain, mirrored = features.array(digits, "query"), features.array(digits, "query", mirror)
    assert np.abs(plain - mirrored).max() > 0.01
    seen.clear()
    np.testing.assert_array_equal(features.array(digits, "query", mirror), mirrored)
    assert seen == []


def test_features_depend_on_weights_and_input_size(digits: Dataset, frozen: TrainSettings, tmp_path: Path) -> None:
    identities = set[str]()
    for name, changes in {"same": {}, "again": {"seed": 5}, "size": {"backbone_size_px": 8}}.items():
        train_network(digits, frozen.model_copy(update=changes), tmp_path / name)
        trained, network = load_trained(tmp_path / name)
        identities.add(FrozenFeatures(network, trained.architecture).identity)
    assert len(identities) == 2


def test_the_cache_is_bounded_in_bytes(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = 4 * 96 + 32
    monkeypatch.setattr("evernear.embedding.embeddings.MAX_BYTES", digits.count("train") * row_bytes + 1000)
    train_network(digits, frozen, tmp_path / "trained", store)
    assert [info.size_bytes // row_bytes for info in store.list("embeddings/")] == [digits.count("train")]
    trained, network = load_trained(tmp_path / "trained")
    features = FrozenFeatures(network, trained.architecture, store)
    assert features.array(digits, "query").any(axis=1).all(), "features that are not cached are computed"
