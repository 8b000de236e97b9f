"""Training learns, is reproducible, and resumes after it is killed."""

import math
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.artifact import Epoch, TrainingResult, load_trained
from evernear.embedding.clock import Steps
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.monitor import collapse_warnings, recognizes_all, require_learned
from evernear.embedding.network import Architecture
from evernear.embedding.optimizer import choose_precision
from evernear.embedding.recipe import TOTAL_DECAY, learning_rate, with_defaults
from evernear.embedding.train import train_network, train_step
from evernear.embedding.training_setup import TrainingState, checkpoint_key, prepare_training
from evernear.errors import IntegrityError, TrainingError
from evernear.settings import TrainSettings
from tests.small_ingest import dataset_of


def weights(directory: Path) -> bytes:
    return (directory / "weights.pt").read_bytes()


def test_training_learns_and_reports_every_epoch(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    epochs: list[Epoch] = []
    steps: list[Steps] = []
    settings = tiny.model_copy(update={"epochs": 8, "min_steps": 200, "width": 8})
    result = train_network(digits, settings, tmp_path, on_epoch=epochs.append, on_step=steps.append)
    per_epoch = len(steps) // 8
    assert per_epoch >= 200 // 8
    assert steps == [Steps(completed, len(steps), per_epoch) for completed in range(1, len(steps) + 1)]
    assert result.epochs == tuple(epochs)
    assert [epoch.epoch for epoch in epochs] == list(range(1, 9))
    assert epochs[-1].gallery_accuracy > 0.93
    assert epochs[-1].train_loss < epochs[0].train_loss / 2
    assert TrainingResult.load(tmp_path / "history.json") == result
    trained, network = load_trained(tmp_path)
    assert trained.dataset_digest == digits.digest
    assert not network.training


@pytest.mark.slow
def test_each_member_of_an_ensemble_learns_as_it_would_alone(digits: Dataset, tiny: TrainSettings, tmp_path) -> None:
    settings = tiny.model_copy(update={"members": 2, "min_steps": 100})
    result = train_network(digits, with_defaults(settings, digits, label_smoothing=0.1), tmp_path)
    assert result.epochs[-1].gallery_accuracy > 0.8

    architecture = load_trained(tmp_path)[0].architecture
    alone = architecture.model_copy(update={"members": 1, "embedding_dim": architecture.embedding_dim // 2})
    images = TrainingImages(digits, frozenset())
    pixels, classes = next(images.batches(32, 0, 0, 0, 1))
    both = TrainingModule(architecture, images.classes, None, 0.1, torch.float32)
    (both(pixels, classes, settings.margin, classes) * 2).backward()
    for number in range(2):
        member = TrainingModule(alone, images.classes, None, 0.1, torch.float32)
        member.network.members[0].load_state_dict(both.network.members[number].state_dict())
        member.heads[0].load_state_dict(both.heads[number].state_dict())
        member(pixels, classes, settings.margin, classes).backward()
        learned = [*both.network.members[number].parameters(), *both.heads[number].parameters()]
        for in_ensemble, alone_parameter in zip(learned, member.parameters(), strict=True):
            torch.testing.assert_close(in_ensemble.grad, alone_parameter.grad, atol=1e-4, rtol=1e-3)


def test_training_does_not_read_the_test_split(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    read: set[str] = set()

    class RecordingDataset(Dataset):
        def blocks(self, split, *args, **kwargs):  # type: ignore[no-untyped-def]
            read.add(split)
            return super().blocks(split, *args, **kwargs)

        def shuffled_batches(self, split, *args, **kwargs):  # type: ignore[no-untyped-def]
            read.add(split)
            return super().shuffled_batches(split, *args, **kwargs)

    recording = object.__new__(RecordingDataset)
    recording.__dict__.update(digits.__dict__)
    train_network(recording, tiny.model_copy(update={"epochs": 1}), tmp_path)
    assert read == {"train", "gallery"}


def test_the_same_seed_gives_the_same_weights(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        train_network(digits, tiny.model_copy(update={"seed": seed}), tmp_path / name)
    assert weights(tmp_path / "first") == weights(tmp_path / "again")
    assert weights(tmp_path / "first") != weights(tmp_path / "other")


def test_interrupted_training_resumes_to_the_same_weights(digits, tiny, tmp_path, store) -> None:
    recipe = with_defaults(tiny, digits, ema_decay=0.9)

    def interrupt(epoch: Epoch) -> None:
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_network(digits, recipe, tmp_path / "out", store, on_epoch=interrupt)
    assert not (tmp_path / "out").exists()

    resumed = train_network(digits, recipe, tmp_path / "out", store)
    assert resumed.resumed_after_epoch == 2
    unbroken = train_network(digits, recipe, tmp_path / "unbroken")
    assert unbroken.resumed_after_epoch == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "unbroken")
    without_times = {"epochs": {"__all__": {"duration_s", "used_s"}}, "resumed_after_epoch": True}
    assert resumed.model_dump(exclude=without_times) == unbroken.model_dump(exclude=without_times)


def test_the_average_of_the_weights_is_measured_and_saved(digits: Dataset, tiny: TrainSettings) -> None:
    decay = 0.8
    recipe = with_defaults(tiny, digits, ema_decay=decay)
    training = prepare_training(digits, recipe, frozenset(), torch.device("cpu"))
    expected: dict[str, torch.Tensor] = {}
    for pixels, classes in islice(training.images.batches(64, 0, 0, 0, 1), 5):
        train_step(training, pixels, classes, 0.0, (), torch.Generator().manual_seed(0))
        for name, tensor in training.module.network.state_dict().items():
            if not expected.get(name, tensor).is_floating_point():
                continue
            expected[name] = decay * expected[name] + (1 - decay) * tensor if name in expected else tensor.clone()
    training.state.record(epoch_of(1, 0.9))
    saved, last = training.state.best_weights, training.module.network.state_dict()
    assert {name for name in expected if "running_var" in name}, "statistics are averaged as well"
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor)
    assert any(not torch.equal(saved[name], last[name]) for name in expected)
    without = prepare_training(digits, with_defaults(tiny, digits), frozenset(), torch.device("cpu"))
    assert without.state.result is without.module


def test_finished_training_is_loaded_from_its_checkpoint(digits, tiny, tmp_path, store) -> None:
    first = train_network(digits, tiny, tmp_path / "first", store)
    sizes = [info.size_bytes for info in store.list("checkpoints/")]
    epochs: list[Epoch] = []
    again = train_network(digits, tiny, tmp_path / "again", store, on_epoch=epochs.append)
    assert epochs == []
    assert again.epochs == first.epochs
    assert (first.resumption, again.resumption[:17]) == ("", ", nothing trained")
    assert weights(tmp_path / "first") == weights(tmp_path / "again")
    assert len(sizes) == 1
    assert sizes[0] < 2 * len(weights(tmp_path / "first"))


def test_a_checkpoint_of_other_code_is_not_used(digits, tiny, tmp_path, store, monkeypatch) -> None:
    train_network(digits, tiny, tmp_path / "first", store)
    monkeypatch.setattr("evernear.embedding.training_setup.code_digest", lambda *_: "other code")
    epochs: list[Epoch] = []
    result = train_network(digits, tiny, tmp_path / "again", store, on_epoch=epochs.append)
    assert (len(epochs), result.resumed_after_epoch) == (tiny.epochs, 0)


def test_checkpoint_key_depends_on_everything_that_affects_the_weights(tiny: TrainSettings) -> None:
    key = checkpoint_key("digest", tiny, frozenset())
    assert key != checkpoint_key("digest", tiny.model_copy(update={"margin": 0.4}), frozenset())
    assert key != checkpoint_key("other", tiny, frozenset())
    assert key != checkpoint_key("digest", tiny, frozenset({"7"}))


def test_an_unreadable_checkpoint_is_an_error(digits: Dataset, tiny: TrainSettings, tmp_path, store: Store) -> None:
    key = f"checkpoints/{checkpoint_key(digits.digest, with_defaults(tiny, digits), frozenset())}/state.pt"
    store.put(key, b"no checkpoint")
    with pytest.raises(TrainingError, match="cannot be read; delete it"):
        train_network(digits, tiny, tmp_path / "out", store)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_is_an_error(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    settings = tiny.model_copy(update={"learning_rate": 1e38})
    with pytest.raises(TrainingError, match=r"not a finite number after epoch 1; lower train\.learning_rate"):
        train_network(digits, settings, tmp_path)
    assert not (tmp_path / "weights.pt").exists()


def test_excluded_labels_are_not_trained_or_validated_on(digits: Dataset) -> None:
    images = TrainingImages(digits, frozenset({"3", "8"}))
    included = [label for label in digits.labels if label not in {"3", "8"}]
    counts = digits.manifest.label_counts("train")
    assert images.classes == 8
    assert images.count == sum(counts[label] for label in included)
    gallery = Counter(c for _, classes in images.gallery() for c in classes.tolist())
    expected = digits.manifest.label_counts("gallery")
    assert gallery == {number: expected[label] for number, label in enumerate(included)}
    batches = list(islice(images.batches(50, seed=0, epoch=0, rank=0, world_size=1), 60))
    assert all(pixels.shape == (50, 1, 8, 8) and len(classes) == 50 for pixels, classes in batches)
    assert {c for _, classes in batches for c in classes.tolist()} == set(range(8))


def test_batches_pair_each_image_with_its_class(digits: Dataset) -> None:
    label_of = {
        image.tobytes(): digits.labels[label]
        for block in digits.blocks("train")
        for image, label in zip(block.images, block.labels, strict=True)
    }
    included = [label for label in digits.labels if label != "0"]
    images = TrainingImages(digits, frozenset({"0"}))
    for pixels, classes in islice(images.batches(100, seed=3, epoch=1, rank=0, world_size=1), 20):
        for image, index in zip(pixels.permute(0, 2, 3, 1).numpy(), classes.tolist(), strict=True):
            assert label_of[image.tobytes()] == included[index]


def test_training_requires_two_labels(digits: Dataset) -> None:
    with pytest.raises(TrainingError, match="has 1 label and"):
        TrainingImages(digits, frozenset(digits.labels[1:]))


def test_a_small_dataset_is_repeated_up_to_min_steps(digits, tiny, tmp_path, monkeypatch) -> None:
    progresses: list[float] = []

    def recording_rate(settings: TrainSettings, progress: float) -> float:
        progresses.append(progress)
        return learning_rate(settings, progress)

    monkeypatch.setattr("evernear.embedding.train.learning_rate", recording_rate)
    train_network(digits, tiny.model_copy(update={"epochs": 3, "min_steps": 100}), tmp_path)
    assert len(progresses) == 3 * 34
    assert progresses == pytest.approx([i / 102 for i in range(102)])


def test_the_learning_rate_rises_to_the_peak_and_falls_to_zero(digits: Dataset) -> None:
    recipe = with_defaults(TrainSettings(learning_rate=0.5), digits)
    rates = [learning_rate(recipe, step / 1000) for step in range(1000)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.5)
    assert peak == 200
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[0] < 0.01
    assert rates[-1] < 0.001


VARIANTS = [{"muon": True}, {"augment": "none", "precision": "float32"}, {"label_smoothing": 0.1, "patch_px": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("changed", VARIANTS, ids=str)
def test_every_recipe_learns(digits: Dataset, tiny: TrainSettings, tmp_path: Path, changed: dict[str, object]) -> None:
    result = train_network(digits, with_defaults(tiny, digits, min_steps=60, **changed), tmp_path)
    assert result.epochs[-1].gallery_accuracy > 0.7


def state() -> TrainingState:
    architecture = Architecture(shape=(8, 8, 1), mean=(0.5,), std=(0.5,), patch_px=1, width=4, embedding_dim=16)
    module = TrainingModule(architecture, 10, None, 0.0, torch.float32)
    optimizer = torch.optim.AdamW(module.parameters())
    return TrainingState(module, optimizer, torch.GradScaler("cpu", enabled=False))


def epoch_of(epoch: int, accuracy: float, error: float = 0.01) -> Epoch:
    return Epoch(
        epoch=epoch,
        learning_rate=0.1,
        train_loss=0.5,
        gallery_loss=float(epoch),
        gallery_accuracy=accuracy,
        gallery_accuracy_error=error,
        duration_s=1.0,
    )


def test_summary_names_the_best_epoch_and_the_warnings() -> None:
    result = TrainingResult(
        key="key",
        best_epoch=2,
        resumed_after_epoch=1,
        epochs=(epoch_of(1, 0.5), epoch_of(2, 0.9), epoch_of(3, 0.8)),
        planned_steps=1200,
        chance_accuracy=0.1,
        warnings=("the loss grew",),
    )
    best = "gallery accuracy 90.00%, resumed after epoch 1; WARNING: the loss grew"
    assert result.summary() == f"best epoch 2, 0 of 1,200 steps, {best}"
    assert result.model_copy(update={"planned_steps": 0}).summary() == f"best epoch 2, {best}"
    frozen = result.model_copy(update={"epochs": (), "best_epoch": 0, "warnings": ()})
    assert frozen.summary() == "no training: the backbone is frozen"


@pytest.mark.parametrize(
    ("correct", "images", "ends"),
    [
        ([48, 48], 48, True),
        ([30, 48, 48], 48, True),
        ([48], 48, False),
        ([48, 48, 47], 48, False),
        ([10, 10], 10, False),
        ([5970, 5970], 6000, False),
    ],
)
def test_only_a_gallery_that_can_show_no_improvement_ends_training(correct: list[int], images: int, ends: bool) -> None:
    history: list[Epoch] = []
    for epoch, count in enumerate(correct, start=1):
        share = (count + 0.5) / (images + 1)
        history.append(epoch_of(epoch, count / images, math.sqrt(share * (1 - share) / (images + 1))))
    assert recognizes_all(history) == ends


def test_an_easy_dataset_ends_training_early_at_a_learning_rate_of_zero(
    digits: Dataset, tiny: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perfect = {"gallery_loss": 0.1, "gallery_accuracy": 1.0, "gallery_accuracy_error": 0.01}
    monkeypatch.setattr("evernear.embedding.train.measure_gallery", lambda *_: perfect)
    recipe = with_defaults(tiny, digits, epochs=10, min_steps=100)
    result = train_network(digits, recipe, tmp_path)
    assert [epoch.progress for epoch in result.epochs] == [0.1, 0.2, 1.0]
    rates = [epoch.learning_rate / recipe.learning_rate for epoch in result.epochs]
    assert rates[1] > 0.9
    assert rates[2] == pytest.approx(0.1, abs=0.02), "the last of ten steps is at a tenth of the epoch"
    assert result.best_epoch == 3
    assert result.summary().startswith("best epoch 3, 30 of 100 steps")
    assert result.warnings == ()


def test_best_weights_are_those_of_the_best_epoch() -> None:
    training = state()
    for epoch, accuracy in enumerate([0.9, 0.5], start=1):
        for parameter in training._module.parameters():
            parameter.data.fill_(epoch)
        training.record(epoch_of(epoch, accuracy))
    assert training.best_epoch == 1
    assert training.best_weights["members.0.project.weight"].unique().tolist() == [1.0]


def test_digits_are_not_flipped(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    result = train_network(digits, tiny.model_copy(update={"min_steps": 100}), tmp_path)
    horizontal, vertical = next(epoch.flip_tests for epoch in result.epochs if epoch.flip_tests)
    assert not horizontal.harmless
    assert not vertical.harmless
    assert "horizontal flips not used" in result.flips
    assert not load_trained(tmp_path)[0].architecture.test_time_flip


def test_images_that_look_like_their_mirror_images_are_flipped(tmp_path: Path, tiny: TrainSettings) -> None:
    # Two arrows: one points up, the other down, each from either side. Left and right carry no
    # information.
    rng = np.random.default_rng(0)
    for number in range(400):
        image = rng.integers(0, 60, (12, 12), dtype=np.uint8)
        image[1:6, 2:5] += 180
        image = image[:, ::-1] if rng.random() < 0.5 else image
        label = ("up", "down")[number % 2]
        directory = tmp_path / "images" / label
        directory.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image if label == "up" else image[::-1]).save(directory / f"{number}.png")
    dataset = dataset_of(tmp_path / "images", tmp_path / "store", gallery_fraction=0.2, query_fraction=0.1)
    result = train_network(dataset, tiny.model_copy(update={"min_steps": 40}), tmp_path / "trained")
    tested = [epoch.flip_tests for epoch in result.epochs if epoch.flip_tests]
    assert len(tested) == 1
    horizontal, vertical = tested[0]
    assert horizontal.harmless
    assert not vertical.harmless
    assert load_trained(tmp_path / "trained")[0].architecture.test_time_flip


def result(*accuracies: float, best_epoch: int, chance: float = 0.1) -> TrainingResult:
    epochs = tuple(epoch_of(number, accuracy) for number, accuracy in enumerate(accuracies, start=1))
    return TrainingResult(key="", best_epoch=best_epoch, resumed_after_epoch=0, epochs=epochs, chance_accuracy=chance)


def test_training_that_stays_at_chance_is_an_error(digits: Dataset, tiny: TrainSettings) -> None:
    recipe = with_defaults(tiny, digits)
    with pytest.raises(TrainingError, match=r"learned nothing: .* in 2 epochs is 10\.5%.*10\.0%"):
        require_learned(result(0.10, 0.105, best_epoch=2), recipe)
    require_learned(result(0.10, 0.2, best_epoch=2), recipe)


def test_a_learning_rate_that_destroys_the_network_is_an_error(digits: Dataset, tiny: TrainSettings, tmp_path) -> None:
    recipe = with_defaults(tiny, digits, learning_rate=1000.0)
    with pytest.raises(TrainingError, match=r"Lower train\.learning_rate|lower train\.learning_rate"):
        require_learned(train_network(digits, recipe, tmp_path), recipe)


def test_a_collapse_is_a_warning(digits: Dataset, tiny: TrainSettings) -> None:
    recipe = with_defaults(tiny, digits)
    collapsed = result(0.4, 0.1, best_epoch=1)
    (warning,) = collapse_warnings(collapsed.epochs, 1, recipe)
    assert "collapsed after epoch 1: the gallery accuracy fell from 40.0% to 10.0%" in warning
    assert collapse_warnings(result(0.4, 0.38, best_epoch=1).epochs, 1, recipe) == ()


def test_load_rejects_changed_weights(trained_dir: Path, tmp_path: Path) -> None:
    data = bytearray(weights(trained_dir))
    data[len(data) // 2] ^= 1
    (tmp_path / "weights.pt").write_bytes(data)
    (tmp_path / "network.json").write_bytes((trained_dir / "network.json").read_bytes())
    with pytest.raises(IntegrityError, match=r"does not match network\.json; run the train step again"):
        load_trained(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "muon", "tolerance"),
    [
        (2, False, 1e-5),
        pytest.param(2, True, 1e-3, marks=pytest.mark.slow),
        pytest.param(4, False, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_like_one(digits, tiny, tmp_path, processes, muon, tolerance) -> None:
    """Muon amplifies rounding errors of small singular values up to 500 times."""
    recipe = with_defaults(tiny, digits, epochs=2, muon=muon, augment="elastic", precision="float32")
    alone = train_network(digits, recipe, tmp_path / "alone")
    together = train_network(digits, recipe.model_copy(update={"processes": processes}), tmp_path / "together")
    for one, several in zip(alone.epochs, together.epochs, strict=True):
        measured, expected = ((epoch.train_loss, epoch.gallery_loss) for epoch in (several, one))
        assert measured == pytest.approx(expected, rel=tolerance)
        assert several.gallery_accuracy == pytest.approx(one.gallery_accuracy, abs=0.01)


@pytest.fixture
def red_and_green(tmp_path: Path) -> Dataset:
    directory = tmp_path / "images"
    for label in ("red", "green"):
        (directory / label).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), (number, 200, 0) if label == "green" else (200, number, 0)).save(
                directory / label / f"{number}.png"
            )
    return dataset_of(directory, tmp_path / "store")


def test_color_images_get_a_larger_network_and_more_steps(red_and_green: Dataset, digits: Dataset) -> None:
    color = with_defaults(TrainSettings(), red_and_green)
    gray = with_defaults(TrainSettings(), digits)
    assert (gray.epochs, gray.min_steps, gray.width) == (12, 300, 16)
    assert color.min_steps > gray.min_steps
    assert color.width > gray.width
    assert (gray.augment, color.augment) == ("affine", "shift")
    assert (gray.label_smoothing, color.label_smoothing) == (0.0, 0.1)
    assert (gray.muon, color.muon) == (False, True)
    chosen = TrainSettings(
        epochs=2, min_steps=0, batch_size=64, learning_rate=0.02, width=4, augment="none", weight_decay=0.1
    )
    given = chosen.model_dump(exclude_none=True)
    recipe = with_defaults(chosen, digits)
    assert recipe.model_dump(include=given.keys()) == given
    assert with_defaults(recipe, red_and_green) == recipe, "a recipe has no defaults to fill in"
    assert with_defaults(TrainSettings(scale=32.0), red_and_green).label_smoothing == 0.0
    for other in ({"backbone": "resnet18"}, {"weights": "pretrained.safetensors"}):
        assert not with_defaults(TrainSettings.model_validate(other), red_and_green).muon


def test_pretrained_weights_get_the_recipe_of_a_head_or_of_fine_tuning(red_and_green: Dataset, digits: Dataset) -> None:
    head = with_defaults(TrainSettings(weights="hub"), red_and_green)
    assert (head.views, head.min_steps, head.batch_size, head.scale, head.weight_decay) == (4, 600, 128, 16.0, 0.1)
    tuned = with_defaults(TrainSettings(weights="hub", layers="all"), red_and_green)
    assert (tuned.views, tuned.epochs, tuned.batch_size, tuned.learning_rate) == (0, 16, 32, 0.001)
    assert (tuned.augment, tuned.size_factor) == ("photograph", 6 / 7)
    assert with_defaults(TrainSettings(weights="hub", layers="all"), digits).augment == "affine"
    assert tuned.ema_decay == pytest.approx(1 - 15 / 208), "an average of 200 steps may not look back at 100"
    long = with_defaults(TrainSettings(weights="hub", layers="all", min_steps=3000), red_and_green)
    assert long.ema_decay == 0.99
    assert head.ema_decay == with_defaults(TrainSettings(), digits).ema_decay == 0


@pytest.mark.parametrize(
    ("convolution", "precision"),
    [
        (torch.nn.Conv2d(8, 8, 3, groups=8), torch.float32),
        (torch.nn.Conv2d(8, 8, 3), torch.bfloat16),
        (torch.nn.Conv2d(8, 8, 3, groups=2), torch.bfloat16),
    ],
    ids=["depthwise", "dense", "grouped"],
)
def test_cpus_train_depthwise_convolutions_in_float32(
    convolution: torch.nn.Module, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 1), convolution)
    assert choose_precision(torch.device("cpu"), network) == precision


def test_weight_decay_of_color_images_falls_with_the_number_of_steps(red_and_green: Dataset, digits: Dataset) -> None:
    short, long = (
        with_defaults(TrainSettings(epochs=2, learning_rate=0.02, **changes), red_and_green).weight_decay
        for changes in ({"min_steps": 100}, {"min_steps": 200})
    )
    assert short * 0.02 * 100 == pytest.approx(TOTAL_DECAY)
    assert long == pytest.approx(short / 2)
    assert with_defaults(TrainSettings(), digits).weight_decay == 0.01
