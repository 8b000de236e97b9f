"""A study measures the unchanged settings, then trials, and continues after it was killed."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import evernear.integrations.tuning.study as study
from evernear.data.ingest import ingest_source
from evernear.data.manifest import SPLITS, save_manifest
from evernear.data.shards import Dataset
from evernear.embedding import data_loader
from evernear.embedding.data_loader import embed_images
from evernear.errors import SettingsError, TrainingError
from evernear.evaluation.statistics import Proportion, proportion
from evernear.integrations.tuning.space import Choices, Range, SearchSpace
from evernear.integrations.tuning.study import BEST_FILE, run_study, with_changes
from evernear.integrations.tuning.trial import measure_trial
from evernear.settings import RunSettings, load

SPACE = SearchSpace(
    parameters={
        "train.margin": Range(low=0.0, high=1.0),
        "train.width": Range(low=4, high=8),
        "train.augment": Choices(choices=("none", "shift")),
    }
)


@pytest.fixture(scope="module")
def digits_dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    directory = tmp_path_factory.mktemp("digits")
    save_manifest(ingest_source(RunSettings().data, (directory / "store").as_uri()), directory)
    return Dataset.open(directory)


def ignore(_: str) -> None: ...


class Trials:
    """Trials whose accuracy is known: the best margin is 0.4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.margins: list[float] = []
        monkeypatch.setattr(study, "measure_trial", self.measure)

    def measure(self, dataset: Dataset, settings: RunSettings, directory: Path, report: object) -> Proportion:
        self.margins.append(settings.train.margin)
        if settings.train.margin > 0.9:
            raise TrainingError("The network learned nothing.")
        return proportion(round(1000 * (1 - abs(settings.train.margin - 0.4))), 1000, 0.95)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(monkeypatch)


def test_the_best_trial_becomes_a_settings_file(digits_dataset: Dataset, simulated: Trials, tmp_path: Path) -> None:
    result = run_study(digits_dataset, RunSettings(), SPACE, 12, tmp_path, ignore)
    assert simulated.margins[0] == RunSettings().train.margin
    assert result.trials + result.failed == 12
    assert result.baseline.value == pytest.approx(0.9)
    assert result.best.value > result.baseline.value
    best = load(environment={}, config=tmp_path / BEST_FILE).train
    assert best.margin == result.settings["train.margin"]
    assert best.width == result.settings["train.width"]
    assert best.augment == result.settings["train.augment"]


def test_a_killed_study_continues(digits_dataset: Dataset, simulated: Trials, tmp_path: Path) -> None:
    def kill(text: str) -> None:
        if text.startswith("trial 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(digits_dataset, RunSettings(), SPACE, 6, tmp_path, kill)
    assert len(simulated.margins) == 3
    result = run_study(digits_dataset, RunSettings(), SPACE, 6, tmp_path, ignore)
    assert result.trials + result.failed == 6
    assert len(simulated.margins) == 7  # none was measured again
    assert len(set(simulated.margins)) == 7
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_study_of_other_settings_is_not_continued(digits_dataset: Dataset, simulated: Trials, tmp_path: Path) -> None:
    run_study(digits_dataset, RunSettings(), SPACE, 1, tmp_path, ignore)
    with pytest.raises(SettingsError, match="has a study of other images, settings or parameters"):
        run_study(digits_dataset, load(environment={}, overrides=["train.epochs=3"]), SPACE, 1, tmp_path, ignore)


def test_failed_training_with_the_unchanged_settings_is_an_error(
    digits_dataset: Dataset, simulated: Trials, tmp_path: Path
) -> None:
    bad = load(environment={}, overrides=["train.margin=1.5"])
    for _ in range(2):
        with pytest.raises(TrainingError, match="learned nothing"):
            run_study(digits_dataset, bad, SPACE, 1, tmp_path, ignore)


def test_trials_train_and_measure_on_the_query_split(digits_dataset: Dataset, tmp_path: Path) -> None:
    quick = load(preset="quick", environment={})
    space = SearchSpace(parameters={"train.margin": Range(low=0.1, high=0.3)})
    result = run_study(digits_dataset, quick, space, 1, tmp_path, ignore)
    assert result.baseline.total == result.best.total == digits_dataset.manifest.count("query")
    assert result.baseline.value > 0.5


def test_trials_of_a_head_share_the_features(
    digits_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def record(network: torch.nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        seen.append(len(images))
        return embed_images(network, images)

    monkeypatch.setattr(data_loader, "embed_images", record)
    weights = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), weights)
    settings = load(
        environment={},
        overrides=[
            "train.backbone=test_resnet", f"train.weights={weights}", "train.backbone_size_px=16",
            "train.min_steps=20", "train.epochs=1",
        ],
    )  # fmt: skip
    for number, margin in enumerate((0.1, 0.2)):
        measure_trial(digits_dataset, with_changes(settings, {"train.margin": margin}), tmp_path / str(number), ignore)
    views = 4 * digits_dataset.count("train")
    assert sum(seen) == sum(digits_dataset.count(split) for split in SPLITS) + views
