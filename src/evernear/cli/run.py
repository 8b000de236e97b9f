"""``evernear run``, ``evernear reindex`` and ``evernear demo``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from rich.console import Console
from rich.text import Text

from evernear.cli.options import JsonOption, run_settings, with_options
from evernear.output import print_json, print_line, printable
from evernear.settings import Settings

if TYPE_CHECKING:
    from evernear.local_run import RunResult


RereadOption = Annotated[
    bool, typer.Option("--reread", help="Read all files again, even if their sizes and times have not changed.")
]


@with_options(settings=run_settings)
def run(settings: Settings, reread: RereadOption = False, as_json: JsonOption = False) -> None:
    """Run the continuous-training pipeline on this machine, each step in its own process."""
    _run_and_show(_rereading(settings, reread), "continuous_training", as_json)


@with_options(settings=run_settings)
def reindex(settings: Settings, reread: RereadOption = False, as_json: JsonOption = False) -> None:
    """Add new gallery images, even of a new class, to the index of the champion's network, without training."""
    _run_and_show(_rereading(settings, reread), "reindex", as_json)


@with_options(settings=run_settings)
def demo(
    settings: Settings,
    keep: Annotated[bool, typer.Option("--keep", help="Leave TorchServe running.")] = False,
) -> None:
    """Run the pipeline, deploy the release locally, and recognize images that it was not trained on."""
    from evernear.demo import demo as run_demo

    console = Console(force_terminal=sys.stdout.isatty())
    with _Progress(console) as show:
        run_demo(settings, console, show, keep=keep)


class _Progress:
    """Displays the events of a run: a status line for the current step and a line for each completed step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting the pipeline")

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()  # also after an error, because the cursor is hidden until then

    def __call__(self, event: Any) -> None:
        match event.kind:
            case "started" | "progress":
                self._status.update(Text.assemble((event.step, "bold"), " ", printable(event.message)))
                if not self._console.is_terminal and event.kind == "progress":
                    self._console.print(Text(f"  .. {event.step:<10} {printable(event.message)}"))
            case _:
                mark, color = ("ok", "green") if event.kind == "finished" else ("!!", "red")
                rest = f" {event.step:<10} {event.duration_s:6.1f} s  {printable(event.message)}"
                # One print call for the line, because rich redraws the status line after each call.
                self._console.print(Text.assemble("  ", (mark, color), rest), soft_wrap=True)
        if event.step == "notify" and event.kind == "finished":
            self._status.stop()


def _rereading(settings: Settings, reread: bool) -> Settings:
    if not reread:
        return settings
    return settings.model_copy(update={"data": settings.data.model_copy(update={"reread": True})})


def _run_and_show(settings: Settings, pipeline: Literal["continuous_training", "reindex"], as_json: bool) -> None:
    from evernear.local_run import run

    # rich would also animate a pipe if FORCE_COLOR is set, as in notebooks and CI.
    with _Progress(Console(stderr=True, force_terminal=sys.stderr.isatty())) as show:
        result = run(settings, show, pipeline, sys.argv[1:])
    if as_json:
        print_json(result)
    else:
        _print_result(result)


def _print_result(result: "RunResult") -> None:
    print_line(result.summary)
    for reason in result.reasons:
        print_line(f"  - {reason}")
    print_line(f"artifacts and log: {Path(result.paths['log']).parent}")
    if result.next_steps:
        print_line("Next:")
    for step in result.next_steps:
        print_line(f"  - {step.purpose}: {step.command}")
    print_line(f"run page: {result.page}")
