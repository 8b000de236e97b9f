"""The ``evernear`` command. Heavy libraries are imported by the commands that need them, never here."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from evernear import settings as knobs
from evernear.errors import EvernearError
from evernear.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keeps an image recogniser fresh: labelled images in, a gated release served by TorchServe.",
)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
PresetOption = Annotated[str | None, typer.Option("--preset", help="Settings that come with evernear: best, quick.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="e.g. train.epochs=3")]
WorkdirOption = Annotated[Path | None, typer.Option("--workdir", help="Runs, releases and logs [evernear-work].")]
SourceOption = Annotated[
    str | None,
    typer.Option("--source", help="digits | mnist | mnist:DIR | folder:DIR | s3://bucket/prefix"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]


@app.command()
def run(
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the continuous-training pipeline on this machine, each step a process of its own."""
    settings = _settings(preset, config, overrides, workdir, source)
    from evernear.local_run import run

    result = run(settings, _Progress(Console(stderr=True)))
    if as_json:
        print(result.model_dump_json())
    else:
        _show_result(result)


@app.command()
def demo(
    source: SourceOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave TorchServe up.")] = False,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """The whole journey on one laptop: run, deploy, recognise images that were never trained on."""
    settings = _settings(preset, config, overrides, workdir, source)
    from evernear.demo import demo

    console = Console()
    demo(settings, console, _Progress(console), keep=keep)


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(help="PNG or JPEG files.", metavar="IMAGE...")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the serving release what the images show."""
    from evernear.serving.client import Client

    client = Client.of(_settings(None, config, overrides, workdir))
    refused: EvernearError | None = None
    for image in images:
        try:
            answer: dict[str, Any] = client.predict_file(image)
        except EvernearError as error:
            if len(images) == 1:
                raise
            refused, answer = error, {"error": str(error)}
        print(json.dumps({"image": str(image), **answer}) if as_json else _spoken(image, answer))
    if refused is not None:
        sys.exit(refused.exit_code)


@app.command()
def status(
    config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None, as_json: JsonOption = False
) -> None:
    """Tell what serves: the server's state, its releases, the champion."""
    from evernear.deployment.local import status

    found = status(_settings(None, config, overrides, workdir))
    if as_json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{key.replace('_', ' '):<12} {'-' if shown in (None, '') else shown}")


@app.command()
def serve(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until the server ends; SIGTERM ends it (for containers).")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Start TorchServe with the champion, if it is not up already."""
    from evernear.deployment.local import follow, serve

    settings = _settings(None, config, overrides, workdir)
    version = serve(settings)
    place = f"http://{settings.serving.host}:{settings.serving.inference_port}"
    print(f"Release {version} answers at {place}/predictions/{settings.serving.model_name}; `evernear stop` ends it.")
    if foreground:
        follow(settings)


@app.command()
def stop(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """Stop the TorchServe of this working directory."""
    from evernear.deployment.local import stop

    print("TorchServe stopped." if stop(_settings(None, config, overrides, workdir)) else "TorchServe was not running.")


@app.command()
def token(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """Print the bearer token of the inference API, for curl and other clients."""
    from evernear.serving.connection import home_of, read_key

    print(read_key(home_of(_settings(None, config, overrides, workdir).workdir), "inference"))


def main() -> None:
    """Run the command line; an `EvernearError` becomes one sentence and its exit code."""
    try:
        app()
    except EvernearError as error:
        Console(stderr=True).print(f"[bold red]evernear:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


class _Progress:
    """Shows a run's events: the step at work, and a line for each step that ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting the pipeline")
        self._status.start()

    def __call__(self, event: Any) -> None:
        match event.kind:
            case "started" | "progress":
                self._status.update(f"[bold]{event.step}[/] {event.message}")
                if not self._console.is_terminal and event.kind == "progress":
                    self._console.print(f"  .. {event.step:<10} {event.message}", highlight=False, markup=False)
            case _:
                mark, colour = ("ok", "green") if event.kind == "finished" else ("!!", "red")
                line = f"  [{colour}]{mark}[/] {event.step:<10} {event.own_work_s:6.1f} s  "
                self._console.print(line, end="", highlight=False)
                self._console.print(event.message, highlight=False, markup=False, soft_wrap=True)
        if event.step == "notify" and event.kind == "finished":
            self._status.stop()


def _settings(
    preset: str | None,
    config: Path | None,
    overrides: list[str] | None,
    workdir: Path | None,
    source: str | None = None,
) -> Settings:
    flags = list(overrides or [])
    if workdir is not None:
        flags.append(f"workdir={json.dumps(str(workdir))}")
    if source is not None:
        flags.append(f"data.source={json.dumps(source)}")
    return knobs.load(preset=preset, config=config, overrides=flags)


def _show_result(result: Any) -> None:
    print(f"{result.state}: " + (f"release {result.release} serves" if result.promoted else "nothing was deployed"))
    for reason in result.reasons:
        print(f"  - {reason}")
    print(f"artifacts and log: {Path(result.paths['log']).parent}")


def _spoken(image: Path, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"{image}: {answer['error']}"
    near = ", ".join(f"{n['label']} at {n['dist']:.3f}" for n in answer["neighbors"])
    label = f"unknown (nearest {answer['pred']})" if answer["unknown"] else answer["pred"]
    return f"{image}: {label}, distance {answer['dist']:.3f}, neighbours {near}, release {answer['version']}"


if __name__ == "__main__":
    main()
