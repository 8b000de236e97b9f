"""Options and helpers that several commands share.

A command has the options of a function that builds something from them, and gets its result as the
first argument::

    @app.command()
    @options_of(local_settings)
    def stop(settings: Settings) -> None: ...
"""

import difflib
import re
import shlex
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Concatenate, TypeVar

import typer

from evernear.common.outputs import is_output
from evernear.errors import SettingsError, UserInterruptError
from evernear.settings import OneRun, Settings, load_layers, parse
from evernear.settings.layers import EMPTY_WORKDIR, Layers
from evernear.settings.sources import Tree, known_keys, presets

Built = TypeVar("Built")
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]


def _presets(incomplete: str) -> list[str]:
    return [name for name in presets() if name.startswith(incomplete)]


def _settings(incomplete: str) -> list[str]:
    return [f"{name}=" for name in known_keys(Settings) if name.startswith(incomplete)]


def releases(context: typer.Context, incomplete: str) -> list[str]:
    """The versions in the registry of the command line in progress that begin with
    ``incomplete``, newest first."""
    from evernear.common.store import open_store
    from evernear.release.registry import Registry

    words = {name: context.params.get(name) for name in ("config", "overrides", "workdir")}
    uri = context.params.get("store")
    with suppress(Exception):  # a shell would print an error into the line that is being typed
        registry = Registry(open_store(uri or local_settings(**words).store_uri))
        return [version for version in reversed([*registry.list()]) if version.startswith(incomplete)]
    return []


PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Built-in settings: best, default, fast, frozen, photos or quick.",
        autocompletion=_presets,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as train.epochs=3.", autocompletion=_settings),
]


def _directory(text: str) -> Path:
    """`Path` would make an empty name, of an unset variable, the current directory."""
    if not text:
        raise SettingsError(EMPTY_WORKDIR)
    return Path(text)


