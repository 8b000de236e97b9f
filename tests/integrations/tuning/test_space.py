"""A search space names settings that may be tuned, and values that they accept."""

from pathlib import Path

import pytest

from evernear.errors import SettingsError
from evernear.integrations.tuning.space import Choices, Range, load_space


def write(directory: Path, text: str) -> Path:
    path = directory / "space.toml"
    path.write_text(text)
    return path


def test_the_built_in_space_is_valid() -> None:
    assert "train.learning_rate" in load_space().parameters


def test_a_parameter_is_a_range_or_choices(tmp_path: Path) -> None:
    text = "[train.width]\nlow = 8\nhigh = 32\n[train.augment]\nchoices = ['shift', 'affine']\n"
    parameters = load_space(write(tmp_path, text)).parameters
    assert parameters == {"train.width": Range(low=8, high=32), "train.augment": Choices(choices=("shift", "affine"))}
    assert isinstance(parameters["train.width"], Range)
    assert parameters["train.width"].is_whole


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train.margn]\nlow = 0.1\nhigh = 0.2\n", "did you mean"),
        ("[train.margin]\nlow = 0.1\nhigh = 20.0\n", "train.margin"),
        ("[gate.accuracy_floor]\nlow = 0.1\nhigh = 0.2\n", "gate.accuracy_floor in .* cannot be tuned"),
        ("[train.margin]\nlow = 0.2\nhigh = 0.1\n", "low must be less than high"),
        ("[train.margin]\nlow = 0.0\nhigh = 0.1\nlog = true\n", "low must be positive"),
        ("[train.augment]\nchoices = ['shift']\n", "space.toml is not valid"),
        ("", "space.toml is not valid"),
        ("[train.margin\n", "cannot be read"),
    ],
)
def test_an_invalid_space_is_rejected_in_one_message(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as raised:
        load_space(write(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml cannot be read"):
        load_space(tmp_path / "nowhere.toml")
