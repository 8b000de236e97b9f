"""``evernear watch``: see what is new and what drifted, and propose or start a training or a new index."""

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.interrupts import stop_on_signals
from evernear.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    SourceOption,
    WorkdirOption,
    local_settings,
    run_settings,
)
from evernear.errors import PipelineServerError
from evernear.output import log_to_stderr, print_json, print_line
from evernear.settings import Settings

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns
    from evernear.triggers.watch.switch import LastLook, Switch

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Look for new images and for drift; propose or start what is to be done about it.",
)


@app.command()
def run(
    source: SourceOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Watch until SIGTERM or Ctrl-C: on the schedule, and soon after a bucket at MinIO tells of a change."""
    from evernear.store import open_store
    from evernear.triggers.watch.service import Service
    from evernear.triggers.watch.watcher import Watcher

    settings = run_settings(source, None, config, overrides, workdir)
    log_to_stderr(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="evernear-watch-") as cache:
        watcher = Watcher(settings, open_store(settings.store_uri), _runs(settings), Path(cache))
        service = Service(watcher, settings)
        remains = (
            "Interrupted after the last look. No process is left; `evernear watch run` continues with the next one."
        )
        with stop_on_signals(service.stopping, remains):
            service.run()


@app.command()
def once(
    act: Annotated[bool, typer.Option("--act", help="Propose or start what was decided, as `run` does.")] = False,
    source: SourceOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look once and tell what would be done, with the numbers; nothing is changed."""
    from evernear.store import open_store
    from evernear.triggers.watch.watcher import Watcher

    settings = run_settings(source, None, config, overrides, workdir)
    with tempfile.TemporaryDirectory(prefix="evernear-watch-") as cache:
        watcher = Watcher(settings, open_store(settings.store_uri), _runs(settings), Path(cache))
        _show(watcher.look(act=act), as_json)


@app.command()
def status(
    config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None, as_json: JsonOption = False
) -> None:
    """Tell whether the watcher is switched on, and what its last look came to."""
    watching = _switch(config, overrides, workdir).read()
    if as_json:
        print_json(watching)
        return
    by = f" by {watching.by}" if watching.by else ""
    print_line(f"{'on' if watching.on else 'off'} since {watching.since:%Y-%m-%d %H:%M:%S} UTC{by}")
    if watching.last is None:
        print_line("It never looked; `evernear watch run` is the process that does.")
    else:
        print_line(f"last look {watching.last.at:%Y-%m-%d %H:%M:%S} UTC")
        _show(watching.last, as_json)


@app.command()
def start(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """Switch the schedule on, for the watcher of this store wherever it runs."""
    from evernear.release.registry import whoami

    _switch(config, overrides, workdir).turn(True, whoami())
    print_line("The watcher is on.")


@app.command()
def stop(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """Switch the schedule off; the process stays and does nothing until `start`."""
    from evernear.release.registry import whoami

    _switch(config, overrides, workdir).turn(False, whoami())
    print_line("The watcher is off.")


@app.command()
def ship(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """Beside a server: bring its logged queries to the store once a minute, until SIGTERM or Ctrl-C."""
    from evernear.serving.configuration import logged_queries
    from evernear.serving.endpoints import home_of
    from evernear.serving.query_log import ship_until
    from evernear.store import open_store

    settings = local_settings(config, overrides, workdir)
    log_to_stderr(logging.WARNING)
    ended = threading.Event()
    remains = "Interrupted. Queries that are not in the store yet stay here; `evernear watch ship` continues with them."
    with stop_on_signals(ended, remains):
        ship_until(ended, logged_queries(home_of(settings.workdir)), open_store(settings.store_uri))


def _switch(config: Path | None, overrides: list[str] | None, workdir: Path | None) -> "Switch":
    from evernear.store import open_store
    from evernear.triggers.watch.switch import Switch

    return Switch(open_store(local_settings(config, overrides, workdir).store_uri))


def _runs(settings: Settings) -> "KfpRuns | None":
    """The pipeline server that the settings or the cluster that we are in name; None where there is none."""
    if not settings.pipeline.endpoint and "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    try:
        from evernear.kubeflow.client import KfpRuns
    except ModuleNotFoundError as error:
        hint = "run `pip install evernear[triggers,pipeline]`"
        raise PipelineServerError(f"{error.name} is not installed; {hint}.") from None

    return KfpRuns(settings.pipeline)


def _show(look: "LastLook", as_json: bool) -> None:
    if as_json:
        print_json(look)
        return
    print_line(look.action)
    for reason in look.reasons:
        print_line(f"  - {reason}")
    for fault in look.faults:
        print_line(f"  ! {fault}")
    for name, value in look.figures.items():
        print_line(f"    {name.replace('_', ' '):<24} {value:,.4g}")
    if look.proposal:
        print_line(f"proposal {look.proposal}")
