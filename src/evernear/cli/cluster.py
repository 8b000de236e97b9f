"""``evernear deployment``, the Kubernetes objects of a release, and ``evernear pod``, the commands,
probes and hooks of its containers."""

import json
import sys
from typing import Annotated

import typer

from evernear.cli.options import ReleaseOption, group, options_of, settings_anywhere
from evernear.common.output import print_line, quantity
from evernear.settings import Settings

deployment_app = group("deployment", "The Kubernetes objects of a release.")


@deployment_app.command()
@options_of(settings_anywhere)
def render(
    settings: Settings,
    release: ReleaseOption = None,
) -> None:
    """Print the Kubernetes objects that a deployment would apply, as YAML, for review, policy
    checks or GitOps."""
    import yaml

    from evernear.deployment.kubernetes import KubernetesTarget

    objects = KubernetesTarget(settings).render(release, lambda sentence: print_line(sentence, sys.stderr))
    unshared = json.loads(json.dumps(objects))  # without shared values, which YAML would write as aliases
    sys.stdout.write(yaml.safe_dump_all(unshared, sort_keys=False, width=120))  # escapes non-ASCII characters


pod_app = group("pod", "Commands of a serving pod's containers.")


@pod_app.command()
@options_of(settings_anywhere)
def fetch(
    settings: Settings,
    release: Annotated[str, typer.Option("--release", metavar="VERSION", help="The release of the pod.")],
    sha256: Annotated[str, typer.Option("--sha256", metavar="HEX", help="SHA-256 of its archive.")],
) -> None:
    """Init container: download a release from the store for `serve`. Idempotent."""
    from evernear.serving import pod

    fetched = pod.fetch_release(release, sha256, settings)
    print_line(f"Fetched release {fetched.version}, sha256 {sha256}.")


@pod_app.command()
@options_of(settings_anywhere)
def serve(
    settings: Settings,
    without_token: Annotated[
        bool,
        typer.Option("--without-token", help="Accept requests without a token. Restrict access with a NetworkPolicy."),
    ] = False,
) -> None:
    """Replace this process with TorchServe and the fetched release. EVERNEAR_TOKEN_FILE is the path
    of a file that contains the token."""
    from evernear.serving import pod

    pod.serve_pod(settings, without_token=without_token)


@pod_app.command()
@options_of(settings_anywhere)
def ready(settings: Settings) -> None:
    """Startup probe: exit with 0 if the answers to all stored queries equal the answers recorded in
    the release."""
    from evernear.deployment.target import smoke
    from evernear.serving import pod

    with pod.client(settings) as client:
        queries = smoke(client, pod.release(settings))
    print_line(f"Ready: {quantity(queries, 'stored query', 'stored queries')} passed.")
