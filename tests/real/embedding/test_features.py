"""A frozen backbone sees each image once: its features are cached, and every head reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
def seen() -> Iterator[list[int]]:
    """Sizes of the batches that a network computed."""
    sizes: list[int] = []

    def record(network: torch.nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        sizes.append(len(images))
        return embed_images(network, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_loader, "embed_images", record)
        yield sizes


class Run(NamedTuple):
    """A run with all steps, and the number of images that a network computed in them."""

    directory: Path
    store: Store
    recognizer: Recognizer
    computed: int


@pytest.fixture(scope="module")
def frozen_run(
    digits: Dataset, frozen: TrainSettings, tmp_path_factory: pytest.TempPathFactory, seen: list[int]
) -> Run:
    """Train, probe, export, embed, index, evaluate and archive."""
    directory = tmp_path_factory.mktemp("run")
    names = ("trained", "network", "embeddings", "index", "verdict.json")
    trained, network, embeddings, index, verdict = (directory / name for name in names)
    store, first = open_store((directory / "store").as_uri()), len(seen)
    train_network(digits, frozen, trained, store)
    probe_open_set(digits, frozen, EvaluationSettings(), IndexSettings(), store=store)
    export_network(trained, digits, network, store)
    embed_dataset(network, digits, embeddings, store=store)
    build_index(Embeddings.open(embeddings), digits.labels, IndexSettings(), index)
    recognizer = Recognizer.open(network, index, store=store)
    measure(recognizer, digits)
    verdict.write_text(decided(System(digits, network, index), parent=None, promote=True).model_dump_json())
    candidate = Candidate(digits, network, index, verdict, metrics={}, parent=None)
    make_archive(candidate, ServingSettings(), HANDLER, directory / "release", store=store)
    return Run(directory, store, recognizer, sum(seen[first:]))


def features_of(directory: Path, store: Store | None = None) -> FrozenFeatures:
    trained, network = load_trained(directory)
    return FrozenFeatures(network, trained.architecture, store)


@pytest.mark.slow
def test_the_progress_of_training_a_head_counts_each_image_and_view_once(digits, frozen, tmp_path, store) -> None:
    head = frozen.model_copy(update={"frozen": False, "epochs": 1, "min_steps": 60})
    settings = with_defaults(head, digits, views=1)
    counted: list[int] = []
    train_network(digits, settings, tmp_path / "trained", store, on_images=counted.append)
    assert sum(counted) == shown_images(settings, digits)


def test_a_frozen_backbone_sees_each_image_once(digits: Dataset, frozen_run: Run) -> None:
    assert frozen_run.computed == sum(digits.count(split) for split in SPLITS)


@pytest.mark.slow
def test_another_head_on_the_same_backbone_computes_nothing(digits, frozen, frozen_run, tmp_path, seen) -> None:
    seen.clear()
    train_network(digits, frozen, tmp_path / "other", frozen_run.store, exclude_labels=frozenset("3"))
    other = export_network(tmp_path / "other", digits, tmp_path / "network", frozen_run.store)
    assert seen == []
    first = describe_network(frozen_run.directory / "network")
    assert (other.identity, other.features_dim) == (first.identity, 96)
    assert other.sha256 != first.sha256


@pytest.mark.slow
def test_cached_embeddings_are_those_of_the_served_network(digits: Dataset, frozen_run: Run) -> None:
    again = list(frozen_run.recognizer.embed_split(digits, "test", 100))
    served = load_network(frozen_run.directory / "network")
    for block, embeddings in again:
        np.testing.assert_allclose(embeddings, embed_images(served, block.images), atol=1e-5)
    assert sum(len(block) for block, _ in again) == digits.count("test")


def test_features_are_in_the_order_of_the_dataset(digits: Dataset, frozen_dir: Path, store: Store) -> None:
    trained, network = load_trained(frozen_dir)
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


def test_views_are_cached_beside_the_plain_images(digits, frozen_dir, store, seen) -> None:
    features = features_of(frozen_dir, store)
    mirror = View("mirror", lambda block: block.images[:, :, ::-1])
    plain, mirrored = features.array(digits, "query"), features.array(digits, "query", mirror)
    assert np.abs(plain - mirrored).max() > 0.01
    seen.clear()
    np.testing.assert_array_equal(features.array(digits, "query", mirror), mirrored)
    assert seen == []


@pytest.mark.slow
def test_features_depend_on_weights_and_input_size(digits, frozen, frozen_dir, tmp_path) -> None:
    for name, changes in {"again": {"seed": 5}, "size": {"backbone_size_px": 8}}.items():
        train_network(digits, frozen.model_copy(update=changes), tmp_path / name)
    same, again, size = (features_of(path).identity for path in (frozen_dir, tmp_path / "again", tmp_path / "size"))
    assert same == again != size


def test_the_cache_is_bounded_in_bytes(digits, frozen, tmp_path, store, monkeypatch) -> None:
    row_bytes = 4 * 96 + 32
    monkeypatch.setattr("evernear.embedding.embeddings.MAX_BYTES", digits.count("train") * row_bytes + 1000)
    train_network(digits, frozen, tmp_path / "trained", store)
    assert [info.size_bytes // row_bytes for info in store.list("embeddings/")] == [digits.count("train")]
    features = features_of(tmp_path / "trained", store)
    assert features.array(digits, "query").any(axis=1).all(), "features that are not cached are computed"
