"""A release -> what serves, once it has proved that it answers."""

from kfp import dsl

from components import component


@component
def deploy(
    run: str,
    store: str,
    target: str,
    workdir: str,
    settings: dict,
    kubernetes: dict,
    release: dsl.Input[dsl.Model],
    verdict: dsl.Input[dsl.Artifact],
):
    """Publish the release and roll it out; fails closed when the verdict does not promote it."""
    from evernear import steps

    steps.deploy(run, store, target, workdir, settings, kubernetes, release.path, verdict.path)
