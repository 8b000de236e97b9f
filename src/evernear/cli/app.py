"""The ``evernear`` command. Commands import heavy libraries themselves, so others start quickly."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from evernear import __version__
from evernear.cli import cluster, data, doctor, inspect, pipeline, predict, releases, run, server, triggers
from evernear.common import plugins
from evernear.common.extras import missing_library
from evernear.common.masking import mask_streams
from evernear.common.output import print_line, printable
from evernear.errors import EvernearError, StoreError, UserInterruptError, disk_full_message

_MEANT = {
    "help": "--help",
    "version": "--version",
    "train": "run",
    "rollback": "registry rollback",
    "promote": "registry promote",
    "releases": "registry list",
    "ls": "registry list",
    "review": "console",
    "label": "console",
    "ui": "console",
    "start": "serve",
    "upload": "pipeline upload",
    "export": "dataset export",
    "check": "store check",
    "prune": "store prune",
}
"""Words that users type, and the commands that they mean."""


class _Commands(TyperGroup):
    """Names the command that a user means by another word."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (meant := _MEANT.get(args[0])):
            ctx.fail(f"No such command {args[0]!r}. Did you mean `evernear {meant}`?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own markup would drop text in [brackets]
    help="Continuously train and deploy an image recognizer: labeled images in, a gated release on TorchServe out.",
)
PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Every day": (run.run, run.reindex, run.demo, run.report, run.runs, triggers.console, server.status, doctor.doctor),
    "Serving": (
        predict.predict,
        predict.batch_predict,
        server.serve,
        server.stop,
        server.token,
        server.prep,
        inspect.app,
    ),
    "Releases": (releases.app,),
    "Data": (data.labels_app, data.dataset_app, data.store_app, data.forget),
    "Cluster": (pipeline.app, triggers.watch_app, triggers.slack_app, cluster.deployment_app),
}
for panel, commands in PANELS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(command)
app.add_typer(cluster.pod_app, hidden=True)  # for the containers of a pod, which call it
app.command(hidden=True)(server.ready)
for added in plugins.commands():
    app.command(added.name, rich_help_panel=added.panel or None, hidden=not added.panel)(added.run)


def _print_version(requested: bool) -> None:
    if requested:
        print_line(f"evernear {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction] - typer calls it
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. Report expected errors in one sentence, without a traceback."""
    mask_streams()
    try:
        app()
    except SystemExit as exited:
        if exited.code == UserInterruptError.exit_code:  # typer converts Ctrl-C to this
            sentence = "Interrupted. Nothing is half-written; run the command again to continue."
            _fail(sentence, UserInterruptError.exit_code)
        raise
    except EvernearError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_library(error)
        if missing is None:
            raise
        _fail(str(missing), missing.exit_code)
    except OSError as error:
        disk_full = disk_full_message(error, error.filename or Path.cwd())
        if disk_full is None and error.filename is None:
            raise
        _fail(disk_full or f"{error.filename} cannot be read or written: {error.strerror}.", StoreError.exit_code)


def _fail(sentence: str, exit_code: int) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("evernear:", "bold red"), " ", printable(sentence)), soft_wrap=True)
    sys.exit(exit_code)
