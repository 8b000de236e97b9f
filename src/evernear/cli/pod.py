"""``evernear pod``: what the containers, the probes and the hook of a serving pod run; see `evernear.serving.pod`."""

import time
from typing import Annotated

import typer

from evernear.cli.options import local_settings, with_options
from evernear.output import print_line
from evernear.settings import Settings

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="For the containers of a serving pod: fetch, serve, ready, drain.",
)


@app.command()
@with_options(settings=local_settings)
def fetch(
    settings: Settings,
    release: Annotated[str, typer.Option("--release", metavar="VERSION", help="The release that the pod serves.")],
    sha256: Annotated[str, typer.Option("--sha256", metavar="HEX", help="Of its archive, as the deployer knows it.")],
) -> None:
    """Init container: bring one release from the store to where `serve` finds it; doing so again changes nothing."""
    from evernear.serving import pod

    fetched = pod.fetch(release, sha256, settings)
    print_line(f"Release {fetched.version} is here, sha256 {sha256}.")


@app.command()
@with_options(settings=local_settings)
def serve(
    settings: Settings,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Answer whoever gets here: behind a NetworkPolicy only.")
    ] = False,
) -> None:
    """Become TorchServe with the fetched release; inference wants the token in the file EVERNEAR_TOKEN_FILE."""
    from evernear.serving import pod

    pod.serve(settings, without_token=without_token)


@app.command()
@with_options(settings=local_settings)
def ready(settings: Settings) -> None:
    """Startup probe: exit with 0 if the server answers all stored queries as when the release was archived."""
    from evernear.deployment.smoke import smoke
    from evernear.serving import pod

    with pod.client(settings) as client:
        asked = smoke(client, pod.release(settings))
    print_line(f"Ready: {asked} stored queries are answered.")


@app.command()
@with_options(settings=local_settings)
def drain(settings: Settings) -> None:
    """preStop: wait until nobody is sent here any more, `serving.endpoint_removal_s`, while the server answers."""
    time.sleep(settings.serving.endpoint_removal_s)
