"""Options that several commands share, and functions that build settings from them.

A command has such a function's options, and gets its result as the first argument::

    @app.command()
    @options_of(local_settings)
    def stop(settings: Settings) -> None: ...
"""

import difflib
import json
import re
from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, TypeVar

import typer

from evernear.errors import SettingsError
from evernear.settings import Settings, load, load_layers
from evernear.settings.layers import Layers

Built = TypeVar("Built")
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help="Built-in settings: best, fast, frozen, photos or quick.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as train.epochs=3.")
]
WorkdirOption = Annotated[
    Path | None,
    typer.Option(
        "--workdir", help="Directory of runs, releases and logs, and of their settings, evernear.toml. [evernear-work]"
    ),
]
RememberOption = Annotated[
    bool,
    typer.Option("--remember", help="Keep the settings of this command in WORKDIR/evernear.toml for later ones."),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="digits | mnist | mnist:DIR | folder:DIR | s3://bucket/prefix | table:FILE | webdataset:DIR |"
        " huggingface:DIR",
    ),
]
RetireOption = Annotated[
    list[str] | None,
    typer.Option("--retire", metavar="CLASS", help="A class of the champion that was removed on purpose; repeatable."),
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="A class of the champion that has a new name; repeatable. A = in the old name is written \\=.",
    ),
]
ReleaseOption = Annotated[
    str | None, typer.Option("--release", metavar="VERSION", help="A release of the registry. [the champion]")
]
MinutesOption = Annotated[
    float | None,
    typer.Option("--minutes", help="Time for training and the open-set probe."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def options_of(build: Callable[..., Built]) -> Callable[[Callable[Concatenate[Built, ...], None]], Callable[..., None]]:
    """Add ``build``'s parameters to a command's options, and pass it the result first."""

    def decorate(command: Callable[Concatenate[Built, ...], None]) -> Callable[..., None]:
        (_, *own), added = signature(command).parameters.values(), signature(build).parameters

        @wraps(command)
        def run(**options: Any) -> None:
            built = build(**{name: options.pop(name) for name in added if name in options})
            command(built, **options)

        parameters = [*own, *added.values()]
        vars(run)["__signature__"] = Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def local_settings(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> Settings:
    options = assignments(overrides, workdir=workdir)
    _require_workdir(options)
    return load(config=config, overrides=options)


def run_settings(
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> Settings:
    return run_layers(source, preset, config, overrides, workdir, retire, rename).settings()


def run_layers(
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> Layers[Settings]:
    """Like `run_settings`, but keep the sources separate."""
    _require_workdir(assignments(overrides, workdir=workdir))
    return new_run_layers(source, preset, config, overrides, workdir, retire, rename)


def new_run_layers(
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
    minutes: MinutesOption = None,
) -> Layers[Settings]:
    """Like `run_layers`, for a command that may create the working directory."""
    classes = {
        "classes.retired": json.dumps(retire) if retire else None,
        "classes.renamed": json.dumps(dict(map(_old_and_new, rename))) if rename else None,
    }
    options = assignments(overrides, workdir=workdir, **{"data.source": source, "train.minutes": minutes}, **classes)
    return load_layers(preset=preset, config=config, overrides=options)


def _require_workdir(options: list[str]) -> None:
    """Refuse a missing directory: a mistyped name would be an empty working directory."""
    named = [option.partition("=")[2] for option in options if option.startswith("workdir=")]
    workdir = Path(named[-1]).expanduser() if named else Path()
    if workdir.is_dir():
        return
    others = [path.name for path in workdir.parent.glob("*/") if not path.name.startswith(".")]
    close = difflib.get_close_matches(workdir.name, others, 1)
    hint = (
        f"; did you mean {workdir.with_name(close[0])}?" if close else "; `evernear run` and `evernear demo` create it."
    )
    raise SettingsError(f"The working directory {workdir} does not exist{hint}")


def _old_and_new(rename: str) -> tuple[str, str]:
    names = [name.replace(r"\=", "=") for name in re.split(r"(?<!\\)=", rename, maxsplit=1)]
    if len(names) != 2 or not all(names):
        raise SettingsError(f"--rename '{rename}' is not OLD=NEW; a = in the old name is written \\=.")
    return names[0], names[1]


def assignments(overrides: list[str] | None, **options: object) -> list[str]:
    """All ``key=value`` assignments, those from ``--set`` before those from dedicated options."""
    return [*(overrides or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
