"""Training within a time: the plan follows from the speed of the machine."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evernear.common.store import Store, open_store
from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.embedding import speed as speed_module
from evernear.embedding.plan import Plan, Speed, find_plan, make_plan
from evernear.embedding.recipe import Recipe, size_factor, with_defaults
from evernear.embedding.speed import measure_speed, plan_training
from evernear.embedding.train import train_network
from evernear.errors import SettingsError
from evernear.evaluation.probe import probe_recipe
from evernear.settings import EvaluationSettings, TrainSettings

PRETRAINED: dict[str, Any] = {"backbone": "test_resnet", "weights": "/no/weights.safetensors", "backbone_size_px": 64}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def plan_at(dataset: Dataset, speed: Speed, **changes: Any) -> Plan:
    settings = TrainSettings.model_validate(changes)
    return make_plan(dataset, settings, speed, lambda _: speed, time.monotonic())


def seconds_of(dataset: Dataset, plan: Plan, speed: Speed) -> float:
    """The time of the training and of the probe at ``speed``, from the plan's settings."""
    total_s = 0.0
    for settings in (plan.train, plan.probe):
        recipe = with_defaults(settings, dataset)
        if recipe.keeps_backbone:
            continue
        assert recipe.min_steps == recipe.max_steps
        per_epoch = recipe.min_steps // recipe.epochs
        for epoch in range(recipe.epochs):
            images = per_epoch * min(recipe.batch_size, dataset.count("train"))
            total_s += images * speed.train_s * size_factor(recipe, epoch) ** 2
            total_s += dataset.count("gallery") * speed.validate_s
    features = sum(dataset.count(split) for split in SPLITS)
    views = with_defaults(plan.train, dataset).views if plan.train.keeps_backbone else 0
    return total_s + (features + views * dataset.count("train")) * speed.embed_s


@pytest.mark.parametrize("minutes", [1, 5, 20, 120])
@pytest.mark.parametrize("train_s", [0.0005, 0.005, 0.05])
@pytest.mark.parametrize("pretrained", [False, True])
def test_training_and_probe_fit_in_the_time(digits: Dataset, minutes: float, train_s: float, pretrained: bool) -> None:
    speed = Speed(train_s, train_s / 3, train_s / 3)
    try:
        plan = plan_at(digits, speed, minutes=minutes, **(PRETRAINED if pretrained else {}))
    except SettingsError:
        assert minutes == 1
        return
    assert seconds_of(digits, plan, speed) < minutes * 60
    limits = (plan.train.minutes, None if plan.train.keeps_backbone else plan.probe.minutes)
    assert sum(filter(None, limits)) <= minutes


def test_the_time_is_used_unless_more_would_not_help(digits: Dataset) -> None:
    speed = Speed(0.01, 0.003, 0.003)
    plan = plan_at(digits, speed, minutes=10)
    assert seconds_of(digits, plan, speed) > 0.7 * 600
    assert "because more would not help" not in plan.sentence
    fast = plan_at(digits, Speed(1e-6, 1e-6, 1e-6), minutes=10)
    assert "of the 10, because more would not help" in fast.sentence
    assert with_defaults(fast.train, digits).epochs == 30


@pytest.mark.parametrize(
    ("train_s", "minutes", "layers", "size"),
    [
        (0.002, 60, "all", 6 / 7),
        (0.05, 20, "last", 6 / 7),
        (0.05, 5, "last", 4 / 7),
        (0.05, 3, "head", 0.0),
    ],
)
def test_a_slower_machine_trains_fewer_layers(
    digits: Dataset, train_s: float, minutes: float, layers: str, size: float
) -> None:
    speed = Speed(train_s, train_s / 5, train_s / 5)
    plan = plan_at(digits, speed, minutes=minutes, **PRETRAINED)
    assert plan.train.layers == plan.probe.layers == layers
    if layers != "head":
        assert plan.train.size_factor == pytest.approx(size)
        assert with_defaults(plan.train, digits).min_steps >= 200


