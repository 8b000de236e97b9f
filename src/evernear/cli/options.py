"""Options that several commands share.

A command declares the values that it needs, and `with_options` adds the options that they are built from:

    @app.command()
    @with_options(settings=local_settings)  # adds --config, --set and --workdir
    def stop(settings: Settings) -> None: ...
"""

import functools
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from evernear.errors import SettingsError
from evernear.settings import Settings, load, load_layers
from evernear.settings.layers import Layers

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
PresetOption = Annotated[str | None, typer.Option("--preset", help="Built-in settings: best, fast, frozen or quick.")]
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
    typer.Option("--source", help="digits | mnist | mnist:DIR | folder:DIR | s3://bucket/prefix"),
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def local_settings(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> Settings:
    """Settings from files, environment and options."""
    return load(config=config, overrides=assignments(overrides, workdir=workdir))


def run_settings(
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> Settings:
    """Settings of a run, with options for its source and preset, and for classes removed or renamed on purpose."""
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
    """As `run_settings`, by source."""
    classes = {
        "classes.retired": json.dumps(retire) if retire else None,
        "classes.renamed": json.dumps(dict(map(_old_and_new, rename))) if rename else None,
    }
    options = assignments(overrides, workdir=workdir, **{"data.source": source}, **classes)
    return load_layers(preset=preset, config=config, overrides=options)


def _old_and_new(rename: str) -> tuple[str, str]:
    names = [name.replace(r"\=", "=") for name in re.split(r"(?<!\\)=", rename, maxsplit=1)]
    if len(names) != 2 or not all(names):
        raise SettingsError(f"--rename '{rename}' is not OLD=NEW; a = in the old name is written \\=.")
    return names[0], names[1]


def with_options(**providers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of each provider to a command, and pass the command the provider's result by name."""
    signatures = {name: inspect.signature(provider) for name, provider in providers.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            results = {
                name: provider(**{o: values.pop(o) for o in signatures[name].parameters if o in values})
                for name, provider in providers.items()
            }
            command(**values, **results)

        own = [p for p in inspect.signature(command).parameters.values() if p.name not in providers]
        shared = [option for signature in signatures.values() for option in signature.parameters.values()]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *shared)]
        del run.__wrapped__  # typer would follow it and read the signature of the original command
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def assignments(overrides: list[str] | None, **options: object) -> list[str]:
    """All assignments as ``key=value``: those of ``--set``, then those of dedicated options."""
    return [*(overrides or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
