"""The search space of a study: the settings to vary, and their values."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from evernear.common.frozen import Frozen
from evernear.errors import SettingsError
from evernear.settings import load

SECTIONS = ("train", "index")
"""Sections that may be tuned. Others determine what is measured, or how it is judged."""
BUILT_IN = Path(__file__).parent / "space.toml"


class Range(Frozen):
    """Numbers between ``low`` and ``high``, or only integers if both bounds are."""

    low: int | float
    high: int | float
    log: bool = False
    """Whether to sample on a logarithmic scale, as for a learning rate."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be less than high")
        if self.log and self.low <= 0:
            raise ValueError("low must be positive with log = true")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Choices(Frozen):
    choices: tuple[int | float | str, ...] = Field(min_length=2)


Parameter = Range | Choices


class SearchSpace(Frozen):
    """The parameters to tune, by setting, such as ``train.learning_rate``."""

    parameters: dict[str, Parameter] = Field(min_length=1)


def load_space(path: Path = BUILT_IN) -> SearchSpace:
    """Read a TOML file with one table per setting. A table such as ``[train.learning_rate]``
    contains ``low``, ``high`` and optionally ``log = true``, or a list named ``choices``."""
    try:
        tree = tomllib.loads(path.read_text())
        space = SearchSpace(parameters=dict(_settings(tree)))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"The search space {path} cannot be read: {error}.") from error
    except ValidationError as error:
        raise SettingsError(f"The search space {path} is not valid: {_first(error)}.") from error
    for name, parameter in space.parameters.items():
        if name.partition(".")[0] not in SECTIONS:
            raise SettingsError(f"{name} in {path} cannot be tuned; only settings of {' and '.join(SECTIONS)} can.")
        for value in (parameter.low, parameter.high) if isinstance(parameter, Range) else parameter.choices:
            load(environment={}, overrides=[f"{name}={value}"], remembered=False)
    return space


def _settings(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, keys in tree.items():
        for key, parameter in keys.items() if isinstance(keys, dict) else ():
            yield f"{section}.{key}", parameter


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"][1:] if part not in ("Range", "Choices"))
    return f"{location}: {first['msg']}" if location else first["msg"]
