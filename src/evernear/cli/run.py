"""``evernear run``, ``evernear reindex`` and ``evernear demo``."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import typer
from rich.console import Console
from rich.text import Text

from evernear.cli.options import JsonOption, run_settings, with_options
from evernear.output import print_json, print_line, printable
from evernear.settings import Settings


@with_options(settings=run_settings)
def run(settings: Settings, as_json: JsonOption = False) -> None:
    """Run the continuous-training pipeline on this machine, each step a process of its own."""
    _run_and_show(settings, "continuous_training", as_json)


@with_options(settings=run_settings)
def reindex(settings: Settings, as_json: JsonOption = False) -> None:
    """Take new gallery images, a whole new class even, into the index of the network that serves: no training."""
    _run_and_show(settings, "reindex", as_json)


@with_options(settings=run_settings)
def demo(
    settings: Settings,
    keep: Annotated[bool, typer.Option("--keep", help="Leave TorchServe up.")] = False,
) -> None:
    """The whole journey on one laptop: run, deploy, recognise images that were never trained on."""
    from evernear.demo import demo

    console = Console()
    with _Progress(console) as show:
        demo(settings, console, show, keep=keep)


class _Progress:
    """Shows a run's events: the step at work, and a line for each step that ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting the pipeline")

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()  # however the run ended: the cursor is hidden until then

    def __call__(self, event: Any) -> None:
        match event.kind:
            case "started" | "progress":
                self._status.update(Text.assemble((event.step, "bold"), " ", printable(event.message)))
                if not self._console.is_terminal and event.kind == "progress":
                    self._console.print(Text(f"  .. {event.step:<10} {printable(event.message)}"))
            case _:
                mark, colour = ("ok", "green") if event.kind == "finished" else ("!!", "red")
                rest = f" {event.step:<10} {event.own_work_s:6.1f} s  {printable(event.message)}"
                # At once: the step at work, shown below, is drawn anew after each print, over a line that goes on.
                self._console.print(Text.assemble("  ", (mark, colour), rest), soft_wrap=True)
        if event.step == "notify" and event.kind == "finished":
            self._status.stop()


def _run_and_show(settings: Settings, pipeline: Literal["continuous_training", "reindex"], as_json: bool) -> None:
    from evernear.local_run import run

    with _Progress(Console(stderr=True)) as show:
        result = run(settings, show, pipeline)
    if as_json:
        print_json(result)
    else:
        _show_result(result)


def _show_result(result: Any) -> None:
    print_line(
        f"{result.state}: " + (f"release {result.release} serves" if result.promoted else "nothing was deployed")
    )
    for reason in result.reasons:
        print_line(f"  - {reason}")
    print_line(f"artifacts and log: {Path(result.paths['log']).parent}")
