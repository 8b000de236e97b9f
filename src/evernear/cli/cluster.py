"""``evernear deployment``: the Kubernetes objects of a release."""

import json
import sys
from typing import Annotated

import typer

from evernear.cli.options import local_settings, with_options
from evernear.settings import Settings

app = typer.Typer(rich_markup_mode="markdown", no_args_is_help=True, help="The Kubernetes objects of a release.")


@app.callback()
def _group() -> None:
    """Make typer treat the only command as a subcommand."""


@app.command()
@with_options(settings=local_settings)
def render(
    settings: Settings,
    release: Annotated[
        str | None, typer.Option("--release", metavar="VERSION", help="Release in the registry. [the champion]")
    ] = None,
) -> None:
    """Print the objects that a deployment would apply, as YAML, for reviews, policy checks or GitOps."""
    import yaml

    from evernear.deployment.kubernetes import KubernetesTarget

    objects = KubernetesTarget(settings).render(release)
    unshared = json.loads(json.dumps(objects))  # without shared values, which YAML would write as aliases
    sys.stdout.write(yaml.safe_dump_all(unshared, sort_keys=False, width=120))  # escapes non-ASCII characters