def test_views_fill_the_time_of_a_head(digits: Dataset) -> None:
    seconds_per_pass = digits.count("train") * 0.02
    few, many = (
        plan_at(digits, Speed(1.0, 0.02, 0.02), minutes=minutes, layers="head", **PRETRAINED).train.views
        for minutes in (3, 3 + 3 * seconds_per_pass / 60 / 0.9)
    )
    assert few in (1, 2, 3)
    assert many == min(4, few + 3)
    slow = plan_at(digits, Speed(1.0, 0.04, 0.04), minutes=2, **PRETRAINED)
    assert slow.train.frozen
    assert slow.probe.frozen
    assert "whitened features without training" in slow.sentence


@pytest.mark.parametrize("changes", [{}, PRETRAINED, PRETRAINED | {"layers": "all"}, PRETRAINED | {"layers": "last"}])
def test_too_little_time_is_refused_with_a_time_that_is_enough(digits: Dataset, changes: dict[str, Any]) -> None:
    speed = Speed(0.2, 0.05, 0.05)
    with pytest.raises(SettingsError, match=r"set train\.minutes=") as refused:
        plan_at(digits, speed, minutes=0.4, **changes)
    enough = float(str(refused.value).rpartition("train.minutes=")[2].split()[0])
    assert enough > 0.4
    assert (plan_at(digits, speed, minutes=enough, **changes).train.minutes or 0) <= enough


def test_a_training_that_cannot_fit_is_not_measured(digits: Dataset) -> None:
    measured: list[str] = []

    def measure(recipe: Recipe) -> Speed:
        measured.append(recipe.trained_layers)
        return Speed(0.1, 0.05, 0.05)

    find_plan(digits, TrainSettings.model_validate(PRETRAINED | {"minutes": 3}), None, measure)
    assert measured == ["head"]


@pytest.mark.parametrize("changes", [{}, PRETRAINED])
def test_a_second_run_plans_anew_only_if_the_machine_is_clearly_faster(
    digits: Dataset, store: Store, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    settings = TrainSettings.model_validate(changes | {"minutes": 5})

    def plan_at_load(load: float) -> Plan:
        speed = Speed(0.02 * load, 0.004 * load, 0.004 * load)
        monkeypatch.setattr(speed_module, "measure_speed", lambda *_: speed)
        return plan_training(digits, settings, store)

    busy = plan_at_load(4)
    assert plan_at_load(3) == plan_at_load(40) == busy, "a finished or interrupted training continues"
    quiet = plan_at_load(1)
    assert quiet.train.trained_layers == ("last" if changes else "all")
    assert changes or quiet.train.max_steps > 1.5 * busy.train.max_steps
    assert plan_at_load(4) == quiet
    assert probe_recipe(digits, settings, EvaluationSettings(), store) == quiet.probe
    other = settings.model_copy(update={"minutes": 6.0})
    assert plan_training(digits, other, store) != quiet


def test_this_machine_is_measured(digits: Dataset, tiny: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    # CPU time does not grow with the load of the machine.
    monkeypatch.setattr(speed_module, "time", SimpleNamespace(monotonic=time.process_time))
    speed = measure_speed(digits, with_defaults(tiny, digits))
    assert 0 < speed.embed_s < 0.1
    assert 0 < speed.train_s < 0.1
    assert 0 < speed.validate_s < 0.1


def test_epochs_end_early_if_the_machine_becomes_slower(digits: Dataset, tiny: TrainSettings, tmp_path: Path) -> None:
    slow = tiny.model_copy(update={"epochs": 3, "min_steps": 30, "minutes": 1e-6})
    result = train_network(digits, slow, tmp_path)
    assert [epoch.skipped_steps for epoch in result.epochs] == [9, 9, 9]
    assert "3 epochs ended early, without 27 steps: the machine became slower." in result.warnings
    unhurried = train_network(digits, slow.model_copy(update={"minutes": 60.0, "epochs": 1}), tmp_path)
    assert unhurried.warnings == ()
