"""``evernear pod``: what the containers, the probes and the hook of a serving pod run; see `evernear.serving.pod`."""

import time
from typing import Annotated

import typer

from evernear.cli.options import ConfigOption, SetOption, WorkdirOption, settings_of
from evernear.output import print_line

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="For the containers of a serving pod: fetch, serve, ready, drain.",
)


@app.command()
def fetch(
    release: Annotated[str, typer.Option("--release", metavar="VERSION", help="The release that the pod serves.")],
    sha256: Annotated[str, typer.Option("--sha256", metavar="HEX", help="Of its archive, as the deployer knows it.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Init container: bring one release from the store to where `serve` finds it; doing so again changes nothing."""
    from evernear.serving import pod

    fetched = pod.fetch(release, sha256, settings_of(None, config, overrides, workdir))
    print_line(f"Release {fetched.version} is here, sha256 {sha256}.")


@app.command()
def serve(
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Answer whoever gets here: behind a NetworkPolicy only.")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Become TorchServe with the fetched release; inference wants the token in the file EVERNEAR_TOKEN_FILE."""
    from evernear.serving import pod

    pod.serve(settings_of(None, config, overrides, workdir), without_token=without_token)


@app.command()
def ready(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """Startup probe: exit with 0 if the server answers all stored queries as when the release was archived."""
    from evernear.deployment.smoke import smoke
    from evernear.serving import pod

    settings = settings_of(None, config, overrides, workdir)
    with pod.client(settings) as client:
        asked = smoke(client, pod.release(settings))
    print_line(f"Ready: {asked} stored queries are answered.")


@app.command()
def drain(config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None) -> None:
    """preStop: wait until nobody is sent here any more, `serving.endpoint_removal_s`, while the server answers."""
    time.sleep(settings_of(None, config, overrides, workdir).serving.endpoint_removal_s)
