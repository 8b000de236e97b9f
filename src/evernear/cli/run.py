"""``evernear run``, ``reindex``, ``demo`` and ``report``."""

import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from rich.console import Console
from rich.text import Text

from evernear.cli.options import (
    JsonOption,
    local_settings,
    new_run_layers,
    one_run,
    one_run_words,
    options_of,
    run_layers,
)
from evernear.common.masking import mask
from evernear.common.output import print_json, print_line, print_table, printable
from evernear.errors import SettingsError
from evernear.settings import Settings
from evernear.settings.layers import Layers
from evernear.settings.sources import Tree

if TYPE_CHECKING:
    from evernear.common.progress import Event, RunCommand
    from evernear.common.store import Store
    from evernear.evaluation.headline import AnswerCounts
    from evernear.kubeflow.local_run import RunResult


RememberOption = Annotated[
    bool,
    typer.Option("--remember", help="Keep the settings of this command in WORKDIR/evernear.toml for later ones."),
]
MinutesOption = Annotated[
    float | None,
    typer.Option("--minutes", help="Time for training and the open-set probe."),
]
SHOWN_RUNS = 20
RunsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN [RUN]]", help="Run IDs or releases. [the last run in --workdir]")
]


@options_of(new_run_layers)
@options_of(one_run)
def run(
    once: Tree,
    layers: Layers[Settings],
    minutes: MinutesOption = None,
    remember: RememberOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the continuous-training pipeline on this machine, each step in its own process."""
    _run_and_show(_with_minutes(layers, minutes), "continuous_training", once, remember, as_json)


@options_of(run_layers)
@options_of(one_run)
def reindex(
    once: Tree,
    layers: Layers[Settings],
    remember: RememberOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add new gallery images, even of a new class, to the index of the champion's network, without
    training."""
    _run_and_show(layers, "reindex", once, remember, as_json)


@options_of(new_run_layers)
def demo(
    layers: Layers[Settings],
    keep: Annotated[bool, typer.Option("--keep", help="Leave TorchServe running.")] = False,
    without: Annotated[
        str | None,
        typer.Option(
            "--without",
            metavar="CLASS",
            help="Write the digits to folders in WORKDIR and leave this class out, to name it as a new class later.",
        ),
    ] = None,
    minutes: MinutesOption = None,
    remember: RememberOption = False,
) -> None:
    """Run the pipeline, deploy the release locally, and recognize images that were not used for
    training."""
    from evernear.cli.demo import run_demo
    from evernear.data.sources.digits import lay_out_digits

    layers = _with_minutes(layers, minutes)
    unseen: Path | None = None
    if without is not None:
        if "source" in layers.assigned.get("data", {}):
            raise SettingsError("--without is for the digits and cannot be combined with --source.")
        known, unseen = lay_out_digits(layers.settings().workdir.resolve(), without)
        # `evernear console` needs the images.
        layers = layers.with_defaults([f"data.source=folder:{known}", "serving.query_log=images"])
        _require_own_directory(layers.settings())
    console = Console(force_terminal=sys.stdout.isatty())
    layers = _with_free_ports(layers, console)
    settings = layers.settings()
    words = ["--keep"] if keep else []
    command = _command(layers, remember, "demo", *words, *(["--without", without] if without is not None else []))
    _print_changes(layers, remember)
    with _Progress(console) as show:
        run_demo(settings, console, _and_keep(show, layers, remember), keep=keep, unseen=unseen, command=command)


def _with_minutes(layers: Layers[Settings], minutes: float | None) -> Layers[Settings]:
    return layers if minutes is None else layers.with_defaults([f"train.minutes={minutes}"])


def _with_free_ports(layers: Layers[Settings], console: Console) -> Layers[Settings]:
    """With the ports of the server that runs, or else other ports than those in use. A port that
    the user chose stays."""
    from evernear.serving.endpoints import Endpoints, home_of, read_state
    from evernear.serving.torchserve import free_ports, is_running

    settings, chosen = layers.settings(), layers.named("serving")
    home = home_of(settings.workdir)
    if settings.target != "local":
        return layers
    if is_running(home) and (state := read_state(home)):
        ports = state.endpoints.model_dump(exclude={"host"})
    else:
        ports = free_ports(Endpoints.of(settings.serving))
        for name in (name for name in ports if name not in chosen):
            taken = getattr(settings.serving, name)
            line = f"Port {taken} is in use; serving.{name} is {ports[name]} in this run."
            console.print(line, soft_wrap=True)
    return layers.with_defaults(f"serving.{name}={port}" for name, port in ports.items() if name not in chosen)


def _require_own_directory(settings: Settings) -> None:
    """Refuse a working directory with another dataset's release, the demo's competitor."""
    from evernear.common.store.current import current_store
    from evernear.data.list import dataset_name
    from evernear.data.sources import open_source
    from evernear.release.registry import Registry

    registry = Registry(current_store(settings.store_uri))
    if (champion := registry.champion()) is None:
        return
    other = registry.get(champion.version, include_pruned=True).manifest.dataset_name
    own = dataset_name(settings.data, open_source(settings.data.source))
    if other != own:
        raise SettingsError(
            f"{settings.store_uri} has a release of the dataset {other}, not of {own}; add --workdir with a new "
            "directory."
        )


class _Progress:
    """Displays a run's events: a line for each completed step, and a status line. The command ends
    with the error of the first step that failed, so these lines do not repeat it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._error = ""
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
            case "note":
                self.note(event.message)
            case _:
                mark, color = ("ok", "green") if event.kind == "finished" else ("!!", "red")
                rest = f" {event.step:<10} {event.duration_s:6.1f} s  {printable(self._once(event))}"
                # One call for each line, because rich redraws the status line after every call.
                self._console.print(Text.assemble("  ", (mark, color), rest), soft_wrap=True)
        if event.step == "notify" and event.kind == "finished":
            self._status.stop()

    def _once(self, event: Any) -> str:
        if event.kind == "failed" and self._error in ("", event.message):
            self._error = event.message
            return "failed"
        end = "." if self._error.endswith(".") else ""
        return event.message.replace(f": {self._error}", end) if self._error else event.message

    def note(self, line: str) -> None:
        self._console.print(Text(f"     {printable(line)}"), soft_wrap=True)


def _run_and_show(
    layers: Layers[Settings],
    pipeline: Literal["continuous_training", "reindex"],
    once: Tree,
    remember: bool,
    as_json: bool,
) -> None:
    from evernear.kubeflow.local_run import run_pipeline

    if (moved_from := once.get("moved_from")) and not layers.settings().data.dataset:
        from evernear.data.sources import name_of

        layers = layers.with_defaults([f"data.dataset={name_of(moved_from)}"])  # later runs continue it as well
    settings = layers.settings()
    name = "run" if pipeline == "continuous_training" else pipeline
    command = _command(layers, remember, name, *one_run_words(once))
    _print_changes(layers, remember)
    # If FORCE_COLOR is set, as in notebooks and CI, rich would also animate output to a pipe.
    with _Progress(Console(stderr=True, force_terminal=sys.stderr.isatty())) as show:
        result = run_pipeline(settings, _and_keep(show, layers, remember), pipeline, command, once)
    if as_json:
        print_json(result)
    else:
        _print_result(result)


def _command(layers: Layers[Settings], remember: bool, *words: str) -> "RunCommand":
    """This process's command line, and one that repeats the run once the settings are saved."""
    from evernear.common.progress import RunCommand

    later = layers.later_words(keep=remember or layers.remembered is None)
    return RunCommand(typed=tuple(map(mask, sys.argv[1:])), later=(*words, *later))


def _print_changes(layers: Layers[Settings], remember: bool) -> None:
    if layers.remembered is None or not (changes := list(layers.changes())):
        return
    print_line(f"{layers.file} has other settings; this run uses:", sys.stderr)
    for line in changes:
        print_line(f"  {line}", sys.stderr)
    if not remember:
        print_line("--remember keeps them for later commands.", sys.stderr)


def _and_keep(show: _Progress, layers: Layers[Settings], remember: bool) -> "Callable[[Event], None]":
    """Show a run's events. Save its settings once the images pass validation. A mistyped folder is
    therefore not saved, and a run that fails later can be repeated without options."""

    def show_and_keep(event: "Event") -> None:
        show(event)
        if event.step == "validate" and event.kind == "finished":
            for line in layers.keep(replace=remember):
                show.note(line)

    return show_and_keep


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


@options_of(local_settings)
def report(
    settings: Settings,
    runs: RunsArgument = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Print the path of a run's page (by default, the last run in --workdir), or compare two
    runs."""
    from evernear.common.store.current import current_store

    store = current_store(settings.store_uri)
    page = _write_page(store, settings.workdir, runs) if runs else _last(settings.workdir)
    print_line(str(page))
    if open_:
        webbrowser.open(page.as_uri())


def _last(workdir: Path) -> Path:
    from evernear.common.progress import run_directories
    from evernear.kubeflow.local_run import PAGE_FILE

    runs = run_directories(workdir) if (workdir / "runs").is_dir() else []
    pages = [page for run in runs if (page := run / PAGE_FILE).exists()]
    if not pages:
        raise SettingsError(f"{workdir} has no run with a page; name a run or a release, or choose another --workdir.")
    return pages[-1]


def _write_page(store: "Store", workdir: Path, names: list[str]) -> Path:
    """Write the page of one or two runs to a file below the working directory."""
    from evernear.common.disk import write_atomically
    from evernear.reporting.page import compare_page, run_page
    from evernear.reporting.run_report import find_run

    if len(names) > 2:
        raise SettingsError("At most two runs can be compared.")
    records = [find_run(store, name) for name in names]
    html = run_page(records[0]) if len(records) == 1 else compare_page(*records)
    path = workdir.resolve() / "reports" / f"{'-and-'.join(record.run for record in records)}.html"
    write_atomically(path, html)
    return path


@options_of(local_settings)
def runs(settings: Settings, as_json: JsonOption = False) -> None:
    """List the newest runs, promotions and rollbacks: when and how each ended, how many test images
    it named right, and which release is live."""
    from evernear.common.store.current import current_store
    from evernear.reporting.runs import RunList

    store = current_store(settings.store_uri)
    listed = RunList(store).page(0, SHOWN_RUNS)
    for fault in listed.faults:
        print_line(fault, sys.stderr)
    if as_json:
        print_json(listed.runs)
        return
    rows = [
        (
            f"{each.begun:%Y-%m-%d %H:%M}",
            each.run or "-",
            each.kind,
            f"{each.state}, live" if each.is_live else each.state,
            *_counts(each.answers),
            each.duration if each.run else "-",
        )
        for each in listed.runs
    ]
    if not rows:
        print_line(f"No run is in {store.uri} yet.", sys.stderr)
    print_table(("begun", "run", "kind", "state", "right", "wrong", "unknown", "images", "duration"), rows)
    for each in listed.runs[:1]:
        if each.state != "promoted" or not each.run:
            print_line(f"The last {'run' if each.run else 'change'}: {each.sentence}")
    if listed.total > len(listed.runs):
        print_line(f"{listed.total - len(listed.runs):,} earlier runs are on the page Runs of `evernear console`.")


def _counts(answers: "AnswerCounts | None") -> tuple[str, ...]:
    if answers is None:
        return ("-",) * 4
    counts = answers.named_right, answers.named_wrong, answers.called_unknown, answers.images
    return tuple(f"{count:,}" for count in counts)
