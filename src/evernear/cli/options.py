"""Options that several commands share, and the settings that they add up to."""

from pathlib import Path
from typing import Annotated

import typer

from evernear import settings as knobs
from evernear.settings import Settings

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help="Settings that come with evernear: best, fast, quick.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="e.g. train.epochs=3")]
WorkdirOption = Annotated[Path | None, typer.Option("--workdir", help="Runs, releases and logs [evernear-work].")]
SourceOption = Annotated[
    str | None,
    typer.Option("--source", help="digits | mnist | mnist:DIR | folder:DIR | s3://bucket/prefix"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]


def settings_of(
    preset: str | None,
    config: Path | None,
    overrides: list[str] | None,
    workdir: Path | None,
    source: str | None = None,
) -> Settings:
    """The settings of one command: preset, file, environment and flags."""
    flags = list(overrides or [])
    if workdir is not None:
        flags.append(f"workdir={workdir}")
    if source is not None:
        flags.append(f"data.source={source}")
    return knobs.load(preset=preset, config=config, overrides=flags)
