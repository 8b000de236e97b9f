"""``train.minutes`` shortens training and probe. The tests set the clock."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evernear.data.shards import Dataset
from evernear.embedding.artifact import TrainingResult
from evernear.embedding.clock import Clock
from evernear.embedding.recipe import Recipe, recipe_of_probe, recipe_of_training, size_factor, with_defaults
from evernear.embedding.train import train_network
from evernear.embedding.training_setup import prepare_training
from evernear.errors import SettingsError
from evernear.settings import TrainSettings
from tests.real.embedding.test_train import epoch_of

PRETRAINED: dict[str, Any] = {"backbone": "test_resnet", "weights": "/no/weights.safetensors", "backbone_size_px": 64}


class Time:
    """Passes with the training's steps: ``step_s(n)`` seconds for the nth."""

    def __init__(self, step_s: Callable[[int], float] = lambda _: 1.0) -> None:
        self.now_s, self.steps, self._step_s = 0.0, 0, step_s
        self.clock = Clock(lambda: self.now_s)

    def step(self, *_: object) -> None:
        self.now_s += self._step_s(self.steps)
        self.steps += 1

    def train(self, digits: Dataset, recipe: Recipe, out_dir: Path, **options: Any) -> TrainingResult:
        return train_network(digits, recipe, out_dir, on_step=self.step, clock=self.clock, **options)


@pytest.fixture
def minute(digits: Dataset, tiny: TrainSettings) -> Recipe:
    """Takes 200 s at one step a second, but has one minute."""
    return with_defaults(tiny, digits, epochs=5, min_steps=200, batch_size=32, minutes=1.0)


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [(lambda _: 1.0, 60), (lambda number: 1.0 if number < 30 else 2.0, 45), (lambda _: 12.0, 5), (lambda _: 100.0, 1)],
    ids=["slow", "slower half way", "one step an epoch", "one step"],
)
def test_training_is_shortened_to_the_time(digits, minute, tmp_path, step_s, steps) -> None:
    time = Time(step_s)
    result = time.train(digits, minute, tmp_path)
    assert time.steps == sum(epoch.steps for epoch in result.epochs) == pytest.approx(steps, abs=1)
    assert time.now_s <= 60 + step_s(steps)
    assert len(result.epochs) == min(steps, 5)
    assert f"{time.steps} of 200 steps" in result.summary()
    if steps >= 45:
        assert 0 < result.epochs[-1].learning_rate < 0.1 * minute.learning_rate, "the schedule ends with the time"


def test_enough_time_changes_nothing(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    for minutes, name in ((None, "unlimited"), (60.0, "limited")):
        settings = tiny.model_copy(update={"minutes": minutes})
        Time().train(digits, with_defaults(settings, digits), tmp_path / name)
    assert (tmp_path / "limited" / "weights.pt").read_bytes() == (tmp_path / "unlimited" / "weights.pt").read_bytes()


class KilledError(Exception):
    pass


def test_resumed_training_continues_with_the_time_that_is_left(digits, minute, tmp_path, store) -> None:
    def kill(epoch: object) -> None:
        raise KilledError

    first, second, third = Time(), Time(), Time()
    with pytest.raises(KilledError):
        first.train(digits, minute, tmp_path, store=store, on_epoch=kill)
    resumed = second.train(digits, minute, tmp_path, store=store)
    assert resumed.resumed_after_epoch == 1
    assert (first.steps, first.steps + second.steps) == (pytest.approx(12, abs=1), pytest.approx(60, abs=1))
    assert third.train(digits, minute, tmp_path, store=store).resumed_after_epoch == 5, "the time is over"
    assert third.steps == 0


def test_time_for_the_end_is_left() -> None:
    time = Time()
    time.clock.limit(1)
    time.now_s = 30.0
    assert time.clock.share == 0.5
    time.clock.reserve(10)
    assert time.clock.share == 0.6
    time.clock.passes_after = 3
    time.clock.reserve(10)
    assert time.clock.share == 1
    time.clock.reserve(100)
    assert time.clock.share == 1


def test_settings_alone_choose_what_is_trained(digits: Dataset) -> None:
    pretrained = TrainSettings(weights="hub", minutes=0.1)
    assert with_defaults(pretrained, digits).trained_layers == "last"
    assert with_defaults(pretrained.model_copy(update={"layers": "head"}), digits).keeps_backbone
    assert with_defaults(TrainSettings(weights="hub"), digits).trained_layers == "head"


@pytest.mark.parametrize("changes", [{}, PRETRAINED, PRETRAINED | {"layers": "head"}])
def test_training_and_probe_share_the_time(digits: Dataset, changes: dict[str, Any]) -> None:
    settings = TrainSettings.model_validate(changes | {"minutes": 10})
    train, probe = recipe_of_training(settings, digits), recipe_of_probe(settings, digits, 0)
    assert train.minutes == pytest.approx(8)
    assert probe.minutes == pytest.approx(2)
    if not train.keeps_backbone:
        assert probe.epochs == -(-train.epochs // 4)
        assert probe.min_steps == -(-train.min_steps // 4)
        assert train.min_steps > recipe_of_training(TrainSettings.model_validate(changes), digits).min_steps
    assert recipe_of_training(settings.model_copy(update={"epochs": 2}), digits).epochs == 2


def test_images_grow_with_the_time(digits: Dataset) -> None:
    recipe = with_defaults(TrainSettings(weights="hub", layers="all"), digits)
    assert size_factor(recipe, 0.59) < size_factor(recipe, 0.61) == recipe.size_factor


def test_decay_follows_the_number_of_steps_that_the_time_allows(digits: Dataset, tiny: TrainSettings) -> None:
    settings = {"epochs": 4, "min_steps": 1000, "decays_by_steps": True, "ema_decay": 0.99, "minutes": 1.0}
    training = prepare_training(digits, with_defaults(tiny, digits, **settings), frozenset(), torch.device("cpu"))
    training.state.history.append(epoch_of(1, 0.5).model_copy(update={"steps": 25}))
    training.adapt_decay(progress=0.25)
    assert sorted({group["weight_decay"] for group in training.optimizer.param_groups}) == [
        0.0,
        pytest.approx(10 * training.recipe.weight_decay),
    ]
    trained, average = next(training.module.parameters()), next(training.state.result.parameters())
    training.state.count_step()
    before = average.clone()
    with torch.no_grad():
        trained.add_(1)
    training.state.count_step()
    torch.testing.assert_close(average, before + 0.15)


def test_a_time_that_ends_before_the_training_begins_is_refused() -> None:
    time, counted = Time(), list[int]()
    time.clock.limit(1)
    count = time.clock.required(300, counted.append)
    count(30)
    time.now_s = 61
    with pytest.raises(SettingsError, match=r"60 of 300 images; set train\.minutes to 8 times as much"):
        count(30)
    count(240)
    assert counted == [30, 30, 240]
