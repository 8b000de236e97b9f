"""Of a pretrained network, a head on it and the fine-tuned one, the query images choose."""

from pathlib import Path

import numpy as np
import pytest

from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding import head as head_module
from evernear.embedding.artifact import load_trained
from evernear.embedding.recipe import Recipe, with_defaults
from evernear.embedding.train import train_network
from evernear.evaluation import choice
from evernear.evaluation.choice import candidates, prefer, train_and_choose
from evernear.settings import IndexSettings, TrainSettings
from evernear.settings.train import ARCFACE


@pytest.mark.parametrize(
    ("gained", "lost", "preferred"),
    [
        (0, 0, "pretrained"),
        (2, 0, "pretrained"),
        (3, 0, "head"),
        (3, 3, "pretrained"),
        (0, 40, "pretrained"),
        (9, 3, "head"),
    ],
)
def test_a_network_that_was_trained_more_must_be_significantly_better(gained: int, lost: int, preferred: str) -> None:
    before, after = np.zeros(60, np.bool_), np.zeros(60, np.bool_)
    after[:gained], before[gained : gained + lost] = True, True
    assert prefer({"pretrained": before, "head": after}) == preferred


def test_the_last_is_compared_with_the_best_before_it() -> None:
    pretrained, head, fine_tuned = (np.arange(60) < count for count in (30, 40, 41))
    assert prefer({"pretrained": pretrained, "head": head, "fine-tuned": fine_tuned}) == "head"
    assert prefer({"pretrained": pretrained, "fine-tuned": fine_tuned}) == "fine-tuned"


def test_without_query_images_the_pretrained_network_is_released() -> None:
    none = np.empty(0, np.bool_)
    assert prefer({"pretrained": none, "head": none}) == "pretrained"


@pytest.mark.parametrize(
    "preferred", ["pretrained", *(pytest.param(name, marks=pytest.mark.slow) for name in ("head", "fine-tuned"))]
)
@pytest.mark.usefixtures("short_head")
def test_the_chosen_network_is_written_and_all_are_counted(
    digits: Dataset,
    frozen: TrainSettings,
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    preferred: str,
) -> None:
    """Random weights and a few steps: what is chosen is set here, what it recognizes is not."""
    monkeypatch.setattr(head_module, "START_IMAGES", 200)
    monkeypatch.setattr(choice, "prefer", lambda right: preferred)
    given = frozen.model_dump(include={"backbone", "weights", "backbone_size_px"})
    recipe = with_defaults(TrainSettings(**given, layers="all", epochs=1, min_steps=1, batch_size=1000), digits)
    result = train_and_choose(digits, recipe, IndexSettings(), tmp_path / "trained", store)
    assert [each.name for each in result.candidates if each.chosen] == [preferred]
    assert {each.asked for each in result.candidates} == {digits.count("query")}
    assert result.candidates[0].right > digits.count("query") / 2
    assert f"as it is names {result.candidates[0].share} right, a head" in result.summary()
    train_network(digits, {**candidates(recipe)}[preferred], tmp_path / "alone", store)
    chosen, alone = (load_trained(tmp_path / name)[0] for name in ("trained", "alone"))
    assert chosen.weights_sha256 == alone.weights_sha256
    assert chosen.architecture.frozen is (preferred != "fine-tuned")


@pytest.mark.slow
@pytest.mark.usefixtures("short_head")
def test_fine_tuning_that_cannot_learn_enough_ends_early_and_is_no_candidate(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "START_IMAGES", 200)
    given = frozen.model_dump(include={"backbone", "weights", "backbone_size_px"})
    recipe = with_defaults(TrainSettings(**given, layers="all", minutes=1e-6), digits)
    epochs: list[int] = []
    result = train_and_choose(
        digits, recipe, IndexSettings(), tmp_path / "trained", store, lambda epoch: epochs.append(epoch.epoch)
    )
    assert epochs == [1]
    assert [each.name for each in result.candidates] == ["pretrained", "head"]
    assert result.warnings == (
        "Fine-tuning ended early, because the time is enough for about 5 steps, and after fewer than 200 the "
        "pretrained network is better; raise train.minutes.",
    )


@pytest.mark.slow
def test_nothing_is_chosen_without_pretrained_weights_or_training(
    digits: Dataset, frozen: TrainSettings, tmp_path: Path, store: Store
) -> None:
    result = train_and_choose(digits, with_defaults(frozen, digits), IndexSettings(), tmp_path / "trained", store)
    assert result.candidates == ()
    assert result.summary() == "no training: the backbone is frozen"


def test_a_head_beside_a_loss_of_ones_own_is_trained_with_arcface(digits: Dataset, frozen: TrainSettings) -> None:
    given = frozen.model_dump(include={"backbone", "weights", "backbone_size_px"})
    recipe = with_defaults(TrainSettings(**given, layers="all", loss="losses:mine"), digits)
    losses = {name: Recipe.model_validate(each.model_dump()).loss for name, each in candidates(recipe).items()}
    assert losses == {"pretrained": ARCFACE, "head": ARCFACE, "fine-tuned": "losses:mine"}
