"""``evernear status``, ``serve``, ``ready``, ``stop`` and ``token``: the TorchServe of a working directory."""

import sys
from typing import Annotated

import typer

from evernear.cli.interrupts import interrupt_says
from evernear.cli.options import JsonOption, local_settings, with_options
from evernear.output import print_json, print_line
from evernear.settings import Settings


@with_options(settings=local_settings)
def status(settings: Settings, as_json: JsonOption = False) -> None:
    """Tell what serves, here or (target kubernetes) in the cluster: the server's state, its releases, the champion."""
    from evernear import deployment

    found = deployment.status(settings)
    if as_json:
        print_json(found)
    else:
        for key, value in found.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            print_line(f"{key.replace('_', ' '):<12} {'-' if shown in (None, '') else shown}")


@with_options(settings=local_settings)
def serve(
    settings: Settings,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until the server ends, and end it with this process.")
    ] = False,
) -> None:
    """Start TorchServe with the champion, if it is not up already."""
    from evernear.deployment.local import follow, serve
    from evernear.serving.endpoints import home_of
    from evernear.serving.torchserve import adopt, is_running

    home = home_of(settings.workdir)
    was_running = is_running(home)
    if foreground and not was_running:  # one that runs outlives a command that fails
        adopt(home)
    left = "The TorchServe that was running goes on" if was_running else "No process is left"
    with interrupt_says(f"Interrupted. {left}; `evernear serve` continues."):
        version = serve(settings)
    place = f"http://{settings.serving.host}:{settings.serving.inference_port}"
    print_line(
        f"Release {version} answers at {place}/predictions/{settings.serving.model_name}; `evernear stop` ends it."
    )
    if foreground:
        adopt(home)
        follow(settings)


@with_options(settings=local_settings)
def ready(settings: Settings) -> None:
    """Exit with 0 if a prediction would be answered now, else with 1: a probe for orchestrators."""
    from evernear.serving.endpoints import home_of
    from evernear.serving.torchserve import is_ready

    if not is_ready(home_of(settings.workdir), settings.serving.model_name):
        print_line("Not ready; `evernear status` tells more.", sys.stderr)
        raise typer.Exit(1)
    print_line("Ready.")


@with_options(settings=local_settings)
def stop(settings: Settings) -> None:
    """Stop the TorchServe of this working directory: what came in is answered first."""
    from evernear.deployment.local import stop
    from evernear.serving.endpoints import home_of

    print_line("TorchServe stopped." if stop(settings) else f"No TorchServe runs in {home_of(settings.workdir)}.")


@with_options(settings=local_settings)
def token(settings: Settings) -> None:
    """Print the bearer token of the inference API, for curl and other clients."""
    from evernear.serving.endpoints import home_of, read_key

    print_line(read_key(home_of(settings.workdir), "inference"))
