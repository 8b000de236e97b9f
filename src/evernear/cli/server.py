"""``evernear status``, ``serve``, ``ready``, ``stop``, ``token`` and ``prep``."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evernear.cli.options import JsonOption, local_settings, message_on_interrupt, options_of, settings_anywhere
from evernear.common.extras import missing_library
from evernear.common.output import log_to_stderr, print_json, print_line, print_secret
from evernear.settings import Settings
from evernear.settings.layers import command_for
from evernear.settings.serving import MODEL_NAME

if TYPE_CHECKING:
    from evernear.evaluation.live_accuracy import LiveAccuracy


@options_of(local_settings)
def status(
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Show the run in progress, the server, its releases and the champion. With the kubernetes
    target, show the state of the cluster."""
    from evernear.common.progress import progress
    from evernear.common.store.current import current_store
    from evernear.deployment import open_target
    from evernear.deployment.follow import follow_state
    from evernear.kubeflow.local_run import last_outcome
    from evernear.release.registry import Registry
    from evernear.serving.endpoints import home_of

    registry = Registry(current_store(settings.store_uri))
    champion = registry.champion()
    last = last_outcome(settings.workdir)
    state: dict[str, Any] = {"run": progress(settings.workdir), "last_run": last.summary() if last else None}
    state |= open_target(settings).status()
    made = registry.pointer.made_live(champion) if champion else None
    state["champion_since"] = f"{made.since:%Y-%m-%d %H:%M} UTC, {made.sentence()}" if made else None
    if following := follow_state(home_of(settings.workdir)):
        state["follows"] = following.fault or f"the champion, release {following.version} since {following.since:%F %T}"
    state["live_accuracy"] = _live_accuracy(settings, state["champion"]) if state["champion"] else None
    if as_json:
        print_json(state)
    else:
        if state["live_accuracy"] == []:
            state["live_accuracy"] = "no labels yet; see `evernear labels import --help`"
        for key, value in state.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            print_line(f"{key.replace('_', ' '):<14} {'-' if text in (None, '') else text}")


def _live_accuracy(settings: Settings, champion: str) -> "list[LiveAccuracy] | None":
    """The champion's weekly accuracy on labeled live queries, newest first. None without SciPy."""
    from evernear.common.store import open_store
    from evernear.review.live_labels import live_accuracy

    try:
        weeks, faults = live_accuracy(open_store(settings.store_uri), champion)
    except ModuleNotFoundError as error:  # as on a machine that only serves
        print_line(f"Live accuracy is not shown: {missing_library(error) or error}", sys.stderr)
        return None
    for sentence in faults:
        print_line(sentence, sys.stderr)
    return list(weeks)


@options_of(local_settings)
def serve(
    settings: Settings,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; the server stops with this process.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until a release has been promoted, instead of failing.")
    ] = False,
    follow_champion: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Stay in the foreground, wait for the first release, and switch to each new champion of the store.",
        ),
    ] = False,
) -> None:
    """Start TorchServe with the champion, unless TorchServe is already running."""
    if follow_champion:
        _serve_and_follow(settings)
        return
    from evernear.deployment.follow import await_champion, await_exit, stopped_by_signals
    from evernear.deployment.local import serve_local as start_torchserve
    from evernear.serving.endpoints import endpoints, home_of
    from evernear.serving.torchserve import adopt, is_running

    home = home_of(settings.workdir)
    was_running = is_running(home)
    if foreground and not was_running:  # a server that was running survives a failure of this command
        adopt(home)
    state = "The TorchServe that was running continues" if was_running else "TorchServe was stopped"
    with message_on_interrupt(f"Interrupted. {state}; `{command_for(settings.workdir, 'serve')}` tries again."):
        if wait:
            await_champion(settings, lambda reason: print_line(reason, sys.stderr))
        version = start_torchserve(settings)
    url = endpoints(home).inference_url
    stop_it = command_for(settings.workdir, "stop")
    live = f"Release {version} is live at {url}/predictions/{MODEL_NAME}; `{stop_it}` stops it."
    if not foreground:
        print_line(live)
        return
    with stopped_by_signals(home):  # a script may send SIGTERM once it sees the line
        print_line(live)
        await_exit(home)


def _serve_and_follow(settings: Settings) -> None:
    from evernear.deployment.follow import Follower, stopped_by_signals
    from evernear.serving.endpoints import endpoints, home_of

    home, follower = home_of(settings.workdir), Follower(settings, lambda event: print_line(event, sys.stderr))
    with stopped_by_signals(home):
        follower.start()
        url = endpoints(home).inference_url
        print_line(f"Following {settings.store_uri}; predictions at {url}/predictions/{MODEL_NAME}.")
        follower.run()


@options_of(local_settings)
def ready(settings: Settings) -> None:
    """Readiness probe: exit with 0 if the server can answer predictions now, otherwise with 1."""
    from evernear.serving.endpoints import home_of
    from evernear.serving.torchserve import is_ready

    if not is_ready(home_of(settings.workdir), MODEL_NAME):
        print_line(f"Not ready; `{command_for(settings.workdir, 'status')}` shows details.", sys.stderr)
        raise typer.Exit(1)
    print_line("Ready.")


@options_of(local_settings)
def stop(settings: Settings) -> None:
    """Stop the local TorchServe after it has answered the requests in flight."""
    from evernear.serving.endpoints import home_of
    from evernear.serving.torchserve import stop_server as stop_torchserve

    home = home_of(settings.workdir)
    print_line("TorchServe stopped." if stop_torchserve(home) else f"TorchServe is not running in {home}.")


@options_of(local_settings)
def token(settings: Settings) -> None:
    """Print the bearer token of the inference API, for curl and other clients."""
    from evernear.serving.endpoints import home_of, read_key

    print_secret(read_key(home_of(settings.workdir), "inference"))


@options_of(settings_anywhere)
def prep(settings: Settings) -> None:
    """Run the preprocessing server, which decodes images and forwards them to TorchServe."""
    from evernear.serving.http.prep import serve_prep

    log_to_stderr(logging.INFO if settings.log_format == "json" else logging.WARNING, settings.log_format)
    with message_on_interrupt(
        "Interrupted. All requests in flight were answered; `evernear prep` starts the server again."
    ):
        serve_prep(
            settings, lambda url: print_line(f"Send images to {url}/predict; {url}/openapi.json describes the API.")
        )
