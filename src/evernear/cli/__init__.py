"""The ``evernear`` command. Each command imports heavy libraries itself, so that the others start quickly."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from evernear import __version__
from evernear.cli import (
    cluster,
    doctor,
    forget,
    inspect,
    labels,
    pipeline,
    pod,
    predict,
    releases,
    report,
    run,
    server,
    slack,
    store,
    tune,
    watch,
)
from evernear.errors import EvernearError, StoreError, UserInterruptError, disk_full_message
from evernear.masking import mask_streams
from evernear.output import print_line, printable

OWN_PACKAGES = ("evernear",)
EXTRAS = "train,serve,prep,pipeline,triggers,tune"  # no command needs all of them

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own markup would drop text in [brackets]
    help="Continuously train and deploy an image recognizer: labeled images in, a gated release on TorchServe out.",
)
for command in (
    run.run,
    run.reindex,
    run.demo,
    report.report,
    tune.tune,
    tune.trial,
    predict.predict,
    server.prep,
    labels.review,
    forget.forget,
    server.status,
    server.serve,
    server.ready,
    server.stop,
    server.token,
    doctor.doctor,
):
    app.command()(command)
app.add_typer(releases.app, name="registry")
app.add_typer(store.app, name="store")
app.add_typer(inspect.app, name="inspect")
app.add_typer(labels.app, name="labels")
app.add_typer(cluster.app, name="deployment")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(pod.app, name="pod")
app.add_typer(watch.app, name="watch")
app.add_typer(slack.app, name="slack")


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
    """Run the command line; report expected errors in one sentence, without a traceback."""
    mask_streams()
    try:
        app()
    except SystemExit as exited:
        if exited.code == UserInterruptError.exit_code:  # typer turns Ctrl-C into this
            sentence = "Interrupted. Nothing is half-written; run the command again to continue."
            _fail(sentence, UserInterruptError.exit_code)
        raise
    except EvernearError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *OWN_PACKAGES):
            raise
        _fail(f"{package} is not installed; run `pip install 'evernear[{EXTRAS}]'`.", EvernearError.exit_code)
    except OSError as error:
        disk_full = disk_full_message(error, error.filename or Path.cwd())
        if disk_full is None and error.filename is None:
            raise
        _fail(disk_full or f"{error.filename} cannot be read or written: {error.strerror}.", StoreError.exit_code)


def _fail(sentence: str, exit_code: int) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("evernear:", "bold red"), " ", printable(sentence)), soft_wrap=True)
    sys.exit(exit_code)