WorkdirOption = Annotated[
    Path | None,
    typer.Option(
        "--workdir",
        metavar="PATH",
        parser=_directory,
        help="Directory of runs, releases and logs, and of their settings, evernear.toml. [evernear-work]",
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="digits | mnist | mnist:DIR | folder:DIR | s3://bucket/prefix | table:FILE | webdataset:DIR |"
        " huggingface:DIR",
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URI",
        help="Use this registry and leave servers alone: file:///path or s3://bucket/prefix. [the settings' store]",
    ),
]
ReleaseOption = Annotated[
    str | None,
    typer.Option(
        "--release", metavar="VERSION", help="A release of the registry. [the champion]", autocompletion=releases
    ),
]
OutOption = Annotated[str, typer.Option("--out", metavar="DIR|s3://...", help="Where the files go.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def group(name: str, help: str) -> typer.Typer:
    """An app whose commands keep their names, even if it has only one."""
    app = typer.Typer(name=name, help=help, rich_markup_mode="markdown", no_args_is_help=True)
    app.callback()(lambda: None)
    return app


def options_of(build: Callable[..., Built]) -> Callable[[Callable[Concatenate[Built, ...], None]], Callable[..., None]]:
    """Add ``build``'s parameters to a command's options, and pass it the result first."""

    def decorate(command: Callable[Concatenate[Built, ...], None]) -> Callable[..., None]:
        (_, *own), added = signature(command).parameters.values(), signature(build).parameters

        @wraps(command)
        def run(*first: Any, **options: Any) -> None:
            built = build(**{name: options.pop(name) for name in added if name in options})
            command(built, *first, **options)

        parameters = [*own, *added.values()]
        vars(run)["__signature__"] = Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def local_settings(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> Settings:
    return run_settings(config=config, overrides=overrides, workdir=workdir)


@wraps(local_settings)
def settings_anywhere(*args: Any, **options: Any) -> Settings:
    """Like `local_settings`, for a command that also works without a working directory."""
    layers = layers_anywhere(None, None, *args, **options)
    return layers.settings()


def registry_settings(
    store: StoreOption = None, config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None
) -> Settings:
    """``--store`` selects the ``registry`` target: the local server may use another store."""
    return local_settings(config, [*(overrides or []), *_registry_only(store)], workdir)


@wraps(registry_settings)
def registry_settings_anywhere(
    store: str | None = None,
    config: Path | None = None,
    overrides: list[str] | None = None,
    workdir: Path | None = None,
) -> Settings:
    """Like `registry_settings`, for a command that also works without a working directory."""
    return settings_anywhere(config, [*(overrides or []), *_registry_only(store)], workdir)


def _registry_only(store: str | None) -> list[str]:
    return [f"store={store}", "target=registry"] if store else []


def new_run_layers(
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> Layers[Settings]:
    """The settings by source, for a command that may create the working directory."""
    words = assignments(overrides, workdir=workdir, **{"data.source": source})
    return load_layers(preset=preset, config=config, overrides=words)


@wraps(new_run_layers)
def layers_anywhere(*args: Any, **options: Any) -> Layers[Settings]:
    """Like `new_run_layers`, but refuse a missing directory that the command line names: a mistyped
    name would be an empty working directory."""
    layers = new_run_layers(*args, **options)
    if "workdir" in layers.assigned:
        require_workdir(layers.workdir)
    return layers


@wraps(new_run_layers)
def run_layers(*args: Any, **options: Any) -> Layers[Settings]:
    """Like `layers_anywhere`, for a command that reads the working directory, unless the store is
    elsewhere."""
    layers = layers_anywhere(*args, **options)
    if not layers.settings().store:
        require_workdir(layers.workdir)
    return layers


def require_workdir(workdir: Path) -> None:
    if workdir.is_dir():
        return
    beside = [path for path in sorted(workdir.parent.glob("*/")) if not path.name.startswith(".")]
    if close := difflib.get_close_matches(workdir.name, [path.name for path in beside], 1):
        hint = f"did you mean {workdir.with_name(close[0])}?"
    elif others := [str(path) for path in beside if is_output(str(path)) and (path / "runs").is_dir()]:
        hint = f"name it with --workdir; this directory has {', '.join(others)}."
    else:
        hint = "name it with --workdir, or create it with `evernear run`."
    raise SettingsError(f"The working directory {workdir} does not exist; {hint}")


@wraps(new_run_layers)
def run_settings(*args: Any, **options: Any) -> Settings:
    return run_layers(*args, **options).settings()


def one_run(
    reread: Annotated[
        bool, typer.Option("--reread", help="Read all files again, even if their sizes and times have not changed.")
    ] = False,
    moved_from: Annotated[
        str | None,
        typer.Option("--moved-from", metavar="SOURCE", help="The earlier --source, if its images have moved."),
    ] = None,
    retire: Annotated[
        list[str] | None,
        typer.Option(
            "--retire", metavar="CLASS", help="A class of the champion that was removed on purpose; repeatable."
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="OLD=NEW",
            help="A class of the champion that has a new name; repeatable. A = in the old name is written `\\=`.",
        ),
    ] = None,
) -> Tree:
    """The fields of `OneRun` that are true of this run alone."""
    pairs = [*map(_old_and_new, rename or [])]
    renamed = dict(pairs)
    if contrary := [old for old, new in pairs if renamed[old] != new]:
        raise SettingsError(f"--rename gives {contrary[0]!r} two new names; give it one.")
    classes = {"retired": retire or [], "renamed": renamed}
    tree = {"reread": reread, "moved_from": moved_from or "", "classes": classes}
    return parse(OneRun, tree).model_dump(mode="json", exclude_defaults=True)


def one_run_words(once: Tree) -> list[str]:
    """The options that `one_run` turns into ``once``."""
    classes = once.get("classes", {})
    words = ["--reread"] if once.get("reread") else []
    words += ["--moved-from", once["moved_from"]] if once.get("moved_from") else []
    words += [word for name in classes.get("retired", ()) for word in ("--retire", name)]
    renamed = ["=".join(name.replace("=", r"\=") for name in pair) for pair in classes.get("renamed", {}).items()]
    return words + [word for pair in renamed for word in ("--rename", pair)]


def _old_and_new(rename: str) -> tuple[str, str]:
    names = [name.replace(r"\=", "=") for name in re.split(r"(?<!\\)=", rename, maxsplit=1)]
    if len(names) != 2 or not all(names):
        raise SettingsError(f"--rename '{rename}' is not OLD=NEW; a = in the old name is written \\=.")
    return names[0], names[1]


def assignments(overrides: list[str] | None, **options: object) -> list[str]:
    """All ``key=value`` assignments, those from ``--set`` before those from dedicated options."""
    return [*(overrides or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]


def output_uri(out: str) -> str:
    """The store URI for ``--out``, which is a directory or ``s3://bucket/prefix``."""
    if not out:
        raise SettingsError("--out is empty; name a directory or s3://bucket/prefix.")
    if out.startswith(("s3://", "file://")):
        return out
    if "://" in out:
        raise SettingsError(f"--out {out} is neither a directory nor s3://bucket/prefix.")
    return Path(out).expanduser().resolve().as_uri()


@contextmanager
def message_on_interrupt(message: str) -> Generator[None]:
    """Convert Ctrl-C in the body to a `UserInterruptError` with ``message``."""
    try:
        yield
    except KeyboardInterrupt:
        raise UserInterruptError(message) from None


def command_again(context: typer.Context, *added: str) -> str:
    """The command in progress as its user typed it, with the option ``added``."""
    words = ["evernear", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or parameter.opts[0] in added:
            continue
        value = context.params[name]
        values = value if isinstance(value, list | tuple) else [value]
        option = parameter.opts[:1] if parameter.param_type_name == "option" else []
        words += option if value is True else [word for each in values for word in (*option, str(each))]
    return shlex.join([*words, *added])


@contextmanager
def stop_on_signals(stop: threading.Event, message: str) -> Generator[None]:
    """Set ``stop`` on SIGTERM and Ctrl-C, so that the body can finish its current work. Ctrl-C then
    raises `UserInterruptError` with ``message``. SIGTERM raises nothing, so the exit code is 0."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    yield
    if signal.SIGINT in received:
        raise UserInterruptError(message)
