"""A linear head on the cached features of a pretrained backbone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from evernear.common.store import Store
from evernear.data.manifest import SPLITS
from evernear.data.shards import Block, Dataset
from evernear.embedding import data_loader
from evernear.embedding import head as head_module
from evernear.embedding.artifact import load_trained
from evernear.embedding.augmentation import augment_block, augment_photographs, view_name
from evernear.embedding.clock import Clock, Steps
from evernear.embedding.data_loader import TrainingImages, embed_images
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network, load_network
from evernear.embedding.features import FrozenBackbone, FrozenFeatures
from evernear.embedding.freeze import choose_architecture, initialize
from evernear.embedding.head import read_examples, train_head, whitening_for
from evernear.embedding.network import build_network
from evernear.embedding.recipe import Recipe, with_defaults
from evernear.embedding.timm_member import prepare_epoch
from evernear.embedding.train import train_network
from evernear.embedding.training_setup import prepare_training
from evernear.errors import SettingsError
from evernear.evaluation.probe import probe_open_set
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings, load


@pytest.fixture
def of_head(frozen: TrainSettings, digits: Dataset) -> Recipe:
    head = frozen.model_copy(update={"frozen": False, "embedding_dim": 32, "min_steps": 60, "epochs": 1})
    return with_defaults(head, digits, views=1)


def features_of(dataset: Dataset, settings: Recipe, store: Store | None = None) -> FrozenFeatures:
    torch.manual_seed(0)
    architecture = choose_architecture(dataset, settings)
    network = build_network(architecture)
    initialize(network, architecture, settings, dataset)
    return FrozenFeatures(network, architecture, store)


@pytest.mark.slow
def test_weights_alone_train_a_head_on_features_that_are_computed_once(
    digits: Dataset, of_head: Recipe, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def record(network: torch.nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        seen.append(len(images))
        return embed_images(network, images)

    monkeypatch.setattr(data_loader, "embed_images", record)
    steps: list[Steps] = []
    result = train_network(digits, of_head, tmp_path / "trained", store, on_step=steps.append)
    assert steps[-1] == Steps(60, 60, 60)
    assert result.epochs == ()
    assert result.views == 1
    probe_open_set(digits, of_head, EvaluationSettings(), IndexSettings(), store=store)
    exported = export_network(tmp_path / "trained", digits, tmp_path / "network", store)
    embed_dataset(tmp_path / "network", digits, tmp_path / "embeddings", store=store)
    assert sum(seen) == sum(digits.count(split) for split in SPLITS) + digits.count("train"), "plain and one view"

    assert exported.embedding_dim == 32
    cached = Embeddings.open(tmp_path / "embeddings")
    block = next(digits.blocks("gallery", 8))
    served = embed_images(load_network(tmp_path / "network"), block.images)
    np.testing.assert_allclose(np.linalg.norm(served, axis=1), 1, atol=1e-5)
    of_digest = {
        digest.tobytes(): vector
        for part in cached.blocks("gallery")
        for digest, vector in zip(part.digests, part.embeddings, strict=True)
    }
    for digest, vector in zip(block.digests, served, strict=True):
        np.testing.assert_allclose(of_digest[digest.tobytes()], vector, atol=1e-4)


@pytest.mark.slow
def test_the_same_seed_trains_the_same_head(digits: Dataset, of_head: Recipe, tmp_path: Path, store: Store) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        train_network(digits, of_head.model_copy(update={"seed": seed}), tmp_path / name, store)
    first, again, other = (load_trained(tmp_path / name)[0].weights_sha256 for name in ("first", "again", "other"))
    assert first == again != other


def test_features_in_memory_are_bounded(digits: Dataset, of_head: Recipe, store: Store, monkeypatch) -> None:
    features, images = features_of(digits, of_head, store), TrainingImages(digits, frozenset("3"))
    whitening, settings = whitening_for(features, digits, images), with_defaults(of_head, digits)
    everything = read_examples(features, whitening, digits, images, settings, Clock())
    assert everything.features.shape == (2, images.count, 96)
    monkeypatch.setattr(head_module, "MAX_BYTES", everything.features.nbytes // 3)
    some = read_examples(features, whitening, digits, images, settings, Clock())
    assert some.features.nbytes <= everything.features.nbytes / 2
    every = int(np.ceil(everything.features.shape[1] / some.features.shape[1]))
    np.testing.assert_array_equal(some.features, everything.features[:, ::every])
    np.testing.assert_array_equal(some.classes, everything.classes[::every])
    assert set(some.classes) == set(range(9))


def test_views_end_with_the_time_and_say_so(digits: Dataset, of_head: Recipe, store: Store) -> None:
    features, images = features_of(digits, of_head, store), TrainingImages(digits, frozenset())
    hurried = of_head.model_copy(update={"views": 3, "min_steps": 5})
    clock = Clock(lambda: 0.0)
    clock.limit(1)
    clock.resume(50)
    head = train_head(features, choose_architecture(digits, hurried), digits, images, hurried, clock=clock)
    assert head.warnings == ("The time was enough for 0 of 3 augmented views.",)


@pytest.mark.slow
def test_a_head_keeps_the_whitened_features_unless_the_dimensions_are_set(digits, of_head, tmp_path, store) -> None:
    settings = of_head.model_copy(update={"embedding_dim": None})
    images, architecture = TrainingImages(digits, frozenset()), choose_architecture(digits, settings)
    features = features_of(digits, settings, store)
    whitening = whitening_for(features, digits, images)
    (plain, _), *_ = features.batches(digits, "train", images)
    alone, beside = (
        train_head(features, architecture, digits, images, of_head.model_copy(update={"embedding_dim": dim}))
        for dim in (architecture.embedding_dim, None)
    )
    with torch.no_grad():
        similarities = [each @ each.T for each in (F.normalize(embed(plain)) for embed in (whitening, alone.map))]
        embeddings = F.normalize(beside.map(plain))
    assert embeddings.shape[1] == 2 * 96, "test_resnet has 96 features, so a projection has no more"
    difference = embeddings @ embeddings.T - sum(similarities) / 2
    assert difference.abs().mean() < 0.02
    train_network(digits, settings, tmp_path / "trained", store)
    assert load_trained(tmp_path / "trained")[0].architecture.embedding_dim == 2 * 96


def count_images(seen: list[int], forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def counted(backbone: FrozenBackbone, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(backbone, images)

    return counted


@pytest.mark.parametrize("embedding_dim", [None, 32])
@pytest.mark.usefixtures("short_head")
def test_fine_tuning_starts_at_the_head(digits, of_head, embedding_dim, monkeypatch) -> None:
    given = of_head.model_dump(include={"backbone", "weights", "backbone_size_px"})
    chosen = TrainSettings(**given, layers="all", embedding_dim=embedding_dim)
    settings = with_defaults(chosen, digits)
    seen: list[int] = []
    monkeypatch.setattr(FrozenBackbone, "forward", count_images(seen, FrozenBackbone.forward))
    monkeypatch.setattr(head_module, "START_IMAGES", 200)
    training = prepare_training(digits, settings, frozenset(), torch.device("cpu"))
    assert 200 <= sum(seen) < 232 < digits.count("train"), "a sample is enough"
    pixels, expected = next(training.images.gallery())
    with torch.no_grad():
        logits = training.module.eval().logits(pixels)
    assert (logits.argmax(dim=1) == expected).float().mean() > 0.7
    training.module.train()
    prepare_epoch(training.module, 1.0, fixed_statistics=True)
    with torch.no_grad():
        in_training = training.module.logits(pixels[:32])
    assert (in_training.argmax(dim=1) == expected[:32]).float().mean() > 0.6, "batch statistics would destroy it"
    random = prepare_training(digits, settings, frozenset(), torch.device("cpu"), start=False)
    assert (random.module.eval().logits(pixels).argmax(dim=1) == expected).float().mean() < 0.5


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_and_a_view_determine_the_augmented_image(channels: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 20, 30, channels), np.uint8)
    block = Block(images, np.zeros(6, np.int64), np.arange(6), rng.integers(0, 256, (6, 32), np.uint8))
    state = torch.random.get_rng_state()
    views = augment_block(block, 0, mirror=True)
    assert torch.equal(torch.random.get_rng_state(), state), "the generator of the training is not used up"
    assert views.shape == images.shape
    assert views.dtype == np.uint8
    last = augment_block(block.select(slice(4, 6)), 0, mirror=True)
    np.testing.assert_array_equal(last, views[4:])
    assert not np.array_equal(augment_block(block, 1, mirror=True), views)
    assert len({view_name(view, mirror) for view in (0, 1) for mirror in (False, True)}) == 4


def test_about_half_of_the_images_are_mirrored_if_they_may_be() -> None:
    images = torch.zeros(200, 1, 16, 16, dtype=torch.uint8)
    images[..., 8:] = 255
    plain, mirrored = (augment_photographs(images, list(range(200)), mirror) for mirror in (False, True))
    left = [
        int((m[..., :8].float().mean(dim=(1, 2, 3)) > m[..., 8:].float().mean(dim=(1, 2, 3))).sum())
        for m in (plain, mirrored)
    ]
    assert left[0] < 30  # solarizing and rotating may also brighten the left half
    assert 60 < left[1] < 140


def test_a_quarter_of_the_images_has_an_erased_rectangle() -> None:
    images = torch.randint(0, 256, (200, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seeds = list(range(200))
    plain, erased = (augment_photographs(images, seeds, mirror=False, erase=erase) for erase in (False, True))
    changed = (plain != erased).any(dim=1)
    areas = changed.float().mean(dim=(1, 2))[changed.any(dim=(1, 2))]
    assert 0.15 < len(areas) / len(images) < 0.35
    assert areas.min() > 0.01
    assert areas.max() < 0.4
    assert (erased.movedim(1, -1)[changed] == 120).all()
    assert torch.equal(erased, augment_photographs(images, seeds, mirror=False, erase=True))


def test_many_images_get_fewer_views(digits: Dataset, of_head: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    unset = TrainSettings(weights=of_head.weights)
    assert with_defaults(unset, digits).views == 4
    monkeypatch.setattr("evernear.embedding.recipe.MOST_VIEWED_IMAGES", 3 * digits.count("train"))
    assert with_defaults(unset, digits).views == 3
    monkeypatch.setattr("evernear.embedding.recipe.MOST_VIEWED_IMAGES", 1)
    assert with_defaults(unset, digits).views == 1
    assert with_defaults(unset.model_copy(update={"frozen": True}), digits).views == 0


@pytest.mark.parametrize(
    ("assignments", "sentence"),
    [
        (["train.layers=head"], "layers is head, but weights is empty; set weights, or leave layers out"),
        (["train.weights=hub", "train.members=2"], "members is 2, but only a head is trained .* set layers=all"),
        (["train.weights=hub", "train.nodes=2"], "nodes is 2, but only a head is trained .* or nodes=1"),
        (["train.weights=hub", "train.processes=3"], "processes is 3, but only a head is trained .* or processes=1"),
        (
            ["train.embedding_dim=128", "train.members=3"],
            "embedding_dim is 128, not a multiple of the 3 members; try 129",
        ),
        (["train.batch_size=1"], "greater than or equal to 2"),
        (["train.embedding_dim=1"], "greater than or equal to 2"),
        (["train.minutes=-3"], "greater than 0"),
        (["train.minutes=5", "train.frozen=true"], "but train.frozen trains nothing"),
        (["train.minutes=5", "train.processes=2"], "one of train.processes, not 2; set train.epochs"),
        (["train.minutes=5", "train.nodes=2"], "one of train.nodes, not 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(assignments: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as refused:
        load(overrides=assignments, remembered=False)
    assert "\n" not in str(refused.value)
    assert "Invalid setting  =" not in str(refused.value)


@pytest.mark.parametrize(
    "assignments",
    [
        ["train.weights=hub", "train.layers=all", "train.nodes=2"],
        ["train.weights=hub", "train.layers=all", "train.members=2"],
        ["train.minutes=5", "train.members=2"],
        ["train.members=3"],
        ["train.minutes=5", "train.weights=hub"],
        ["train.minutes=5", "train.epochs=2", "train.weights=hub", "train.layers=all", "train.members=2"],
        ["train.frozen=true", "train.weights=hub", "train.processes=2"],
    ],
)
def test_the_remedies_are_accepted(assignments: list[str]) -> None:
    assert load(overrides=assignments, remembered=False)
