import logging
import sys
import threading

import typer

from evernear.cli.interrupts import stop_on_signals
from evernear.cli.options import ConfigOption, SetOption, WorkdirOption, local_settings, options_of
from evernear.common.output import log_to_stderr, print_line
from evernear.errors import SlackError
from evernear.settings import Settings

app = typer.Typer(
    name="slack",
    rich_markup_mode="markdown",
    invoke_without_command=True,
    help="The Slack bot: start runs, follow them, report their verdicts.",
)


@app.callback()
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
    settings = local_settings(config, overrides, workdir)
    try:
        from evernear.kubeflow.client import KfpRuns
        from evernear.triggers.slack.server import serve_slack
    except ModuleNotFoundError as error:
        raise SlackError(f"{error.name} is not installed; run `pip install evernear[triggers,pipeline]`.") from None

    log_to_stderr(logging.INFO, settings.log_format)
    stop = threading.Event()
    remains = "Interrupted. All requests from Slack are stored; the next `evernear slack` continues with them."
    with stop_on_signals(stop, remains):
        serve_slack(settings, KfpRuns(settings.pipeline), stop)


@app.command(hidden=True)
@options_of(local_settings)
def ready(settings: Settings) -> None:
    """Probe for orchestrators: exit with 0 if the bot of this working directory is healthy,
    otherwise with 1."""
    from evernear.triggers.slack.heartbeat import is_recent

    if not is_recent(settings):
        print_line("The bot is not running or is stuck; see its log.", sys.stderr)
        raise typer.Exit(1)
    print_line("Ready.")
