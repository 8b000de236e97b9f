"""``evernear watch``, ``slack`` and ``console``: the processes that start runs, or ask for them."""

import logging
import os
import secrets
import sys
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    SourceOption,
    WorkdirOption,
    message_on_interrupt,
    options_of,
    run_layers,
    run_settings,
    settings_anywhere,
    stop_on_signals,
)
from evernear.common.output import log_to_stderr, print_json, print_line, print_secret, quantity
from evernear.errors import SettingsError
from evernear.settings import Settings
from evernear.settings.layers import Layers, command_for

if TYPE_CHECKING:
    from evernear.common.store import Store
    from evernear.console.link import LinkFile
    from evernear.kubeflow.client import KfpRuns
    from evernear.triggers.watch.baker import Baker
    from evernear.triggers.watch.schedule_state import CheckReport, ScheduleStore

watch_app = typer.Typer(
    name="watch",
    rich_markup_mode="markdown",
    invoke_without_command=True,
    help="Check for new images and for drift, and propose or start training or a reindex.",
)
slack_app = typer.Typer(
    name="slack",
    rich_markup_mode="markdown",
    invoke_without_command=True,
    help="The Slack bot: start runs, follow them, report their verdicts.",
)
PortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one. [console.port]", show_default=False)
]
HostOption = Annotated[
    str | None, typer.Option(help="Address to bind; another than loopback needs TLS or a proxy. [console.host]")
]


def watch_settings(
    source: SourceOption = None, config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None
) -> Settings:
    return run_settings(source, None, config, overrides, workdir)


@watch_app.callback()
def watch(
    context: typer.Context,
    on: Annotated[
        bool | None, typer.Option("--on/--off", help="Resume or pause the watcher of this store, wherever it runs.")
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show whether the watcher is on, its last check and the last bake.")
    ] = False,
    ship: Annotated[
        bool,
        typer.Option(
            "--ship", help="Only ship the query logs of a server on this machine to the store, once a minute."
        ),
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="With --ship: ship what is there, and end.")] = False,
    as_json: JsonOption = False,
    source: SourceOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Run the watcher until SIGTERM or Ctrl-C. The watcher checks on the schedule."""
    if context.invoked_subcommand is not None:
        return
    if (on is not None) + status + ship > 1 or (now and not ship):
        raise SettingsError("Pass one of --on, --off, --status and --ship; --now belongs to --ship.")
    settings = watch_settings(source, config, overrides, workdir)
    if on is not None:
        _switch(settings, on)
    elif status:
        _show_status(settings, as_json)
    elif ship:
        _ship(settings, now)
    else:
        _run(settings)


def _run(settings: Settings) -> None:
    from evernear.common.store.current import current_store
    from evernear.triggers.watch.watcher import Watcher, WatchService

    log_to_stderr(logging.WARNING, settings.log_format)
    with tempfile.TemporaryDirectory(prefix="evernear-watch-") as cache:
        store, runs = current_store(settings.store_uri), _runs(settings)
        watcher = Watcher(settings, store, runs, Path(cache))
        service = WatchService(watcher, settings, baker_of(settings, store, runs))
        remains = "Interrupted after the last check. No process is left; `evernear watch` continues with the next one."
        with stop_on_signals(service.stopping, remains):
            service.run()


@watch_app.command()
@options_of(watch_settings)
def once(
    settings: Settings,
    act: Annotated[bool, typer.Option("--act", help="Propose or start the run, as `watch` does.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check once, and show the decision with its figures. Nothing is changed without
    --act."""
    from evernear.common.store.current import current_store
    from evernear.triggers.watch.watcher import Watcher

    with tempfile.TemporaryDirectory(prefix="evernear-watch-") as cache:
        watcher = Watcher(settings, current_store(settings.store_uri), _runs(settings), Path(cache))
        _show(watcher.check(act=act), as_json)


def _schedule_store(settings: Settings) -> "ScheduleStore":
    from evernear.common.store.current import current_store
    from evernear.triggers.watch.schedule_state import ScheduleStore

    return ScheduleStore(current_store(settings.store_uri))


def _switch(settings: Settings, on: bool) -> None:
    """A paused watcher's process continues to run."""
    from evernear.release.promotions import whoami

    _schedule_store(settings).switch(on, whoami())
    print_line(f"The watcher is {'on' if on else 'off'}.")


def _show_status(settings: Settings, as_json: bool) -> None:
    from evernear.common.store.current import current_store
    from evernear.release.bake import BakeStore

    state = _schedule_store(settings).read()
    if as_json:
        print_json(state)
        return
    bake, _ = BakeStore(current_store(settings.store_uri)).load()
    by = f" by {state.by}" if state.by else ""
    print_line(f"{'on' if state.on else 'off'} since {state.since:%Y-%m-%d %H:%M:%S} UTC{by}")
    if state.last is None:
        print_line("No check yet; `evernear watch` starts the watcher.")
    else:
        print_line(f"last check {state.last.at:%Y-%m-%d %H:%M:%S} UTC")
        _show(state.last, as_json)
    if bake is not None and bake.last:
        print_line(bake.last)


