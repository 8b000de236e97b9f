"""``evernear deployment``: what a deployment to Kubernetes applies."""

import json
import sys
from typing import Annotated

import typer

from evernear.cli.options import local_settings, with_options
from evernear.settings import Settings

app = typer.Typer(
    rich_markup_mode="markdown", no_args_is_help=True, help="The objects that serve a release in a cluster."
)


@app.callback()
def _group() -> None:
    """Keeps the command's own name, as long as it is the only one."""


@app.command()
@with_options(settings=local_settings)
def render(
    settings: Settings,
    release: Annotated[
        str | None, typer.Option("--release", metavar="VERSION", help="Of the registry. [the champion]")
    ] = None,
) -> None:
    """Print as YAML just what a deployment would apply, for review, for policy checks or for GitOps."""
    import yaml

    from evernear.deployment.kubernetes import KubernetesTarget

    objects = KubernetesTarget(settings).render(release)
    unshared = json.loads(json.dumps(objects))  # else YAML writes what occurs twice as an alias
    sys.stdout.write(yaml.safe_dump_all(unshared, sort_keys=False, width=120))  # which escapes what is not ASCII
