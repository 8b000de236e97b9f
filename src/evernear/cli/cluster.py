"""``evernear deployment``: the Kubernetes objects of a release."""

import json
import sys

import typer

from evernear.cli.options import ReleaseOption, local_settings, options_of
from evernear.settings import Settings

app = typer.Typer(
    name="deployment", rich_markup_mode="markdown", no_args_is_help=True, help="The Kubernetes objects of a release."
)


@app.callback()
def _group() -> None:
    """Make Typer treat the only command as a subcommand."""


@app.command()
@options_of(local_settings)
def render(
    settings: Settings,
    release: ReleaseOption = None,
) -> None:
    """Print the Kubernetes objects that a deployment would apply, as YAML, for review, policy
    checks or GitOps."""
    import yaml

    from evernear.deployment.kubernetes import KubernetesTarget

    objects = KubernetesTarget(settings).render(release)
    unshared = json.loads(json.dumps(objects))  # without shared values, which YAML would write as aliases
    sys.stdout.write(yaml.safe_dump_all(unshared, sort_keys=False, width=120))  # escapes non-ASCII characters
