"""The ``evernear`` command. Heavy libraries are imported by the commands that need them, never here."""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from evernear.cli import inspect, journey, predict, prep, releases, server
from evernear.errors import EvernearError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keeps an image recogniser fresh: labelled images in, a gated release served by TorchServe.",
)
for command in (
    journey.run,
    journey.demo,
    predict.predict,
    prep.prep,
    server.status,
    server.serve,
    server.ready,
    server.stop,
    server.token,
):
    app.command()(command)
app.add_typer(releases.app, name="registry")
app.add_typer(inspect.app, name="inspect")


def main() -> None:
    """Run the command line; an `EvernearError` becomes one sentence and its exit code."""
    try:
        app()
    except EvernearError as error:
        Console(stderr=True).print(f"[bold red]evernear:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