def _ship(settings: Settings, now: bool) -> None:
    from evernear.common.store.current import writable_store
    from evernear.serving import query_log
    from evernear.serving.configuration import QUERY_LOG_PERIOD_S, logged_queries
    from evernear.serving.endpoints import home_of

    log_to_stderr(logging.WARNING, settings.log_format)
    directory, store = logged_queries(home_of(settings.workdir)), writable_store(settings.store_uri)
    if now:
        shipped = query_log.ship_query_log(directory, store)
        print_line(f"Shipped {quantity(shipped, 'file')} from {directory} to {store.uri}.")
        if not shipped:
            print_line(f"The server writes a file every {QUERY_LOG_PERIOD_S:g} s if it is queried.")
        return
    stop = threading.Event()
    remains = (
        "Interrupted. Queries that are not in the store yet stay here; `evernear watch --ship` continues with them."
    )
    with stop_on_signals(stop, remains):
        print_line(f"Shipping the query log in {directory} to {store.uri} once a minute; Ctrl-C ends it.")
        query_log.ship_until(stop, directory, store)


def _runs(settings: Settings) -> "KfpRuns | None":
    """The pipeline server in the settings or in this cluster, or None."""
    if not settings.pipeline.endpoint and "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    from evernear.kubeflow.client import KfpRuns

    return KfpRuns(settings.pipeline)


def baker_of(settings: Settings, store: "Store", runs: "KfpRuns | None") -> "Baker | None":
    """The baker for releases in the cluster, or None if baking is disabled."""
    if settings.target != "kubernetes" or not settings.watch.bake_s:
        return None
    from evernear.triggers.watch.baker import PODS_SERVICE_SUFFIX, Baker, PodMetrics, addresses

    kubernetes = settings.kubernetes
    host = f"{kubernetes.name}{PODS_SERVICE_SUFFIX}.{kubernetes.namespace}.svc"
    pods = PodMetrics(lambda: addresses(host, settings.serving.metrics_port))
    return Baker(settings, store, runs, pods, lambda: datetime.now(UTC))


def _show(report: "CheckReport", as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    print_line(report.action)
    for reason in report.reasons:
        print_line(f"  - {reason}")
    for fault in report.faults:
        print_line(f"  ! {fault}")
    if report.source:
        print_line(f"    {'source':<24} {report.source}")
    for name, value in report.figures.items():
        print_line(f"    {name.replace('_', ' '):<24} {value:,.4g}")
    if report.proposal:
        print_line(f"proposal {report.proposal}")


@slack_app.callback()
def slack(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Run the Slack bot until SIGTERM or Ctrl-C. Tokens come from the environment (see
    docs/slack.md)."""
    if context.invoked_subcommand is not None:
        return
    settings = settings_anywhere(config, overrides, workdir)
    from evernear.kubeflow.client import KfpRuns
    from evernear.triggers.slack.server import serve_slack

    log_to_stderr(logging.INFO, settings.log_format)
    stop = threading.Event()
    remains = "Interrupted. All requests from Slack are stored; the next `evernear slack` continues with them."
    with stop_on_signals(stop, remains):
        serve_slack(settings, KfpRuns(settings.pipeline), stop)


@slack_app.command(hidden=True)
@options_of(settings_anywhere)
def ready(settings: Settings) -> None:
    """Probe for orchestrators: exit with 0 if the bot of this working directory is healthy,
    otherwise with 1."""
    from evernear.triggers.slack.heartbeat import is_recent

    if not is_recent(settings):
        print_line("The bot is not running or is stuck; see its log.", sys.stderr)
        raise typer.Exit(1)
    print_line("Ready.")


@options_of(run_layers)
def console(layers: Layers[Settings], port: PortOption = None, host: HostOption = None) -> None:
    """Serve web pages on which users try images, name unknown images, correct suspect labels,
    reindex, promote and roll back."""
    from evernear.console.link import LinkFile
    from evernear.console.server import require_private

    chosen = {"console.port": port, "console.host": host}
    layers = layers.with_defaults(f"{name}={value}" for name, value in chosen.items() if value is not None)
    settings = layers.settings()
    require_private(settings.console)
    again = command_for(settings.workdir, "console")
    with (
        LinkFile(settings.workdir) as link_file,
        message_on_interrupt(f"Interrupted. Every answer is stored; `{again}` continues. Runs in progress go on."),
    ):
        running = link_file.of_another()
        if running and running.port == settings.console.port:
            print_line(f"The console of {settings.workdir} is running already.")
            print_secret("\n".join(running.lines))
            return
        _serve_console(layers, settings, link_file)


def _serve_console(layers: Layers[Settings], settings: Settings, link_file: "LinkFile") -> None:
    from evernear.common.store.current import current_store
    from evernear.console.access import SignIn
    from evernear.console.backend import Backend
    from evernear.console.runs import LocalRuns, PipelineRuns
    from evernear.console.server import create_console_app, serve_console
    from evernear.release.promotions import whoami

    store = current_store(settings.store_uri)
    in_cluster = bool(settings.pipeline.endpoint) or "KUBERNETES_SERVICE_HOST" in os.environ
    runner = PipelineRuns(settings, store) if in_cluster else LocalRuns(settings, layers.later_words(keep=False))
    backend = Backend(settings, store, runner)
    for sentence in backend.answers.set_aside.values() if backend.answers else ():
        print_line(sentence)
    token = secrets.token_urlsafe(24)
    sign_in = SignIn(settings, token, whoami())

    def announce(url: str) -> None:
        query = f"?token={token}" if sign_in.by_token else ""
        lines = (f"Open {url}/{query}", f"Name unknown images and correct labels on {url}/review{query}")
        if sign_in.by_token:
            link_file.write(settings.console.port, lines)
        print_secret("\n".join(lines))

    serve_console(create_console_app(backend, sign_in), settings.console, announce)
